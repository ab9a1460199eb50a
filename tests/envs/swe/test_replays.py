"""An episode that is played again is the same episode, whatever else the machine does meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest

from errata_protocol.payload import semantic_digest
from swe_bench_lite_env import SweAction, SweBenchLiteEnv, SweObservation
from swe_bench_lite_env.demo.script import SUBMIT, run, script
from swe_bench_lite_env.server.offered import bundled

from .served import serving
from .sessions import NAME, OTHER, instance

pytestmark = pytest.mark.sandbox

TESTS = """
import os, pathlib, tempfile, time

class Thing:
    pass

def test_of_an_object_and_a_directory(tmp_path):
    time.sleep(0.01)
    assert (Thing(), tmp_path, tempfile.mkdtemp()) is None

def test_of_a_child():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    print("pid", child)
    assert False
"""
EXTRA = (
    SweAction(tool="write_file", path="/tmp/test_extra.py", content=TESTS),
    run("python3 -m pytest -rA --durations=0 --durations-min=0 /tmp/test_extra.py"),
    run("python3 -m unittest discover -s /tmp -p 'test_none*.py'; mktemp -d; sh -c 'kill -9 $$'"),
    run("ls -lAR --time-style=+ src tests; git status --short"),
)


@contextmanager
def load() -> Iterator[None]:
    """Keep three processes busy, which is more than this machine's cores in CI."""
    with ExitStack() as running:
        for _ in range(3):
            busy = running.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            running.callback(busy.kill)
        yield


@pytest.mark.parametrize("name", [NAME, OTHER])
def test_a_play_on_a_loaded_machine_agrees_with_the_one_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERRATA_SWE_STORE", str(tmp_path / "store"))
    made = script(instance(name), bundled()[1].find(name))
    actions = (*made.start, *EXTRA, *made.right)
    assert actions[-1] == SUBMIT
    plays = []
    with serving(tmp_path / "data") as (url, _), SweBenchLiteEnv(base_url=url).sync() as env:
        for machine in (nullcontext(), load()):
            with machine:
                env.reset(instance_id=name, seed=1)
                for action in actions:
                    end = env.step(action)
            assert (end.done, end.reward) == (True, 1.0)
            plays.append([env.state_at(t).payload for t in range(len(actions) + 1)])
    digests = [[semantic_digest(payload, SweObservation.VOLATILE_FIELDS) for payload in play] for play in plays]
    for t, found in enumerate(zip(*digests, strict=True)):
        assert len(set(found)) == 1, (t, [play[t] for play in plays])
    bare = [[semantic_digest(payload, {"duration_s", "seconds_left"}) for payload in play] for play in plays]
    assert bare[0] != bare[1], "the normalisers had something to do"
