"""Submits of a whole batch that wait for few grading slots, through `environment_factory`."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from errata_server.settings import Settings
from errata_trainer.episodes.tools import PlayedEnvironment, Tool
from errata_trainer.recipes.trl import environment_factory
from tests.machine_speed import SLOWDOWN
from tests.server import queueing
from tests.server.conftest import until
from tests.server.local_server import LocalServer

pytestmark = pytest.mark.training

SUBMIT = Tool("submit", "Have it graded.", {"type": "object", "properties": {}}, {"tool": "submit"})
QUEUEING = PlayedEnvironment("queueing", {"submit": SUBMIT}, closing_tool="submit")
ROLLOUTS = 20


async def test_queued_submits_all_get_their_verdict(tmp_path: Path) -> None:
    """They wait for longer than the server's deadline of other steps and than the trainer waits for those."""
    deadline_s = SLOWDOWN
    settings = Settings(fsync=False, step_timeout_s=deadline_s)
    with (
        LocalServer("tests.server.queueing:ASYNC", tmp_path, settings) as server,
        ThreadPoolExecutor(ROLLOUTS) as pool,
    ):
        factory = environment_factory(server.url, QUEUEING)
        students = [factory() for _ in range(ROLLOUTS)]
        for student in students:
            student.reset()  # takes what it takes
            student._runner._session._async._message_timeout = deadline_s
        async with queueing.held():
            rewards = [asyncio.wrap_future(pool.submit(student.get_reward)) for student in students]
            await until(lambda: queueing.waiting() == ROLLOUTS)
            await asyncio.sleep(1.5 * deadline_s)
            assert not any(reward.done() for reward in rewards)
        assert await asyncio.gather(*rewards) == [1.0] * ROLLOUTS
        for student in students:
            student._runner.close()
