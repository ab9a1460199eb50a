"""Teachers and a real server: states come from its journal, votes go to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from errata_client import Episodes, ErrataClient
from errata_protocol.errors import Conflict, InvalidRequest, StateOutOfRange, UnknownEpisode
from errata_protocol.replay import RewardPost
from errata_server.process import ServerProcess
from errata_trainer import Call, Turn
from errata_trainer.teachers import Action, Ask, FakeTeacher, Prompter, TeacherPool, ToolCall, preferences, says
from tests.environments.shelf import SPEC

PROMPTER = Prompter(SPEC.tools, SPEC.agent_text, SPEC.agent_text_version)
TURNS = (Turn(0, 0, 1, (Call("read", {"path": "blue"}, 1),)),)
STUDENT = Action((ToolCall("read", {"path": "green"}),))
RED = says("read", path="red")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("tests.environments.shelf:SPEC", tmp_path_factory.mktemp("data")) as made:
        yield made


@pytest.fixture
def eid(server: ServerProcess) -> str:
    """An episode of two failed looks."""
    with ErrataClient[Any, Any, Any](server.url) as client:
        client.reset(place="red")
        client.step({"tool": "read", "path": "blue"})
        client.step({"tool": "read", "path": "green"})
        assert client.eid is not None
        return client.eid


def pool(url: str, *answers: Any, **options: Any) -> TeacherPool:
    teachers = [FakeTeacher(answer, name=f"t{number}") for number, answer in enumerate(answers)]
    return TeacherPool(teachers, PROMPTER, episodes=Episodes(url), deadline_s=20, **options)


def rewards(server: ServerProcess, eid: str) -> Any:
    async def read() -> Any:
        async with Episodes(server.url) as episodes:
            return await episodes.rewards(eid)

    return asyncio.run(read())


def test_teachers_read_the_exact_payloads_up_to_t_and_votes_are_late_rewards(server: ServerProcess, eid: str) -> None:
    teacher = FakeTeacher(RED, name="seer")
    asked = Ask(STUDENT, eid=eid, t=1, turns=TURNS)
    options: dict[str, Any] = {"episodes": Episodes(server.url), "min_agree": 1}
    with TeacherPool([teacher], PROMPTER, **options) as made:
        (ballot,) = made.submit([asked]).result(60)
    assert ballot.source == "agent_text"
    assert [message["content"] for message in teacher.asked[0].messages[1:]] == [
        "One of red, green, blue holds a word. Submit it. Not in der.",
        "",
        "no file blue",
    ], "and nothing of what came after t"
    (preference,) = preferences(ballot)
    assert (preference.eid, preference.t) == (eid, 1)
    (reward,) = rewards(server, eid)
    assert (reward.t, reward.source, reward.value) == (1, "teachers", -1.0)
    assert made.metrics()["teachers/posted"] == 1


def test_a_vote_that_is_posted_again_is_the_same_reward(server: ServerProcess, eid: str) -> None:
    for _ in range(2):
        with pool(server.url, RED, RED) as made:
            made.submit([Ask(STUDENT, eid=eid, t=t, turns=TURNS[:t]) for t in (0, 1)]).result(60)
        assert made.metrics()["teachers/posted"] == 2
    assert [reward.t for reward in rewards(server, eid)] == [0, 1]


def test_votes_that_cannot_be_posted_are_counted_and_still_votes(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    transcript = ({"role": "user", "content": "look"},)
    with pool(server.url, RED, RED) as made, caplog.at_level(logging.WARNING):
        (ballot,) = made.submit([Ask(STUDENT, eid="unknown", t=1, transcript=transcript)]).result(60)
    assert (ballot.source, len(ballot.vote.pairs)) == ("transcript", 1)
    metrics = made.metrics()
    assert (metrics["teachers/not_posted"], metrics["teachers/states_not_read"]) == (1, 1)
    assert "transcripts are used" in caplog.text


def test_a_server_that_is_gone_costs_no_pair() -> None:
    transcript = ({"role": "user", "content": "look"},)
    with pool("http://127.0.0.1:9", RED, RED) as made:
        (ballot,) = made.submit([Ask(STUDENT, eid="e", t=1, transcript=transcript)]).result(60)
    assert len(ballot.vote.pairs) == 1


def test_another_version_of_agent_text_is_not_what_the_student_saw(server: ServerProcess, eid: str) -> None:
    other = Prompter(SPEC.tools, SPEC.agent_text, "another")
    with TeacherPool([FakeTeacher(RED)], other, episodes=Episodes(server.url), min_agree=1) as made:
        (ballot,) = made.submit([Ask(STUDENT, eid=eid, t=1)]).result(60)
    assert ballot.vote.reason == "no_state"


def test_nothing_is_posted_where_it_is_not_wanted(server: ServerProcess, eid: str) -> None:
    with pool(server.url, RED, RED, post=False) as made:
        made.submit([Ask(STUDENT, eid=eid, t=1, turns=TURNS)]).result(60)
    assert rewards(server, eid) == []


async def test_episodes_are_read_and_rewarded_without_a_session(server: ServerProcess, eid: str) -> None:
    async with Episodes(server.url) as episodes:
        detail = await episodes.episode(eid)
        history = await episodes.history(eid)
        assert [state.digest for state in history] == [turn.digest for turn in detail.turns]
        assert [state.t for state in await episodes.history(eid, until=1)] == [0, 1]
        assert await episodes.state_at(eid, 2) == history[2]
        post = RewardPost(t=2, value=0.5, source="me", reward_id="one")
        posted = await episodes.post_rewards(eid, [post])
        assert await episodes.post_rewards(eid, [post]) == posted == await episodes.rewards(eid)
        with pytest.raises(Conflict):
            await episodes.post_rewards(eid, [post.model_copy(update={"value": 1.0})])
        with pytest.raises(StateOutOfRange):
            await episodes.post_rewards(eid, [post.model_copy(update={"t": 9, "reward_id": "two"})])
        with pytest.raises(InvalidRequest):
            await episodes.post_rewards(eid, [post.model_copy(update={"source": "environment", "reward_id": "x"})])
        with pytest.raises(UnknownEpisode):
            await episodes.history("unknown")


async def test_a_forks_history_begins_with_its_parents(server: ServerProcess) -> None:
    async with ErrataClient[Any, Any, Any](server.url) as client, Episodes(server.url) as episodes:
        await client.reset(place="red")
        await client.step({"tool": "read", "path": "blue"})
        child = await client.fork(1)
        await child.step({"tool": "read", "path": "green"})
        assert child.eid is not None
        found = await episodes.history(child.eid)
        assert [(state.eid == child.eid, state.t) for state in found] == [(False, 0), (True, 0), (True, 1)]
