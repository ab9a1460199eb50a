"""swe_bench_lite behind real doors: nothing of the solution leaves it, and what it sent is what it sends again."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openenv.cli._validation import validate_running_environment
from typer.testing import CliRunner

import swe_bench_lite_env
from errata_protocol.errors import InvalidRequest
from errata_server.cli import commands
from errata_server.process import ServerProcess
from swe_bench_lite_env import SweAction, SweBenchLiteEnv, agent_text
from swe_bench_lite_env.server import offered
from tests.hangs import HANGS_S

from .served import GOLD, SECRET, TOKENS, serving
from .served import offer_secret as offer
from .sessions import NAME, instance

pytestmark = pytest.mark.sandbox


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    offer(tmp_path, monkeypatch)
    yield
    offered._offered.cache_clear()


def found_in(data: bytes) -> list[str]:
    """Return the columns whose secret stands in some bytes, as they are or as JSON escapes them."""
    return [column for column, token in TOKENS.items() if token.encode() in data]


HUNTS = (
    f"grep -rlI {TOKENS['patch'][:8]} /testbed /home /opt /tmp /var /etc 2>/dev/null; env",
    "cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; mount",
    "git log --all -p; git reflog; git fsck --lost-found; git stash list; find .git -type f | head -50",
    "python3 -m pytest -rA tests; ls -laR /home /opt /tmp /var/tmp /srv /mnt 2>/dev/null",
    "find /testbed /home /opt /tmp /var -xdev -newermt 2025-12-31 -type f 2>/dev/null | xargs -r cat",
)
"""What an agent tries that looks for the solution instead of the bug."""


@pytest.mark.usefixtures("secret")
def test_nothing_of_the_solution_and_the_tests_is_in_any_byte_sent(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with serving(data_dir) as (url, recorded):
        for ending in ("nothing", "gold", "broken"):
            with SweBenchLiteEnv(base_url=url).sync() as env:
                env.reset(instance_id=SECRET)
                for command in () if ending == "gold" else HUNTS:  # before the first grading, and after two
                    env.run(command)
                if ending == "gold":
                    assert env.apply_patch(GOLD.format(mark="")).observation.error_kind is None
                if ending == "broken":
                    env.write_file("src/adder.py", "def add(a, b):\n    print('x' * 10)\n    raise SystemExit(3)\n")
                end = env.submit()
                assert (end.done, end.reward) == (True, float(ending == "gold"))
                eid = env.eid
                env.state()
                for t in range(3 if ending == "gold" else len(HUNTS) + 2):
                    env.state_at(t)
                with pytest.raises(InvalidRequest):
                    env.run("true")  # the episode is over
                with pytest.raises(InvalidRequest):
                    env.reset(instance_id="errata-examples__secret-2")
        with httpx.Client(base_url=url) as http:
            for path in ("/metadata", "/schema", "/state", "/health", "/metrics", "/capabilities", "/episodes", "/web"):
                http.get(path)
            for path in (f"/episodes/{eid}", f"/episodes/{eid}/rewards", f"/episodes/{eid}/bundle", "/openapi.json"):
                assert http.get(path).status_code == 200, path
            assert {"name": "bundled", "type": "train"} in http.get("/swe_bench_lite/splits").json()
            tasks = http.post("/swe_bench_lite/tasks", json={"split": "bundled"}).json()["tasks"]
            assert all(set(task) == {"instance_id", "prompt"} for task in tasks) and len(tasks) == 8
            one = http.post("/swe_bench_lite/task", json={"split": "bundled", "index": 7}).json()["task"]
            assert one == {"instance_id": SECRET, "prompt": "add(1, 2) is -1."}
            http.post("/swe_bench_lite/task_range", json={"split": "bundled", "start": 0, "stop": 8})
            http.post("/swe_bench_lite/task", json={"split": "bundled", "index": 99})
            http.post("/swe_bench_lite/tasks", json={"split": "test"})
            http.post("/reset", json={"instance_id": SECRET})
            http.post("/step", json={"action": {"tool": "submit"}})
    sent = b"\n".join(recorded.sent)
    assert sent.count(b"add(1, 2) is -1.") >= 5, "the recorder keeps what is sent"
    assert b"test_zero" in sent, "what the agent's own runs print is there"
    assert found_in(sent) == []

    # What is exported, and the journal that it is exported from.
    runner = CliRunner()
    for format in ("jsonl", "parquet"):
        for by in ("turn", "episode"):
            out = tmp_path / f"{by}.{format}"
            told = ["journal", "export", "-o", str(out), "--format", format, "--by", by, "--agent-text"]
            done = runner.invoke(commands.cli, [*told, "--data-dir", str(data_dir)])
            assert done.exit_code == 0, done.output
            assert found_in(out.read_bytes()) == []
    done = runner.invoke(
        commands.cli, ["episode", "export", eid, "-o", str(tmp_path / "b"), "--data-dir", str(data_dir)]
    )
    assert done.exit_code == 0 and found_in((tmp_path / "b").read_bytes()) == []
    for path in data_dir.rglob("*"):
        # Layers that gradings start from hold the tests; what a session sees of the layers was sent above.
        if path.is_file() and not path.is_symlink() and (data_dir / "sandboxes") not in path.parents:
            content = path.read_bytes()
            assert found_in(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content) == [], path


@pytest.mark.usefixtures("secret")
def test_the_search_for_secrets_finds_them_where_they_are() -> None:
    row = json.dumps(offered.bundled()[0].find(SECRET).row()).encode()
    assert found_in(row) == list(TOKENS)
    assert SECRET in repr(offered.bundled()[0].find(SECRET)) and found_in(repr(offered.bundled()[0][7]).encode()) == []


def scripted(env: Any) -> list[Any]:
    """Play an episode that errs and repairs, and return its results."""
    gold = instance().patch
    actions = (
        SweAction(tool="run", command="cd src && python -m pytest -q ../tests"),
        SweAction(tool="search", pattern="per_page"),
        SweAction(tool="read_file", path="pagelist/nothing.py"),
        SweAction(tool="apply_patch", patch=gold.replace("full, rest", "all, rest")),
        SweAction(tool="edit", path="pagelist/links.py", old_text="GAP = None", new_text="GAP = None +"),
        SweAction(tool="run", command="python -c 'import pagelist'; python -m pytest -q ../tests"),
        SweAction(tool="edit", path="pagelist/links.py", old_text="GAP = None +", new_text="GAP = None"),
        SweAction(tool="apply_patch", patch=gold),
        SweAction(tool="submit"),
    )
    return [env.step(action) for action in actions]


def test_an_episode_is_replayed_byte_for_byte_forked_and_continued_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERRATA_SWE_STORE", str(tmp_path / "store"))
    data_dir = tmp_path / "data"
    with ServerProcess("swe_bench_lite", data_dir) as server:
        env = SweBenchLiteEnv(base_url=server.url).sync()
        env.connect()
        first = env.reset(instance_id=NAME)
        eid, read = env.eid, [agent_text(first.observation)]
        results = scripted(env)
        read += [agent_text(result.observation) for result in results]
        kinds = [result.observation.error_kind for result in results]
        assert kinds == [
            None,
            None,
            "path_not_found",
            "patch_failed",
            None,
            "syntax_error",
            None,
            None,
            None,
        ]
        broken = results[5].observation.error_site
        assert broken.file == "src/pagelist/links.py" and broken.line == 3
        assert results[-1].reward == 1.0
        sent = [env.state_at(t).payload for t in range(10)]
        # A fork from before the repair: the parent's state, its files and its shell, and another end.
        child = env.fork(6, eid=eid)
        assert child.state_at(0).payload == sent[6]
        seen = child.run("pwd; git diff --stat | tail -1").observation.stdout
        assert seen.startswith("/testbed/src\n 1 file changed")
        assert child.state().turns_left == 200 - 6 - 1
        assert child.submit().reward == 0.0
        child.close()
        other = SweBenchLiteEnv(base_url=server.url).sync()
        other.connect()
        other.reset(instance_id=NAME)
        other.run("cd src; export MARK=1; echo kept > ../note")
        before = [other.state_at(t).payload for t in range(2)]
        server.kill()
        with ServerProcess("swe_bench_lite", data_dir, "--port", server.url.rsplit(":", 1)[1]):
            assert [env.state_at(t, eid=eid).payload for t in range(10)] == sent
            texts = [agent_text(json.loads(payload)["observation"]) for payload in sent]
            assert texts == read
            assert [other.state_at(t).payload for t in range(2)] == before
            seen = other.run("pwd; echo $MARK; cat ../note")
            assert seen.observation.stdout == "/testbed/src\n1\nkept\n" and seen.observation.turns_left == 198
            other.apply_patch(instance().patch)
            assert other.submit().reward == 1.0
            other.close()
            env.close()


def test_three_sessions_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SWE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("ERRATA_SWE_MAX_SECONDS", "none")
    plays = []
    with serving() as (url, _):
        for _ in range(3):
            with SweBenchLiteEnv(base_url=url).sync() as env:
                env.reset(instance_id=NAME, seed=1, episode_id="same")
                observations = [result.observation.model_dump(mode="json") for result in scripted(env)]
            for observation in observations:
                observation.pop("duration_s")
                observation["stdout"] = observation["stdout"].rsplit(" in ", 1)[0]  # pytest's own time
            plays.append(observations)
    assert plays[0] == plays[1] == plays[2]


def test_discounted_credits_reach_the_rewards_channel_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SWE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("ERRATA_SWE_DISCOUNT", "0.5")
    with serving(tmp_path / "data") as (url, _), SweBenchLiteEnv(base_url=url).sync() as env:
        env.reset(instance_id=NAME)
        steps = [env.run("true"), env.apply_patch(instance().patch), env.submit()]
        assert [step.reward for step in steps] == [0.0, 0.0, 1.0]
        rewards = httpx.get(f"{url}/episodes/{env.eid}/rewards").json()
        rows = rewards["rewards"] if isinstance(rewards, dict) else rewards
        assert {(row["t"], row["value"], row["source"]) for row in rows} == {
            (1, 0.25, "environment"),
            (2, 0.5, "environment"),
            (3, 1.0, "environment"),
        }


def test_stock_openenv_serves_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SWE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("ERRATA_DATA_DIR", str(tmp_path / "data"))
    script = (
        "import json, sys\n"
        "from fastapi.testclient import TestClient\n"
        "from openenv.core.env_server.http_server import create_app\n"
        "from swe_bench_lite_env import SweAction, SweObservation\n"
        "from swe_bench_lite_env.server.environment import SweBenchLiteEnvironment as E\n"
        "app = create_app(E, SweAction, SweObservation, env_name='swe_bench_lite', max_concurrent_envs=2)\n"
        "with TestClient(app) as client, client.websocket_connect('/ws') as socket:\n"
        "    def ask(type_, **data):\n"
        "        socket.send_json({'type': type_, 'data': data})\n"
        "        reply = socket.receive_json()\n"
        "        assert reply['type'] != 'error', reply\n"
        "        return reply['data']\n"
        f"    ask('reset', instance_id={NAME!r})\n"
        "    ask('step', tool='apply_patch', patch=sys.stdin.read())\n"
        "    print(ask('step', tool='submit')['reward'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=instance().patch, capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["1.0"]


def test_openenv_validates_the_package_and_a_running_server(tmp_path: Path) -> None:
    package = Path(str(swe_bench_lite_env.__file__)).parent.resolve()
    command = [sys.executable, "-m", "openenv.cli", "validate", str(package), "--level", "static", "--skip-build"]
    done = subprocess.run([*command, "--output", str(tmp_path / "r")], capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    declared = yaml.safe_load((package / "openenv.yaml").read_text())["validation"]["capabilities"]
    assert declared["declared_task_count"] == {"bundled": len(offered.bundled()[0])}
    with serving() as (url, _):
        report = validate_running_environment(url)
    assert report["passed"], [criterion for criterion in report["criteria"] if not criterion["passed"]]
