"""Submits of a whole batch that wait for few grading slots, through `environment_factory`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from errata_server.process import ServerProcess
from errata_trainer.episodes.tools import PlayedEnvironment, Tool
from errata_trainer.recipes.trl import environment_factory

pytestmark = pytest.mark.training

SUBMIT = Tool("submit", "Have it graded.", {"type": "object", "properties": {}}, {"tool": "submit"})
QUEUEING = PlayedEnvironment("queueing", {"submit": SUBMIT}, closing_tool="submit")


def test_200_queued_submits_all_get_their_verdict(tmp_path: Path) -> None:
    """The last one waits 2 s: twice the step deadline, seven times as long as the trainer waits for other steps."""
    options = ("--step-timeout", "1", "--no-fsync")
    with ServerProcess("tests.server.queueing:ASYNC", tmp_path, *options) as server:
        factory = environment_factory(server.url, QUEUEING)
        students = [factory() for _ in range(200)]
        for student in students:
            student.reset()  # takes what it takes
            student._runner._session._async._message_timeout = 0.3
        with ThreadPoolExecutor(200) as pool:
            rewards = list(pool.map(lambda student: student.get_reward(), students))
        for student in students:
            student._runner.close()
    assert rewards == [1.0] * 200
