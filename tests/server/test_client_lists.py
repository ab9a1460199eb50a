"""The client lists episodes; objects of the client say where they are, and nothing secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from errata_client import EnvPool, Episodes, ErrataClient
from errata_protocol.episode_lists import EpisodeFilter, EpisodeOrder
from errata_protocol.errors import InvalidRequest, NotSupported

from .local_server import LocalServer

ONE = "tests.server.environments:CommandEnvironment"
TWO = [ONE, "tests.server.environments:CountEnvironment"]


def test_the_client_lists_the_episodes_of_its_environment_page_by_page(tmp_path: Path) -> None:
    with LocalServer(TWO, tmp_path) as server:
        with ErrataClient(f"{server.url}/CountEnvironment").sync() as other:
            other.reset()
        with ErrataClient(f"{server.url}/CommandEnvironment").sync() as client:
            made = []
            for task in ("a", "b", "c"):
                client.reset(task_id=task)
                client.step({"command": "head none"})
                made.append(client.eid)
            first = client.episodes(limit=2)
            assert [(e.eid, e.task, e.status) for e in first.episodes] == [
                (made[2], "c", "open"),
                (made[1], "b", "open"),
            ]
            assert first.episodes[0].error_kinds == {"path_not_found": 1} and first.episodes[0].last is not None
            second = client.episodes(limit=2, cursor=first.next)
            assert [e.eid for e in second.episodes] == [made[0]] and second.next is None
            assert client.episodes(error_kind="timeout").episodes == []
            assert [e.eid for e in client.episodes(wanted=EpisodeFilter(task="b", text="EP_")).episodes] == [made[1]]
            assert (
                client.episodes(error_kind="timeout", wanted=EpisodeFilter(error_kind="path_not_found")).episodes == []
            )
            oldest = EpisodeOrder(descending=False)
            assert first.episodes[0].hint_keys == {"fs.missing": 1}
            up = client.episodes(limit=2, order=oldest)
            assert [e.eid for e in up.episodes] == made[:2]
            assert [e.eid for e in client.episodes(order=oldest, cursor=up.next).episodes] == made[2:]
            with pytest.raises(InvalidRequest, match="another list"):
                client.episodes(cursor=up.next)
            with pytest.raises(InvalidRequest, match="limit"):
                client.episodes(limit=0)


async def test_episodes_are_listed_without_a_session(tmp_path: Path) -> None:
    with LocalServer(TWO, tmp_path) as server:
        async with ErrataClient(f"{server.url}/CountEnvironment") as client:
            await client.reset()
            assert [e.eid for e in (await client.episodes()).episodes] == [client.eid]
            async with Episodes(server.url) as episodes:
                assert [e.eid for e in (await episodes.episodes(limit=1)).episodes] == [client.eid]
                assert (await episodes.episodes(environment="none")).episodes == []
                (bucket,) = (await episodes.aggregates(bucket_s=10_000_000)).buckets
                assert (bucket.episodes, bucket.deliveries, bucket.done) == (1, 1, 0)
                assert (await episodes.aggregates(wanted=EpisodeFilter(environment="none"))).buckets == []
                with pytest.raises(InvalidRequest, match="bucket_s"):
                    await episodes.aggregates(bucket_s=0)
                assert repr(episodes) == f"<Episodes of {server.url}>"


async def test_a_server_without_episodes_says_so(tmp_path: Path) -> None:
    with LocalServer(ONE, tmp_path) as server:
        async with Episodes(f"{server.url}/metrics") as episodes:
            with pytest.raises(NotSupported, match="no such route"):
                await episodes.episodes()


def test_reprs_say_episode_and_t_and_no_secret(tmp_path: Path) -> None:
    with LocalServer(ONE, tmp_path) as server:
        client = ErrataClient(server.url, headers={"Authorization": "Bearer word"})
        assert repr(client) == f"<ErrataClient {server.url}: no episode>"
        with client.sync() as blocking:
            blocking.reset()
            blocking.step({"command": "ls"})
            where = f"<ErrataClient {server.url}: eid={client.eid!r}, t=1>"
            assert repr(client) == where and repr(blocking) == f"{where}.sync()"
            seen = blocking.state_at(1)
            assert f"eid='{client.eid}', t=1, kind='step'" in repr(seen) and "payload" not in repr(seen)
        secret = ErrataClient(f"{server.url.replace('//', '//user:word@')}/ws?session_id=word&")
        assert "word" not in repr(secret) and server.url in repr(secret)
        pool = EnvPool(server.url, 3)
        assert repr(pool).endswith("t=-, -, ->") and "3 sessions" in repr(pool)
