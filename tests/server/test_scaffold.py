"""What `openenv init` writes, untouched: probed, served as the probe advises, forked and played in a pool."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from errata_client import EnvPool, ErrataClient
from errata_server.serve.server import Bind, build
from errata_server.settings import Settings
from tests.hangs import HANGS_S

from .local_server import LocalServer
from .test_probe import probed


@pytest.fixture(scope="module")
def scaffold(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("scaffold")
    subprocess.run(
        [sys.executable, "-m", "openenv.cli", "init", "my_env"],
        cwd=where,
        check=True,
        capture_output=True,
        timeout=HANGS_S,
    )
    return str(where / "my_env")


@pytest.mark.usefixtures("forgotten")
def test_the_scaffold_is_served_as_its_probe_advises(scaffold: str) -> None:
    found = probed(scaffold)
    assert (found["recovery"], found["outcome"]) == ("reexecute", "verified")
    assert found["options"] == ["--deterministic", "--max-sessions", "64"]
    assert "max_concurrent_envs" in found["limit"]


@pytest.mark.usefixtures("forgotten")
async def test_forks_and_a_pool_of_the_scaffold_work_with_the_advised_options(scaffold: str, tmp_path: Path) -> None:
    with LocalServer(scaffold, tmp_path, deterministic=True, max_sessions=64) as server:
        async with ErrataClient(server.url) as parent:
            await parent.reset()
            await parent.step({"message": "one"})
            child = await parent.fork(1)
            for each in (child, parent):
                assert (await each.step({"message": "both"})).observation["echoed_message"] == "both"
            await child.close()
        async with EnvPool(server.url, 4) as pool:
            await pool.reset_batch()
            assert len(await pool.step_batch([{"message": "four"}] * 4)) == 4


@pytest.mark.parametrize(
    ("target", "given", "said"),
    [
        (
            None,
            None,
            "its application allows 1 session at a time, forks included .*max_concurrent_envs.* --max-sessions 64",
        ),
        (None, 64, None),
        ("tests.environments.applications:server", None, "its application allows 2 sessions at a time"),
        ("tests.environments.applications:by_hand", None, "its application allows 1 session at a time"),
        ("tests.environments.applications:single", None, "one session at a time.* SUPPORTS_CONCURRENT_SESSIONS = True"),
        ("tests.environments.ledger:LedgerEnvironment", None, None),
    ],
)
@pytest.mark.usefixtures("forgotten")
def test_the_start_says_which_option_is_missing(
    target: str | None, given: int | None, said: str | None, scaffold: str, tmp_path: Path
) -> None:
    served = build([target or scaffold], Settings(data_dir=tmp_path), bind=Bind(), mode=None, max_sessions=given)
    text = "\n".join(served.announcement("http://0.0.0.0:8000"))
    asyncio.run(served.runtime.close())
    assert re.search(said, text) if said is not None else " at a time" not in text
    assert "ErrataClient('http://127.0.0.1:8000')" in served.example("http://0.0.0.0:8000")
