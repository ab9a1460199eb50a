"""An episode that another process played: read from its record, and forked by its key."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from errata_protocol.errors import InvalidRequest, NotSupported, UnknownEpisode
from errata_trainer.assembly.counterfactual import CounterfactualCheck, Question
from errata_trainer.assembly.sites import observation_of
from errata_trainer.episodes.awaited import AwaitedRunner
from errata_trainer.episodes.playing import Episode, worth_a_look
from errata_trainer.episodes.record import EpisodeRecord
from errata_trainer.episodes.recorded import RecordedEpisode
from errata_trainer.episodes.served import Connect
from errata_trainer.episodes.tools import of_spec
from tests.environments.shelf import SPEC
from tests.server.local_server import LocalServer

SHELF = of_spec(SPEC)


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connect]:
    """The way to a server of shelves with room for the two sessions of one fork."""
    with LocalServer("tests.environments.shelf:SPEC", tmp_path_factory.mktemp("data"), max_sessions=2) as server:
        yield Connect(server.url, (), 600.0, 2)


@pytest.fixture(scope="module")
def handed(connect: Connect) -> str:
    """The record of an episode whose second call failed, and that was ended wrongly; its session is closed."""

    async def play() -> str:
        runner = AwaitedRunner(SHELF, connect.connected)
        await runner.reset({"place": "red", "word": "owl"})
        await runner.call("read", {"path": "red"})
        await runner.call("read", {"path": "green"})
        await runner.call("submit", {"word": "elk"})
        await runner.finish()
        await runner.close()
        return json.dumps(runner.record.to_json())

    return asyncio.run(play())


def episode_of(handed: str, connect: Any) -> RecordedEpisode:
    return RecordedEpisode(EpisodeRecord.from_json(json.loads(handed), SHELF), connect)


def test_a_recorded_episode_is_read_as_one_that_was_played_here(handed: str, connect: Connect) -> None:
    episode: Episode = episode_of(handed, connect)
    assert (episode.finish(), episode.lost, episode.task["word"]) == (0.0, None, "owl")
    assert [(one.t, one.name) for one in episode.deliveries()] == [(1, "read"), (2, "read"), (3, "submit")]
    assert observation_of(episode, 0) == episode.opening != {}
    assert observation_of(episode, 2)["text"] == "no file green" and observation_of(episode, 3) == {}
    assert worth_a_look([episode]) == episode.eid
    assert pickle.loads(pickle.dumps(episode)).eid == episode.eid, "so can a worker's own be handed on"


def test_a_fork_continues_the_episode_and_leaves_no_session(handed: str, connect: Connect) -> None:
    episode = episode_of(handed, connect)
    for _ in range(4):  # each takes both sessions that the server has
        fork = episode.fork(2)
        assert fork.eid not in (None, episode.eid) and fork.task == episode.task
        assert fork.call("read", {"path": "red"}) == "the word is owl"
        again = fork.played[-1]
        assert again.t == 1 and fork.call("submit", {"word": "owl"}) == "right" and fork.finish() == 1.0
        fork.close()
    assert len(episode.played) == 3 and episode.finish() == 0.0


def test_a_check_plays_its_questions_in_forks_of_recorded_episodes(handed: str, connect: Connect) -> None:
    episode = episode_of(handed, connect)
    own = (("read", {"path": "green"}),)
    questions = [Question(episode, 2, (("read", {"path": path}),), own, "fs.missing") for path in ("red", "blue")]
    verdicts = CounterfactualCheck("always", threads=1).ask(questions)
    assert [verdict.reason for verdict in verdicts if verdict] == ["error_gone", "still_fails"]


def test_an_episode_that_never_began_has_no_fork_and_one_that_is_gone_says_so(handed: str, connect: Connect) -> None:
    with pytest.raises(InvalidRequest, match="never began"):
        RecordedEpisode(EpisodeRecord(SHELF), connect).fork(0)
    gone = episode_of(handed, connect)
    gone.record.eid = "e-gone"
    for _ in range(3):  # a refused fork leaves no session either
        with pytest.raises(UnknownEpisode):
            gone.fork(1)


def test_a_fork_closes_both_of_its_sessions(handed: str) -> None:
    closed: list[str] = []

    class Session:
        eid, t = "e-fork", 2

        def __init__(self, name: str, *, forks: bool = True) -> None:
            self.name, self.forks = name, forks

        def fork(self, t: int, *, eid: str | None = None) -> Session:
            if not self.forks:
                raise NotSupported("no snapshot")
            return Session(f"fork of {eid} at {t}")

        def close(self) -> None:
            closed.append(self.name)

    episode = episode_of(handed, lambda: Session("parent"))
    episode.fork(2).close()
    assert closed == [f"fork of {episode.eid} at 2", "parent"]
    closed.clear()
    with pytest.raises(NotSupported):
        episode_of(handed, lambda: Session("parent", forks=False)).fork(2)
    assert closed == ["parent"]


def test_a_record_has_the_observation_of_the_failure_only(handed: str) -> None:
    row = json.loads(handed)
    assert [bool(call["observation"]) for call in row["played"]] == [False, True, False]
