"""A client reads its episodes on a server without tokens that takes it for somebody else (PROTOCOL F2)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loopback import served
from test_against_errata import errata_app

from errata_client import Episodes, ErrataClient
from errata_client.deliveries.read_keys import READ_KEYS, ReadKeys
from errata_protocol.errors import Unauthorized, UnknownEpisode
from errata_protocol.replay import RewardPost
from errata_server.doors import readers


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The server of another user of this machine."""
    monkeypatch.setattr(readers, "is_own_user", lambda *ends: False)
    with served(errata_app()) as url:
        yield url


@pytest.mark.parametrize("mux", [True, False])
async def test_what_a_client_played_is_read_in_its_process(url: str, mux: bool) -> None:
    async with ErrataClient(url, mux=mux) as client:
        await client.reset()
        await client.step({"amount": 2})
        eid = client.eid
        assert eid is not None
        async with await client.fork(1) as child:
            await child.step({"amount": 5})
            other = child.eid
    assert other is not None
    async with Episodes(url) as episodes:
        assert [state.t for state in await episodes.history(eid)] == [0, 1]
        assert (await episodes.state_at(other, 1)).t == 1
        post = RewardPost(t=1, value=1.0, source="judge", reward_id="r")
        assert [reward.value for reward in await episodes.post_rewards(eid, [post])] == [1.0]
        assert len(await episodes.rewards(eid)) == 1
        with pytest.raises(Unauthorized, match="ERRATA_TOKEN"):
            await episodes.episodes()
    async with ErrataClient(url, mux=mux) as later:
        await later.reset()
        assert (await later.state_at(1, eid)).t == 1
        async with await later.fork(0, eid=eid) as again:
            assert (await again.step({"amount": 1})).observation["total"] == 1


async def test_a_process_that_did_not_play_an_episode_shows_its_key(url: str) -> None:
    async with ErrataClient(url) as client:
        await client.reset()
        eid, key = client.eid, client.read_key
    assert eid is not None and key is not None
    READ_KEYS.__init__()  # type: ignore[misc]  # as in another process
    async with Episodes(url) as episodes:
        with pytest.raises(UnknownEpisode):
            await episodes.state_at(eid, 0)
    async with Episodes(url, headers={"Authorization": f"Bearer {key}"}) as episodes:
        assert (await episodes.state_at(eid, 0)).t == 0


def test_the_keys_of_the_last_episodes_are_kept() -> None:
    keys = ReadKeys(2)
    for eid in ("a", "b", "a", "c"):
        keys.add(eid, eid * 2)
    assert [keys.get(eid) for eid in "abc"] == ["aa", None, "cc"]
