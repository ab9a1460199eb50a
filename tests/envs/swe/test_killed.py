"""kill -9 of the server while a submission is graded: it is graded anew, and answered once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from errata_protocol.errors import StateOutOfRange
from errata_server.process import ServerProcess
from swe_bench_lite_env import SweBenchLiteEnv

from .sessions import NAME, instance

SLOW = "echo 'import time; time.sleep(1)' >> src/pagelist/links.py"
"""Makes each run of the tests last a second longer: the server can be killed in the middle of one."""

pytestmark = pytest.mark.sandbox


def below(pid: int) -> Iterator[Path]:
    """Yield the directories in /proc of the processes below ``pid``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it ended
                continue
            children.setdefault(parent, []).append(int(entry.name))
    pids = [pid]
    for one in pids:
        pids += children.get(one, [])
        yield Path("/proc") / str(one)


def runs_tests(server: ServerProcess) -> bool:
    """Whether pytest runs in one of the server's sandboxes."""
    for process in below(server.process.pid):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith((b"/pytest", b"tests/test_links.py")) for word in words):
            return True
    return False


@pytest.mark.parametrize(
    "later_s",
    [
        pytest.param(0.0, id="as it begins", marks=pytest.mark.swe),
        pytest.param(0.5, id="in the middle"),
        pytest.param(1.0, id="later", marks=pytest.mark.swe),
    ],
)
@pytest.mark.parametrize("repaired", [True, False], ids=["repaired", "not repaired"])
async def test_a_submission_is_answered_once_with_its_verdict(repaired: bool, later_s: float, tmp_path: Path) -> None:
    env = {"ERRATA_SWE_STORE": str(tmp_path / "store")}
    data_dir = tmp_path / "data"
    with ServerProcess("swe_bench_lite", data_dir, env=env) as server:
        client = SweBenchLiteEnv(server.url)
        await client.reset(instance_id=NAME)
        await client.run(SLOW)
        if repaired:
            assert (await client.apply_patch(instance().patch)).observation.error_kind is None
        submitting = asyncio.create_task(client.submit())
        limit = time.monotonic() + 60.0
        while not runs_tests(server):
            assert time.monotonic() < limit and not submitting.done()
            await asyncio.sleep(0.01)
        await asyncio.sleep(later_s)
        assert not submitting.done()
        server.kill()
    with ServerProcess("swe_bench_lite", data_dir, "--port", server.url.rsplit(":", 1)[1], env=env):
        try:
            end = await asyncio.wait_for(submitting, 60.0)
            t = 3 if repaired else 2
            assert (end.done, end.reward, client.t) == (True, float(repaired), t)
            assert (await client.state()).submitted
            assert [reward.value for reward in await client.rewards() if reward.t == t] == []
            assert [row.t for row in await client.history()] == list(range(t + 1))
            with pytest.raises(StateOutOfRange):
                await client.state_at(t + 1)
        finally:
            await client.close()
