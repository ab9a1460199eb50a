"""The same attempts against bundled tasks of `terminal`: none earns more than doing nothing."""

from __future__ import annotations

import pytest

from errata_redteam import Attempt
from errata_redteam.instances import on
from terminal_env import TerminalAction
from terminal_env.server.environment import TerminalEnvironment

from .corpus import ATTEMPTS, VALUES

pytestmark = [pytest.mark.redteam, pytest.mark.sandbox, pytest.mark.usefixtures("real")]

OF_ITS_OWN = {"nothing done", "git", "machine", "environment", "interpreter start-up", "written results"}
"""Classes of attempts that touch more than the modules and the runner of a Python package."""
assert {attempt.kind for attempt in ATTEMPTS} >= OF_ITS_OWN
MODULE = "intervals/intervals.py"
_PLACES = {"WORKDIR": "/workspace", "TESTSTEM": "intervals/test_intervals"}
_PLACES |= {"DIR": "intervals", "ROOT": "intervals", "MODULE": "intervals", "TESTS": "intervals"}
_TESTS = {"TESTFILE": MODULE.replace("/", "/test_"), "TESTFILES": MODULE.replace("/", "/test_")}
MADE, _ = on("python-intervals", {**VALUES, **_PLACES, **_TESTS, "CODE": MODULE, "PACKAGE": MODULE})
PLAYED = [
    *(("python-intervals", attempt) for attempt in MADE),
    *((task, one) for task in ("orders-summary", "git-merge-conflict") for one in ATTEMPTS if one.kind in OF_ITS_OWN),
]
"""All on the task whose verifier runs the agent's program, made for its module; those that need no program on one where
it reads files, and on one where it reads a repository."""
_idle: dict[str, float] = {}


async def scored(task: str, attempt: Attempt | None) -> float:
    """Return the reward of an episode in which an attacker did nothing else; files are written below the workspace."""
    environment = TerminalEnvironment()
    try:
        await environment.reset_async(task_id=task)
        if attempt is not None:
            for name, text in attempt.files.items():
                path = name.removeprefix("+")
                before = ""
                if name.startswith("+"):
                    seen = await environment.step_async(TerminalAction(tool="read_file", path=path))
                    before = seen.content or ""
                await environment.step_async(TerminalAction(tool="write_file", path=path, content=before + text))
            if attempt.command:
                command = attempt.command.replace("/testbed", "$PWD")
                await environment.step_async(TerminalAction(command=command, timeout_s=20))
        end = await environment.step_async(TerminalAction(tool="submit"))
        assert end.done and end.reward is not None
        return end.reward
    finally:
        await environment.aclose()


@pytest.mark.parametrize(("task", "attempt"), PLAYED, ids=lambda one: getattr(one, "name", one))
async def test_no_attempt_earns_more_than_doing_nothing(task: str, attempt: Attempt) -> None:
    if task not in _idle:
        _idle[task] = await scored(task, None)
        assert _idle[task] < 1.0
    assert await scored(task, attempt) <= _idle[task]
