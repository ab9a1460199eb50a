"""Episodes of an asynchronous recipe: the same as those of `EpisodeRunner`, with deadlines, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from scripted_session import ScriptedSession

from errata_client import Episodes
from errata_protocol.episode_lists import EpisodeFilter
from errata_protocol.errors import (
    CapacityReached,
    EnvironmentFailed,
    InvalidRequest,
    SandboxFailed,
    SessionLost,
    StepTimeout,
)
from errata_protocol.labels import Labels
from errata_server.simulation import run, simulated
from errata_trainer.episodes.awaited import CALL_DEADLINE, EPISODE_DEADLINE, AwaitedRunner
from errata_trainer.episodes.playing import EpisodeRunner
from errata_trainer.episodes.record import LOST
from errata_trainer.episodes.served import Connect
from errata_trainer.episodes.tools import PlayedEnvironment, of_spec
from tests.environments.shelf import SPEC, TOGETHER
from tests.server.local_server import LocalServer

SHELF = of_spec(SPEC)
OPEN = PlayedEnvironment("open", SHELF.tools)
"""An environment without a closing tool."""

MISSING = {"error_kind": "path_not_found", "hint_template_key": "fs.missing", "severity": "error"}


class World:
    """What the sessions of one runner answer, in order, and what they were asked.

    Args:
        answers: For each reset and step an exception, or text, reward, done and the seconds it takes; for a connect
            that is refused the exception.
    """

    def __init__(self, answers: list[Any]) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.sessions = 0

    def connect(self) -> Session:
        self.asked.append("connect")
        self.sessions += 1
        if self.answers and isinstance(self.answers[0], CapacityReached):
            raise self.answers.pop(0)
        return Session(self)

    async def connect_awaited(self) -> AwaitedSession:
        return AwaitedSession(self.connect())


class Session(ScriptedSession):
    """A session that tells its world when it is closed."""

    def __init__(self, world: World) -> None:
        super().__init__(world.answers, world.asked, f"e-{world.sessions}")
        self.number = world.sessions

    def close(self) -> None:
        self.asked.append(f"close {self.number}")


class AwaitedSession:
    """The same session, awaited."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def eid(self) -> str | None:
        return self._session.eid

    @property
    def t(self) -> int | None:
        return self._session.t

    async def reset(self, **task: Any) -> Any:
        result = self._session.reset(**task)
        await asyncio.sleep(self._session.slow_s)
        return result

    async def step(self, action: Any) -> Any:
        result = self._session.step(action)
        await asyncio.sleep(self._session.slow_s)
        return result

    async def close(self) -> None:
        self._session.close()


RESET, READ, SUBMIT, FINISH = (
    ("reset",),
    ("call", "read", {"path": "red"}),
    ("call", "submit", {"word": "owl"}),
    "finish",
)
GO, A, RIGHT = ("go", None, False), ("a", 0.25, False), ("right", 1.0, True)

STORIES: dict[str, tuple[list[Any], list[Any]]] = {
    "all well": ([GO, A, RIGHT], [RESET, READ, SUBMIT, FINISH, FINISH]),
    "the reset pays": ([("go", 9.0, False), RIGHT], [RESET, SUBMIT, FINISH]),
    "a failing call": ([GO, ("no", None, False, MISSING), RIGHT], [RESET, READ, SUBMIT, FINISH]),
    "arguments refused by the tool": ([GO, RIGHT], [RESET, ("call", "read", {"file": "red"}), SUBMIT, FINISH]),
    "arguments refused by the environment": ([GO, InvalidRequest("too long"), RIGHT], [RESET, READ, SUBMIT, FINISH]),
    "unknown tool": ([GO, RIGHT], [RESET, ("call", "open", {}), SUBMIT, FINISH]),
    "done": ([GO, RIGHT], [RESET, SUBMIT, READ, FINISH]),
    "done at the reset": ([("go", None, True)], [RESET, READ, FINISH]),
    "called after the end": ([GO, A, RIGHT], [RESET, READ, FINISH, READ, FINISH]),
    "no capacity at first": ([CapacityReached("1/1 sessions active")], [RESET, READ, FINISH]),
    "no capacity later": ([GO, SessionLost("gone"), CapacityReached("1/1")], [RESET, READ, RESET, READ, FINISH]),
    "session lost": ([GO, A, SessionLost("gone"), GO, RIGHT], [RESET, READ, READ, READ, FINISH, RESET, SUBMIT, FINISH]),
    "sandbox failed": ([GO, SandboxFailed("gone")], [RESET, READ, FINISH]),
    "environment failed": ([GO, EnvironmentFailed("raised")], [RESET, READ, FINISH]),
    "step timed out": ([GO, StepTimeout("late")], [RESET, READ, FINISH]),
    "client timed out": ([GO, TimeoutError()], [RESET, READ, FINISH]),
    "cut": ([GO, ConnectionError("cut")], [RESET, READ, FINISH]),
    "reset lost": ([ConnectionError("nobody there"), GO, RIGHT], [RESET, READ, FINISH, RESET, SUBMIT, FINISH]),
    "another task": ([InvalidRequest("no task x"), GO, RIGHT], [RESET, RESET, FINISH]),
    "closing tool": ([GO, A, RIGHT], [RESET, READ, FINISH, FINISH]),
    "closing tool fails": ([GO, A, SandboxFailed("gone")], [RESET, READ, FINISH, FINISH]),
    "closing tool refused": ([GO, InvalidRequest("word is missing"), RIGHT], [RESET, FINISH, FINISH]),
    "no reset": ([], [READ, FINISH]),
    "closed": ([GO, GO, RIGHT], [RESET, "close", READ, FINISH, RESET, SUBMIT, FINISH, "close"]),
}


