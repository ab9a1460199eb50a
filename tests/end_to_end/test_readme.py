"""README's programs run as they are written there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from errata_client import ErrataClient
from errata_server.process import ServerProcess

README = (Path(__file__).parents[2] / "README.md").read_text()


def program(*, using: str) -> str:
    """Return the Python block of the README that has this text."""
    (found,) = [block for part in README.split("```python\n")[1:] if using in (block := part.split("```")[0])]
    return found


@pytest.mark.sandbox
def test_the_client_prints_what_it_says(tmp_path: Path) -> None:
    with ServerProcess("terminal", tmp_path) as server:
        text = program(using="TerminalEnv").replace("http://127.0.0.1:8000", server.url)
        ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    _, kind, site = ran.stdout.rsplit("\n", 3)[:3]
    assert kind == "path_not_found" and "t=1" in site and "action_span=(4, 16)" in site


@pytest.fixture
def scaffold(tmp_path: Path) -> Path:
    """Return the directory that the README's `openenv init my_env` makes."""
    made = [str(Path(sys.executable).with_name("openenv")), "init", "my_env"]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "my_env"


def test_the_environment_that_takes_snapshots_survives_and_forks(
    scaffold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scaffold.parent / "forkable.py").write_text(program(using="restore(self, snapshot"))
    monkeypatch.chdir(scaffold.parent)
    monkeypatch.setenv("PYTHONPATH", str(scaffold.parent))

    async def play(url: str, sid: str | None) -> str:
        async with ErrataClient(url, session_id=sid, durable=True) as env:
            if sid is None:
                await env.reset()
            await env.step({"message": "hello"})
            async with await env.fork(env.t or 0) as child:
                await child.step({"message": "hello again"})
                seen: Any = (await child.state())["step_count"]
            assert seen == 1, "a child counts from its fork"
            return env.session_id or ""

    models = ("--action", "my_env.models:MyAction", "--observation", "my_env.models:MyObservation")
    data, sid = scaffold.parent / "data", None
    for _ in range(2):
        with ServerProcess("forkable:ForkableEnvironment", data, *models) as server:
            sid = asyncio.run(play(server.url, sid))
            server.kill()
