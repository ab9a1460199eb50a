"""What a client finds after the server's process ended, one way or the other (PROTOCOL A3, E1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from errata_client import ErrataClient
from errata_protocol.errors import ErrataError, ServiceError, StateOutOfRange, UnknownEpisode
from errata_server.process import ServerProcess

COUNT = "tests.server.environments:CountEnvironment"
PINNED = "tests.server.environments:PinnedEnvironment"


async def test_every_state_of_a_long_episode_is_the_same_live_closed_and_after_a_crash(tmp_path: Path) -> None:
    with ServerProcess(COUNT, tmp_path) as server:
        async with ErrataClient(server.url) as client:
            await client.reset()
            earlier = client.eid
            assert earlier is not None
            await client.step({"n": 77})
            await client.reset()
            eid = client.eid
            assert eid is not None
            live = [await client.state_at(0)]
            for t in range(1, 201):
                await client.step({"n": t})
                live.append(await client.state_at(t))
            assert live == [await client.state_at(t) for t in range(201)]
            assert (await client.state())["step_count"] == 200
            assert (await client.state_at(1, eid=earlier)).payload != live[1].payload
            with pytest.raises(StateOutOfRange):
                await client.state_at(201)
            with pytest.raises(UnknownEpisode):
                await client.state_at(0, eid="ep_nobody")
        closed = [httpx.get(f"{server.url}/episodes/{eid}/states/{t}").content for t in range(201)]
        assert closed == [s.payload for s in live]
        server.kill()
    with ServerProcess(COUNT, tmp_path) as server:
        for t, before in enumerate(live):
            found = httpx.get(f"{server.url}/episodes/{eid}/states/{t}")
            assert found.content == before.payload
            assert found.headers["etag"] == f'"{before.digest}"'
        assert httpx.get(f"{server.url}/episodes/{earlier}/states/1").status_code == 200


async def test_a_given_out_session_goes_on_after_a_crash_and_a_plain_one_by_fork(tmp_path: Path) -> None:
    durable: ErrataClient[Any, Any, Any]
    with ServerProcess(COUNT, tmp_path) as server:
        durable = ErrataClient(server.url, durable=True)
        await durable.reset()
        await durable.step({"n": 3})
        plain = ErrataClient(server.url)
        await plain.reset()
        await plain.step({"n": 5})
        plain_eid, sid = plain.eid, durable.session_id
        server.kill()
    with ServerProcess(COUNT, tmp_path) as server:
        async with ErrataClient(server.url, session_id=sid) as again:
            assert (again.eid, again.t) == (durable.eid, 1)
            assert (await again.step({"n": 1})).observation["n"] == 4
            child = await again.fork(1, eid=plain_eid)
            assert (await child.step({"n": 1})).observation["n"] == 6
    await durable.close()
    await plain.close()


async def test_an_environment_without_snapshots_is_lost_with_its_last_position(tmp_path: Path) -> None:
    with ServerProcess(PINNED, tmp_path) as server:
        client = ErrataClient(server.url, durable=True)
        await client.reset()
        await client.step({"n": 3})
        eid, sid = client.eid, client.session_id
        server.kill()
    with ServerProcess(PINNED, tmp_path) as server:
        with pytest.raises(ErrataError, match=rf"t=1 of episode {eid}") as caught:
            await ErrataClient(server.url, session_id=sid).connect()
        assert caught.value.code == "SESSION_LOST"
        assert httpx.get(f"{server.url}/episodes/{eid}/states/1").status_code == 200
    await client.close()


async def test_sigterm_ends_with_status_0_and_given_out_sessions_go_on_on_the_successor(tmp_path: Path) -> None:
    with ServerProcess(COUNT, tmp_path) as server:
        client = ErrataClient(server.url, durable=True)
        await client.reset()
        await client.step({"n": 3})
        sid = client.session_id
        assert server.stop() == 0
    with ServerProcess(COUNT, tmp_path) as server:
        async with ErrataClient(server.url, session_id=sid) as again:
            assert (await again.step({"n": 1})).observation["n"] == 4
    await client.close()


def test_a_second_server_on_the_same_data_directory_is_refused_in_one_line(tmp_path: Path) -> None:
    with ServerProcess(COUNT, tmp_path):
        with pytest.raises(ServiceError) as caught:
            ServerProcess(COUNT, tmp_path)
        assert "in use by process" in str(caught.value)
        assert "Traceback" not in str(caught.value)


def test_a_public_bind_without_a_token_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ServiceError) as caught:
        ServerProcess(COUNT, tmp_path, "--host", "0.0.0.0")
    assert "set ERRATA_TOKEN" in str(caught.value)
    assert "Traceback" not in str(caught.value)


async def test_no_log_line_holds_an_id(tmp_path: Path) -> None:
    with ServerProcess(COUNT, tmp_path, "--log-level", "debug") as server:
        async with ErrataClient(server.url, durable=True) as client:
            await client.reset()
            await client.step({"n": 1})
            eid, sid = client.eid, client.session_id
            httpx.get(f"{server.url}/episodes/{eid}/states/1")
        server.stop()
        log = "".join(server.log)
    assert eid is not None and eid not in log
    assert sid is not None and sid not in log