def named(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)


def outcome(runner: EpisodeRunner | AwaitedRunner) -> list[Any]:
    shown = [runner.eid, runner.opening, runner.played, runner.task, runner.lost, runner.done]
    return [*shown, runner.deliveries(), runner.record.to_json()]


def blocking(answers: list[Any], steps: list[Any], environment: PlayedEnvironment) -> tuple[list[Any], list[Any]]:
    world, seen = World(answers), []
    runner = EpisodeRunner(environment, world.connect)
    for step in steps:
        try:
            if step[0] == "reset":
                said: Any = runner.reset({"place": "red"})
            else:
                said = runner.call(*step[1:]) if step[0] == "call" else getattr(runner, step)()
        except Exception as error:
            said = named(error)
        seen.append([step, said, *outcome(runner)])
    return seen, world.asked


async def awaited(answers: list[Any], steps: list[Any], environment: PlayedEnvironment) -> tuple[list[Any], list[Any]]:
    world, seen = World(answers), []
    runner = AwaitedRunner(environment, world.connect_awaited, call_s=10.0, episode_s=100.0)
    for step in steps:
        try:
            if step[0] == "reset":
                said: Any = await runner.reset({"place": "red"})
            else:
                said = await (runner.call(*step[1:]) if step[0] == "call" else getattr(runner, step)())
        except Exception as error:
            said = named(error)
        seen.append([step, said, *outcome(runner)])
    return seen, world.asked


@pytest.mark.parametrize("environment", [SHELF, OPEN], ids=["closing tool", "no closing tool"])
@pytest.mark.parametrize("story", STORIES)
def test_both_runners_tell_the_same_story(story: str, environment: PlayedEnvironment) -> None:
    answers, steps = STORIES[story]
    ours, asked = run(awaited(answers, steps, environment))
    theirs, expected = blocking(answers, steps, environment)
    assert ours == theirs
    assert asked == expected


def test_a_lost_story_tells_why() -> None:
    codes = {}
    for story in ("session lost", "sandbox failed", "step timed out", "client timed out", "cut", "no capacity later"):
        answers, steps = STORIES[story]
        world = World(answers)
        runner = EpisodeRunner(SHELF, world.connect)
        for step in steps[: steps.index(FINISH)]:
            runner.reset({}) if step[0] == "reset" else runner.call(*step[1:])
        codes[story] = runner.record.lost_code
    assert codes == {
        "session lost": "SESSION_LOST",
        "sandbox failed": "SANDBOX_FAILED",
        "step timed out": "TIMEOUT",
        "client timed out": "TimeoutError",
        "cut": "ConnectionError",
        "no capacity later": "CAPACITY_REACHED",
    }


@simulated
async def test_a_call_that_takes_too_long_loses_its_episode_at_the_deadline_exactly() -> None:
    world = World([GO, ("a", 1.0, False, 29.0), ("late", 1.0, False, 30.1), GO, RIGHT])
    runner = AwaitedRunner(SHELF, world.connect_awaited, call_s=30.0)
    await runner.reset({})
    assert await runner.call("read", {"path": "red"}) == "a"
    assert runner.spent_s == 29.0
    assert await runner.call("read", {"path": "red"}) == LOST
    assert asyncio.get_running_loop().time() == runner.spent_s == 59.0
    assert runner.lost == f"{CALL_DEADLINE}: read of shelf took longer than call_s=30 s"
    assert runner.record.lost_code == CALL_DEADLINE and await runner.finish() is None
    assert world.asked[-1] == "close 1" and runner.played[-1].text == LOST
    await runner.reset({})
    assert (runner.spent_s, runner.lost, await runner.finish()) == (0.0, None, 1.0)
    assert world.sessions == 2, "the next episode has a session of its own"


@simulated
async def test_only_time_in_the_environment_counts_for_the_episodes_deadline() -> None:
    steps = [("a", 1.0, False, 4.0)] * 3
    world = World([("go", None, False, 1.0), *steps])
    runner = AwaitedRunner(SHELF, world.connect_awaited, call_s=30.0, episode_s=10.0)
    await runner.reset({})
    for _ in range(2):
        await asyncio.sleep(1000.0)  # the student thinks, or waits for the trainer
        assert await runner.call("read", {"path": "red"}) == "a"
    assert await runner.call("read", {"path": "red"}) == LOST
    assert asyncio.get_running_loop().time() == 2010.0
    assert runner.record.lost_code == EPISODE_DEADLINE
    assert runner.lost == f"{EPISODE_DEADLINE}: the episode of shelf spent episode_s=10 s there, at read"


