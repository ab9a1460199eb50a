"""Late scores of an actor: posted to the server with their source, read by the trainer from there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from monarch.actor import Actor, concurrent_endpoint, this_host

from errata_client import Episodes, ErrataClient
from errata_protocol.errors import InvalidRequest
from errata_server.process import ServerProcess
from errata_trainer.recipes.monarch import DelayedRewards, LateScore
from tests.machine_speed import SLOWDOWN


class Judge(Actor):
    """Scores an episode after it was asked to."""

    @concurrent_endpoint
    async def score(self, eid: str, t: int, value: float, port: Any, source: str = "judge") -> None:
        """Answer at once, and send the score later."""
        loop = asyncio.get_running_loop()
        loop.call_later(0.2, port.send, LateScore(eid, t, value, source, f"{source}:{eid}:{t}"))


@pytest.fixture(scope="module")
def judge() -> Iterator[Any]:
    procs = this_host().spawn_procs({"judges": 1}, name="judges")
    yield procs.spawn("judge", Judge)
    procs.stop().get(timeout=60)


@pytest.fixture
def eids(server: ServerProcess) -> list[str]:
    found = []
    for _ in range(2):
        with ErrataClient[Any, Any, Any](server.url).sync() as client:
            client.reset(place="red")
            client.step({"tool": "submit", "word": "owl"})
            found.append(str(client.eid))
    return found


def posted(server: ServerProcess, eid: str) -> list[tuple[int, float, str]]:
    async def read() -> Any:
        async with Episodes(server.url) as episodes:
            return await episodes.rewards(eid)

    return [(one.t, one.value, one.source) for one in asyncio.run(read())]


def test_late_scores_arrive_on_a_channel_are_posted_with_their_source_and_are_read_from_the_server(
    server: ServerProcess, eids: list[str], judge: Any
) -> None:
    one, other = eids
    with DelayedRewards(server.url) as rewards:
        for _ in range(2):  # sent again, it is the same reward
            judge.score.call_one(one, 1, 0.5, rewards.port).get(timeout=120)
        judge.score.call_one(one, 0, 0.25, rewards.port).get(timeout=120)
        judge.score.call_one(other, 1, -1.0, rewards.port, "critic").get(timeout=120)
        assert rewards.collect([other], source="critic", deadline_s=120.0) == {other: -1.0}
        found = rewards.collect([one], source="judge", deadline_s=120.0)
        while rewards.metrics()["rewards/posted"] < 4:
            found = rewards.collect([one], source="judge", deadline_s=1.0)
        assert rewards.collect([one], source="judge", deadline_s=1.0) == {one: 0.75} and found[one] is not None
        assert rewards.metrics() == {"rewards/missing": 0.0, "rewards/posted": 4.0}
    assert sorted(posted(server, one)) == [(0, 0.25, "judge"), (1, 0.5, "judge")]
    assert posted(server, other) == [(1, -1.0, "critic")]


def test_a_score_that_does_not_come_is_no_reward(server: ServerProcess, eids: list[str]) -> None:
    with DelayedRewards(server.url) as rewards:
        found = rewards.collect(eids, source="judge", deadline_s=0.1)
        assert found == dict.fromkeys(eids)
        assert rewards.metrics()["rewards/missing"] == 2


def test_a_score_that_the_server_does_not_take_is_raised(server: ServerProcess, eids: list[str], judge: Any) -> None:
    with DelayedRewards(server.url) as rewards:
        judge.score.call_one(eids[0], 1, 1.0, rewards.port, "environment").get(timeout=120)
        with pytest.raises(InvalidRequest):
            rewards.collect(eids, source="environment", deadline_s=120.0)
        assert rewards.metrics()["rewards/not_posted"] == 1
    with DelayedRewards(server.url) as rewards:
        rewards.port.send("no score")
        with pytest.raises(InvalidRequest, match="takes a LateScore"):
            rewards.collect(eids, source="judge", deadline_s=120.0)


def test_a_score_that_cannot_be_posted_is_counted_and_missing(eids: list[str]) -> None:
    del eids
    with DelayedRewards("http://127.0.0.1:9") as rewards:
        rewards.port.send(LateScore("e", 0, 1.0, "judge", "one"))
        with pytest.raises(Exception, match=r"127\.0\.0\.1"):
            rewards.collect(["e"], source="judge", deadline_s=2.0 * SLOWDOWN)
        assert rewards.metrics()["rewards/not_posted"] == 1
