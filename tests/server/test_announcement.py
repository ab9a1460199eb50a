"""What ``errata serve`` says when its port is open."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from errata_protocol.environment import Recovery
from errata_server.environments.recovery_class import recovery_of
from errata_server.process import ServerProcess
from errata_server.serve.server import Bind, build
from errata_server.settings import Settings
from tests.hangs import HANGS_S

from .environments import CountEnvironment
from .repeatable import DiceEnvironment, UndeclaredEnvironment

UNDECLARED = "tests.server.repeatable:UndeclaredEnvironment"
COUNT = "tests.server.environments:CountEnvironment"


def said(server: ServerProcess) -> str:
    """Return the lines that stand behind that of the address; the snippet's last one is waited for."""
    for _ in range(1000):
        lines = list(server.log)
        at = next((i for i, line in enumerate(lines) if "serving" in line), None)
        if at is not None and any("env.reset()" in line for line in lines[at:]):
            return "".join(lines[at:])
        server._lines.get(timeout=60)
    raise AssertionError("no snippet")


def test_each_environment_says_what_becomes_of_its_sessions_and_the_snippet_runs(tmp_path: Path) -> None:
    with ServerProcess(UNDECLARED, tmp_path, COUNT) as server:
        text = said(server)
        none, snapshot = text.splitlines()[1:3]
        assert none.startswith("errata: UndeclaredEnvironment: recovery none: ")
        assert "cannot be forked and do not survive a restart" in none and f"errata probe {UNDECLARED}" in none
        assert snapshot.startswith("errata: CountEnvironment: recovery snapshot: ") and "can be forked" in snapshot
        assert "/web" not in text
        assert f"in the browser: {server.url}/viewer/\n" in text
        snippet = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))
        assert f"{server.url}/UndeclaredEnvironment" in snippet
        ran = subprocess.run(
            [sys.executable, "-c", snippet], capture_output=True, text=True, timeout=HANGS_S, check=False
        )
        assert ran.returncode == 0 and "text" in ran.stdout, ran.stderr


def test_one_that_is_declared_deterministic_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_WEB_INTERFACE", "false")  # the page itself is not asked for, its libraries take seconds
    settings = Settings(data_dir=tmp_path)
    served = build([UNDECLARED], settings, bind=Bind(), mode=None, deterministic=True)
    monkeypatch.setenv("ENABLE_WEB_INTERFACE", "true")
    text = "\n".join(served.announcement("http://here"))
    assert "UndeclaredEnvironment: recovery reexecute: its sessions survive a restart by running their requests" in text
    assert "web interface at http://here/web" in text
    listening = "\n".join(served.announcement("http://0.0.0.0:8000"))
    assert "in the browser: http://127.0.0.1:8000/viewer/" in listening
    asyncio.run(served.runtime.close())


def undeclared() -> UndeclaredEnvironment:
    return UndeclaredEnvironment()


def dice(n: int = 0) -> DiceEnvironment:
    return DiceEnvironment()


def silent():  # type: ignore[no-untyped-def]
    return DiceEnvironment()


def count() -> CountEnvironment:
    return CountEnvironment()


@pytest.mark.parametrize(
    ("factory", "recovery"),
    [
        (undeclared, Recovery.NONE),
        (dice, Recovery.REEXECUTE),
        (functools.partial(dice, 3), Recovery.REEXECUTE),
        (count, Recovery.SNAPSHOT),
        (silent, Recovery.NONE),
    ],
)
def test_a_function_has_the_class_of_what_it_says_it_returns(factory: object, recovery: Recovery) -> None:
    assert recovery_of(factory).name is recovery


def test_production_mode_names_no_viewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_MODE", "simulation")  # `build` sets it for what a target imports: undone at the end
    served = build([COUNT], Settings(data_dir=tmp_path), bind=Bind(), mode="production", deterministic=False)
    assert "/viewer" not in "\n".join(served.announcement("http://here"))
    asyncio.run(served.runtime.close())