@simulated
async def test_the_reset_and_the_closing_tool_have_the_deadline_too() -> None:
    slow = AwaitedRunner(SHELF, World([("go", None, False, 5.1)]).connect_awaited, call_s=5.0)
    assert await slow.reset({}) == LOST and await slow.finish() is None
    assert slow.lost == f"{CALL_DEADLINE}: reset of shelf took longer than call_s=5 s"
    closing = AwaitedRunner(SHELF, World([GO, ("graded", 1.0, True, 5.1)]).connect_awaited, call_s=5.0)
    await closing.reset({})
    assert await closing.finish() is None
    assert closing.lost == f"{CALL_DEADLINE}: submit of shelf took longer than call_s=5 s"

    async def connect() -> AwaitedSession:
        await asyncio.sleep(3600.0)
        raise AssertionError("it is cancelled")

    nowhere = AwaitedRunner(SHELF, connect, episode_s=5.0)
    assert await nowhere.reset({}) == LOST and nowhere.record.lost_code == EPISODE_DEADLINE


@simulated
async def test_a_timeout_of_the_client_is_not_called_a_deadline() -> None:
    runner = AwaitedRunner(SHELF, World([GO, TimeoutError("no reply within 7 s")]).connect_awaited, call_s=5.0)
    await runner.reset({})
    await runner.call("read", {"path": "red"})
    assert runner.lost == "TimeoutError: no reply within 7 s" and runner.record.lost_code == "TimeoutError"


@simulated
async def test_a_call_that_is_cancelled_loses_its_episode_and_no_other() -> None:
    worlds = [World([GO, ("a", 1.0, False, 5.0), RIGHT]) for _ in range(2)]
    runners = [AwaitedRunner(SHELF, world.connect_awaited) for world in worlds]
    for runner in runners:
        await runner.reset({})
    calls = [asyncio.create_task(runner.call("read", {"path": "red"})) for runner in runners]
    await asyncio.sleep(1.0)
    calls[0].cancel()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError) and found[1] == "a"
    assert runners[0].record.lost_code == "CANCELLED" and await runners[0].finish() is None
    assert await runners[0].call("read", {"path": "red"}) == LOST
    await runners[0].close()
    assert worlds[0].asked[-1] == "close 1", "who cancels a call closes the runner"
    assert (runners[1].lost, await runners[1].finish()) == (None, 2.0)


@pytest.mark.parametrize("limits", [{"call_s": 0.0}, {"episode_s": -1.0}, {"call_s": float("nan")}])
def test_deadlines_are_positive(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="give a positive number of seconds"):
        AwaitedRunner(SHELF, World([]).connect_awaited, **limits)


def test_episodes_of_a_loop_wait_side_by_side_on_one_connection(tmp_path: Path) -> None:
    async def play(runner: AwaitedRunner, number: int) -> float | None:
        try:
            await runner.reset({"place": "red", "word": "owl"})
            await runner.call("read", {"path": "together"})  # waits for all the others
            if number == 3:
                await runner.call("read", {"path": "broken"})
            await runner.call("submit", {"word": "owl" if number else "elk"})
            return await runner.finish()
        finally:
            await runner.close()

    async def main(url: str) -> None:
        connect = Connect(url, (), 600.0, 2)
        runners = [AwaitedRunner(SHELF, connect.connected) for _ in range(TOGETHER)]
        rewards = await asyncio.gather(*(play(runner, number) for number, runner in enumerate(runners)))
        assert rewards == [0.0, 1.0, 1.0, None, *[1.0] * (TOGETHER - 4)]
        assert len({runner.eid for runner in runners}) == TOGETHER
        assert [runner.record.lost_code for runner in runners if runner.lost] == ["EXECUTION_ERROR"]
        first = runners[1].played[0]
        assert first.marker is not None and first.marker.error_kind == "path_not_found" and first.t == 1

    with LocalServer("tests.environments.shelf:SPEC", tmp_path) as server:
        asyncio.run(main(server.url))


def test_a_client_that_cannot_connect_is_lost_and_leaves_nothing_open() -> None:
    async def main() -> None:
        runner = AwaitedRunner(SHELF, Connect("http://127.0.0.1:9", (), 1.0, 0).connected)
        assert await runner.reset({}) == LOST
        assert (
            runner.record.lost_code in ("ConnectionError", "ConnectionRefusedError") and await runner.finish() is None
        )

    asyncio.run(main())


async def test_an_awaited_episode_has_the_labels_of_its_runner(tmp_path: Path) -> None:
    with LocalServer("tests.environments.shelf:SPEC", tmp_path) as server:
        runner = AwaitedRunner(SHELF, Connect(server.url, (), 20.0, 0).connected)
        runner.labels = Labels(run="r", step=3, group="g")
        await runner.reset({"place": "red"})
        async with Episodes(server.url) as episodes:
            (found,) = (await episodes.episodes(wanted=EpisodeFilter(run="r", step=3, group="g"))).episodes
            assert found.eid == runner.eid
        await runner.close()
