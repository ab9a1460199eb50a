"""Teachers in actors: their answers, budgets and failures are those of the teachers, and their deaths missing votes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from errata_client import Episodes, ErrataClient
from errata_server.process import ServerProcess
from errata_trainer import Call, Turn
from errata_trainer.recipes.monarch import ReplayTeachers
from errata_trainer.teachers import (
    Action,
    AnswerCache,
    Ask,
    Budget,
    BudgetSpent,
    Prompter,
    Spend,
    TeacherBroken,
    TeacherFailed,
    TeacherPool,
    TeacherTimeout,
    ToolCall,
    preferences,
)
from tests.environments.shelf import SPEC
from tests.machine_speed import SLOWDOWN

from .scripted import COST, MakeHeld, prompt, refuse

DEADLINE_S = 6.0 * SLOWDOWN
"""Monarch notices a death after nine seconds; who asks whether a process answers, does after half of this."""
AT_ONCE = 8
PROMPTER = Prompter(SPEC.tools, SPEC.agent_text, SPEC.agent_text_version)
STUDENT = Action((ToolCall("read", {"path": "green"}),))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> MakeHeld:
    return MakeHeld(tmp_path_factory.mktemp("held"))


@pytest.fixture(scope="module")
def replay(make: MakeHeld) -> Iterator[ReplayTeachers]:
    with ReplayTeachers(make, actors=3, at_once=AT_ONCE, deadline_s=DEADLINE_S, start_s=300.0) as made:
        yield made


@pytest.fixture(autouse=True)
def held(make: MakeHeld) -> Iterator[None]:
    yield
    for path in make.directory.iterdir():
        path.unlink()


async def outcome(replay: ReplayTeachers, text: str, budget: Budget | None = None) -> str:
    """Return the process that answered, ``missing/REASON``, or ``late`` for a question that is not over in time."""
    late_s = DEADLINE_S + 20.0 * SLOWDOWN
    try:
        found = await asyncio.wait_for(replay.teachers[0].ask(prompt(text), budget or Budget(processes=1)), late_s)
    except TeacherFailed as error:
        return f"missing/{error.reason}"
    except TimeoutError:
        return "late"
    return found.model


async def outcomes(replay: ReplayTeachers, *texts: str, budget: Budget | None = None) -> Counter[str]:
    return Counter(await asyncio.gather(*(outcome(replay, text, budget) for text in texts)))


async def until_asked(make: MakeHeld, processes: int) -> set[int]:
    """Wait until so many processes hold a question, and return them."""
    async with asyncio.timeout(120):
        while len(found := {pid for pid, *_ in make.notes("held")}) < processes:  # noqa: ASYNC110  of other processes
            await asyncio.sleep(0.02)
    return found


def is_killed(kinds: Counter[str]) -> bool:
    return any(kind.startswith("missing/") for kind in kinds)


async def test_teachers_in_actors_are_asked_side_by_side_and_not_more_than_at_once(
    replay: ReplayTeachers, make: MakeHeld
) -> None:
    asking = asyncio.create_task(outcomes(replay, *(f"held {n}" for n in range(3 * AT_ONCE + 6))))
    async with asyncio.timeout(120):
        while len(make.notes("held")) < 3 * AT_ONCE:  # noqa: ASYNC110  of other processes
            await asyncio.sleep(0.02)
    (make.directory / "go").touch()
    found = await asking
    notes = make.notes("held")
    assert len(notes) == found.total() == 3 * AT_ONCE + 6
    assert max(now for *_, now in notes) == AT_ONCE, "a concurrent endpoint with a semaphore of its own"
    assert set(found) == {str(pid) for pid, *_ in notes} and len(found) == 3, "all three were asked"


async def test_costs_and_limits_are_those_of_the_trainers_budget(replay: ReplayTeachers) -> None:
    budget = Budget(tokens=35, processes=1)
    found = await outcomes(replay, *map(str, range(20)), budget=budget)
    answered = sum(count for kind, count in found.items() if kind.isdecimal())
    assert (budget.spent, budget.reserved) == (Spend(tokens=answered * COST.tokens), Spend())
    assert answered == 9 and found["missing/budget"] == 11, "a tenth call of up to 10 tokens does not fit in 35 - 27"
    with pytest.raises(BudgetSpent, match="27 of 35 tokens"):
        await replay.teachers[1].ask(prompt("more"), budget)


async def test_failures_keep_their_kind(replay: ReplayTeachers) -> None:
    budget = Budget(tokens=10_000, processes=1)
    with pytest.raises(TeacherBroken, match="the model is broken"):
        await replay.teachers[0].ask(prompt("fail"), budget)
    assert budget.spent == Spend(), "a call that cannot have cost anything is free"
    with pytest.raises(RuntimeError, match=r"(?s)teacher b .*ZeroDivisionError: a mistake of the teacher's own"):
        await replay.teachers[1].ask(prompt("crash"), budget)
    assert budget.spent == Spend(tokens=10) and budget.reserved == Spend()


async def test_a_teacher_that_hangs_is_a_missing_vote_at_its_deadline(replay: ReplayTeachers) -> None:
    budget = Budget(tokens=10_000, processes=1)
    with pytest.raises(TeacherTimeout):
        await replay.teachers[0].ask(prompt("hang"), budget)
    assert budget.spent == Spend(tokens=10) and budget.reserved == Spend(), "it may have cost something"
    assert (await outcomes(replay, "after")).total() == 1


async def test_60_votes_are_answered_or_missing_when_a_process_is_killed(
    replay: ReplayTeachers, make: MakeHeld
) -> None:
    budget = Budget(tokens=10_000, processes=1)
    asking = asyncio.create_task(outcomes(replay, *(f"held {n}" for n in range(60)), budget=budget))
    victim = min(await until_asked(make, 3))
    os.kill(victim, signal.SIGKILL)
    (make.directory / "go").touch()
    found = await asking
    answered = sum(count for kind, count in found.items() if kind.isdecimal())
    missing = sum(count for kind, count in found.items() if kind.startswith("missing/"))
    print("60 votes:", dict(found))
    assert (answered + missing, found["late"], found[str(victim)]) == (60, 0, 0)
    assert budget.reserved == Spend()
    after = await outcomes(replay, *(f"after {n}" for n in range(12)))
    assert sum(count for kind, count in after.items() if kind.isdecimal()) == 12, after
    assert (await asyncio.to_thread(replay.metrics))["replay/asked_again"] >= 1


async def test_a_killed_process_is_begun_anew(replay: ReplayTeachers) -> None:
    async with asyncio.timeout(240):
        while True:
            await outcome(replay, "anew")
            counts = await asyncio.to_thread(replay.metrics)
            if counts.get("replay/lost", 0) >= 1 and counts["replay/spawned"] == 3 + counts["replay/lost"]:
                break
            await asyncio.sleep(0.2)
        seen: set[str] = set()
        while len(seen) < 3:
            seen |= set(await outcomes(replay, *(f"again {n}" for n in range(12))))
    assert all(one.isdecimal() for one in seen)


async def test_when_all_processes_are_killed_votes_are_missing_and_the_trainer_lives(
    replay: ReplayTeachers, make: MakeHeld
) -> None:
    asking = asyncio.create_task(outcomes(replay, *(f"held {n}" for n in range(9))))
    for pid in await until_asked(make, 3):
        os.kill(pid, signal.SIGKILL)
    found = await asking
    assert found["late"] == 0 and found.total() == 9 and is_killed(found), found
    async with asyncio.timeout(240):
        while not (await outcome(replay, "after")).isdecimal():  # noqa: ASYNC110  of other processes
            await asyncio.sleep(0.2)


def test_an_actor_that_cannot_be_made_is_said_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_TEST_TRAINER", str(os.getpid()))
    with pytest.raises(Exception, match="no key in the process of the actor"):
        ReplayTeachers(refuse, actors=1, start_s=300.0)


def test_votes_come_from_actors_and_are_late_rewards_of_the_source_teachers(
    replay: ReplayTeachers, server: ServerProcess, tmp_path: Path
) -> None:
    with ErrataClient[Any, Any, Any](server.url).sync() as client:
        client.reset(place="red")
        client.step({"tool": "read", "path": "blue"})
        eid = client.eid
    turns = (Turn(0, 0, 1, (Call("read", {"path": "blue"}, 1),)),)
    cache = AnswerCache(tmp_path)
    for cached in (0, 2):
        options: dict[str, Any] = {"episodes": Episodes(server.url), "cache": cache, "deadline_s": 60.0 * SLOWDOWN}
        with TeacherPool(replay.teachers, PROMPTER, **options) as pool:
            (ballot,) = pool.submit([Ask(STUDENT, eid=eid, t=1, turns=turns)]).result(600)
        (preference,) = preferences(ballot)
        assert preference.chosen == Action((ToolCall("read", {"path": "red"}),))
        metrics = pool.metrics()
        assert (metrics["teachers/posted"], metrics.get("teachers/cached", 0)) == (1, cached)

    async def read() -> Any:
        async with Episodes(server.url) as episodes:
            return await episodes.rewards(str(eid))

    (reward,) = asyncio.run(read())
    assert (reward.t, reward.source, reward.value) == (1, "teachers", -1.0)
