"""`ErrataClient` against a scripted Errata server: stamps, replay, fork, attach and every way a frame can be wrong."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from echo_environment import EchoAction, EchoObservation, EchoState
from fake_errata import FakeErrata
from loopback import served
from websockets.exceptions import ConnectionClosed

from errata_client import DigestMismatch, ErrataClient, FrameInvalid
from errata_client.doors.http_door import why_no_fork
from errata_protocol.capabilities import Capabilities
from errata_protocol.errors import (
    CapacityReached,
    EnvironmentFailed,
    InvalidRequest,
    NoReset,
    NotSupported,
    SandboxFailed,
    SessionLost,
    SessionUnknown,
    StateOutOfRange,
    UnknownEpisode,
)
from errata_protocol.payload import digest
from tests.machine_speed import SLOWDOWN


async def test_deliveries_are_counted_and_their_exact_bytes_kept(errata: FakeErrata, errata_url: str) -> None:
    async with ErrataClient(errata_url) as client:
        assert (client.eid, client.t, client.session_id) == (None, None, None)
        await client.reset()
        result = await client.step({"text": "é\u2028"})
        assert (result.observation["text"], result.reward, result.done) == ("é\u2028", 1.0, False)
        await client.step({"text": "ü"})
        assert client.t == 2
        journal = errata.episodes[client.eid or ""].deliveries
        assert [s.payload for s in await client.history()] == [d.payload for d in journal]
        assert [(s.t, s.kind, s.source) for s in await client.history()] == [
            (0, "reset", "history"),
            (1, "step", "history"),
            (2, "step", "history"),
        ]


async def test_state_at_reads_the_servers_journal(errata: FakeErrata, errata_url: str) -> None:
    async with ErrataClient(errata_url) as client:
        await client.reset()
        await client.step({"text": "a"})
        state = await client.state_at(1)
        assert state.source == "server"
        assert state.payload == errata.episodes[client.eid or ""].deliveries[1].payload
        assert state.digest == digest(state.payload)
        with pytest.raises(StateOutOfRange) as caught:
            await client.state_at(9)
        assert caught.value.details["deliveries"] == 2
        with pytest.raises(UnknownEpisode):
            await client.state_at(0, "nobody")
        with pytest.raises(InvalidRequest):
            await client.state_at("1")  # type: ignore[arg-type]
        assert client.t == 1


async def test_state_at_before_a_reset_says_so(errata_url: str) -> None:
    async with ErrataClient(errata_url) as client:
        with pytest.raises(NoReset):
            await client.state_at(0)
        with pytest.raises(NoReset):
            await client.fork(0)
        assert await client.history() == []


async def test_earlier_episodes_are_read_even_after_close(errata: FakeErrata, errata_url: str) -> None:
    async with ErrataClient(errata_url) as client:
        await client.reset()
        await client.step({"text": "first"})
        first = client.eid or ""
        await client.reset()
        assert (client.t, client.eid != first) == (0, True)
        assert len(await client.history(first)) == 2
    opened = len(errata.headers)
    assert (await client.state_at(1, first)).payload == errata.episodes[first].deliveries[1].payload
    assert (await client.state_at(0)).eid == client.eid
    assert len(errata.headers) == opened, "reading must not open a session"


async def test_an_error_in_place_of_a_delivery_takes_no_t(errata: FakeErrata, errata_url: str) -> None:
    errata.faults["step"] = [
        {"message": "the sandbox broke", "code": "SANDBOX_FAILED"},
        {"message": "ValueError", "code": "EXECUTION_ERROR"},
    ]
    async with ErrataClient(errata_url) as client:
        await client.reset()
        with pytest.raises(SandboxFailed, match=r"the sandbox broke \(code: SANDBOX_FAILED\)"):
            await client.step({"text": "a"})
        with pytest.raises(EnvironmentFailed):
            await client.step({"text": "a"})
        assert client.t == 0
        await client.step({"text": "a"})
        assert client.t == 1
        assert (await client.state_at(1)).kind == "step"


async def test_a_payload_changed_on_the_way_is_never_an_observation(errata: FakeErrata, errata_url: str) -> None:
    errata.faults["step"] = ["garble"]
    async with ErrataClient(errata_url) as client:
        await client.reset()
        with pytest.raises(DigestMismatch, match=r"state_at\(1\)"):
            await client.step({"text": "a"})
        assert client.t == 1, "it was delivered, so it counts"
        assert json.loads((await client.state_at(1)).payload)["observation"]["count"] == 1
        assert [s.source for s in await client.history()] == ["history", "server"]


async def test_a_delivery_without_a_stamp_is_refused(errata: FakeErrata, errata_url: str) -> None:
    errata.faults["reset"] = ["unstamped"]
    async with ErrataClient(errata_url) as client:
        with pytest.raises(FrameInvalid, match="without eid"):
            await client.reset()


async def test_a_reply_of_another_type_drops_the_socket(errata: FakeErrata, errata_url: str) -> None:
    errata.faults["step"] = ["wrong_type"]
    async with ErrataClient(errata_url) as client:
        await client.reset()
        with pytest.raises(FrameInvalid, match="'state' where 'observation' was due"):
            await client.step({"text": "a"})
        with pytest.raises(SessionLost):
            await client.step({"text": "a"})


async def test_a_tool_call_is_a_delivery(errata: FakeErrata, errata_url: str) -> None:
    async with ErrataClient(errata_url) as client:
        await client.reset()
        assert await client.call_tool("look", {"at": "it"}) == {"text": "look"}
        assert client.t == 1
        assert (await client.state_at(1)).kind == "mcp"
        assert [s.kind for s in await client.history()] == ["reset", "mcp"]


async def test_concurrent_requests_keep_their_own_replies(errata_url: str) -> None:
    async with ErrataClient(errata_url) as client:
        await client.reset()
        texts = [f"n{i}" for i in range(20)]
        results = await asyncio.gather(*(client.step({"text": text}) for text in texts))
        assert [r.observation["text"] for r in results] == texts
        states = await asyncio.gather(*(client.state_at(t) for t in range(21)))
        assert [s.t for s in states] == list(range(21))


# -- fork


async def test_a_fork_stands_where_its_parent_stood_and_leaves_it_alone(errata: FakeErrata, errata_url: str) -> None:
    async with ErrataClient(errata_url, headers={"Authorization": "Bearer x"}) as client:
        await client.reset()
        for text in "abc":
            await client.step({"text": text})
        parent = await client.history()
        child = await client.fork(2)
        assert (type(child), child.t, child.eid != client.eid) == (ErrataClient, 0, True)
        assert child.session_id is not None
        result = await child.step({"text": "other"})
        assert (result.observation["count"], child.t, client.t) == (3, 1, 3)
        history = await child.history()
        assert [s.payload for s in history[:3]] == [s.payload for s in parent[:3]]
        assert [(s.eid, s.t) for s in history] == [(client.eid, 0), (client.eid, 1), (child.eid, 0), (child.eid, 1)]
        assert await child.history() == history
        assert await client.history() == parent
        assert set(errata.headers) == {"Bearer x"}
    assert errata.sessions == {}, "the child of a client that is not durable ends with it"


async def test_a_fork_of_a_fork_tells_the_whole_story(errata_url: str) -> None:
    async with ErrataClient(errata_url) as client:
        await client.reset()
        await client.step({"text": "a"})
        child = await client.fork(1)
        await child.step({"text": "b"})
        grandchild = await child.fork(1)
        await grandchild.step({"text": "c"})
        payloads = [json.loads(s.payload)["observation"]["count"] for s in await grandchild.history()]
        assert payloads == [0, 1, 2, 3]
        stranger = ErrataClient(errata_url)
        assert await stranger.history(grandchild.eid) == [
            s.__class__(s.eid, s.t, s.kind, s.payload, s.digest, "server") for s in await grandchild.history()
        ]
        await stranger.close()


async def test_a_fork_whose_reply_is_lost_is_asked_for_again_and_made_once(errata: FakeErrata, errata_url: str) -> None:
    errata.broken_forks = 1
    async with ErrataClient(errata_url) as client:
        await client.reset()
        child = await client.fork(0)
        assert len(errata.fork_requests) == 2
        assert len(set(errata.fork_requests)) == len(errata.forks) == 1
        errata.broken_forks = 2
        with pytest.raises(ConnectionError):
            await client.fork(0)
        assert child.t == 0


async def test_a_fork_out_of_range_is_refused(errata_url: str) -> None:
    async with ErrataClient(errata_url) as client:
        await client.reset()
        with pytest.raises(StateOutOfRange):
            await client.fork(4)
        with pytest.raises(StateOutOfRange):
            await client.fork(0, eid="nobody")


async def test_a_server_that_does_not_offer_fork_or_replay_is_not_asked(errata: FakeErrata, errata_url: str) -> None:
    errata.extensions = {"mux": 1}
    async with ErrataClient(errata_url) as client:
        await client.reset()
        with pytest.raises(NotSupported, match="production mode"):
            await client.fork(0)
        assert (await client.state_at(0)).source == "history"
        assert (await client.capabilities()) is not None


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (None, "not an Errata server"),
        (Capabilities(environment="dice", extensions={"error_markers": 1}), "production mode"),
        (
            Capabilities(environment="dice", extensions={"state_at": 1}),
            r"'dice' can neither be restored nor run again: give it snapshot\(\) and restore\(\).*--deterministic",
        ),
    ],
)
def test_a_server_without_fork_is_told_what_would_give_it_one(told: Capabilities | None, says: str) -> None:
    assert re.search(says, why_no_fork(told))


# -- sessions that outlive their socket


async def test_a_durable_session_is_attached_again_from_anywhere(errata: FakeErrata, errata_url: str) -> None:
    async with ErrataClient(errata_url, durable=True) as client:
        await client.reset()
        await client.step({"text": "a"})
        session_id, eid = client.session_id, client.eid
    assert session_id in errata.sessions
    async with ErrataClient(errata_url, session_id=session_id) as other:
        assert (other.session_id, other.eid, other.t) == (session_id, eid, 1)
        await other.step({"text": "b"})
        assert [s.source for s in await other.history()] == ["server", "server", "history"]
    assert session_id in errata.sessions
    await client.connect()
    assert client.t == 2
    await client.end_session()
    assert errata.sessions == {}


async def test_the_outcome_of_a_lost_step_is_visible_by_t(errata: FakeErrata, errata_url: str) -> None:
    errata.faults["step"] = ["cut"]
    async with ErrataClient(errata_url, durable=True) as client:
        await client.reset()
        with pytest.raises(ConnectionClosed):
            await client.step({"text": "acted"})
        assert client.t == 0
        with pytest.raises(InvalidRequest, match="reattach"):
            await client.step({"text": "again?"})
        await client.reattach()
        assert client.t == 1
        assert json.loads((await client.state_at(1)).payload)["observation"]["text"] == "acted"
        await client.step({"text": "next"})
        assert [s.t for s in await client.history()] == [0, 1, 2]
        assert errata.seen.count("step") == 2


async def test_a_deadline_drops_the_socket_and_a_durable_session_goes_on(errata: FakeErrata, errata_url: str) -> None:
    errata.faults["step"] = ["mute", "mute"]
    async with ErrataClient(errata_url, durable=True) as client:
        await client.reset()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2 * SLOWDOWN):
                await client.step({"text": "a"})
        assert (await (await client.reattach()).state_at(1)).t == 1
        step = asyncio.create_task(client.step({"text": "b"}))
        # The first release is the step above; a cancellation before the second would send nothing at all.
        assert [await asyncio.to_thread(errata.muted.acquire, timeout=60) for _ in range(2)] == [True, True]
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await client.connect()
        assert client.t == 2


async def test_message_timeout_is_a_timeout_error(errata: FakeErrata, errata_url: str) -> None:
    errata.faults["step"] = ["mute"]
    async with ErrataClient(errata_url, message_timeout_s=0.2 * SLOWDOWN) as client:
        await client.reset()
        with pytest.raises(TimeoutError):
            await client.step({"text": "a"})


async def test_a_lost_plain_session_is_never_replaced_by_a_fresh_one(errata: FakeErrata, errata_url: str) -> None:
    errata.faults["step"] = ["cut"]
    async with ErrataClient(errata_url) as client:
        await client.reset()
        eid = client.eid
        with pytest.raises(ConnectionClosed):
            await client.step({"text": "a"})
        for request in (client.step({"text": "a"}), client.state()):
            with pytest.raises(SessionLost, match="fork"):
                await request
        with pytest.raises(NotSupported, match="durable"):
            await client.reattach()
        assert (await client.state_at(1, eid)).t == 1, "the journal still has what the lost step did"
        child = await client.fork(1, eid=eid)
        assert (await child.step({"text": "b"})).observation["count"] == 2
        await client.reset()
        assert (client.t, client.eid != eid) == (0, True)


async def test_a_durable_session_survives_a_restart_of_its_server(errata: FakeErrata) -> None:
    with served(errata.app) as url:
        port = int(url.rpartition(":")[2])
        client = ErrataClient(url, durable=True)
        await client.reset()
        await client.step({"text": "a"})
    with pytest.raises(ConnectionError):
        await client.reattach()
    with served(errata.app, port):
        await client.reattach()
        assert client.t == 1
        await client.step({"text": "b"})
        assert [s.t for s in await client.history()] == [0, 1, 2]
        await client.close()


async def test_a_server_that_lost_acknowledged_deliveries_is_found_out(errata: FakeErrata, errata_url: str) -> None:
    async with ErrataClient(errata_url, durable=True) as client:
        await client.reset()
        await client.step({"text": "a"})
        errata.episodes[client.eid or ""].deliveries.pop()
        with pytest.raises(SessionLost, match="acknowledged"):
            await client.reattach()


async def test_a_session_still_tied_to_its_lost_socket_is_asked_again(errata: FakeErrata, errata_url: str) -> None:
    client = ErrataClient(errata_url, durable=True, connect_timeout_s=0.5 * SLOWDOWN)
    await client.reset()
    errata.busy_attaches = 3
    await client.reattach()
    assert (client.t, errata.busy_attaches) == (0, 0)
    errata.busy_attaches = 10**6
    with pytest.raises(SessionUnknown, match="already has an attached"):
        await client.reattach()
    await client.close()


async def test_a_vanilla_server_too_old_to_attach_is_found_out(errata: FakeErrata, errata_url: str) -> None:
    errata.ignores_session_id = True
    errata.faults["capabilities"] = [{"message": "Unknown message type", "code": "UNKNOWN_TYPE"}]
    with pytest.raises(NotSupported, match="durable"):
        await ErrataClient(errata_url, durable=True).connect()


async def test_a_session_id_stands_in_no_error_text(errata: FakeErrata) -> None:
    with served(errata.app) as url:
        client = ErrataClient(url, durable=True)
        await client.connect()
    with pytest.raises(ConnectionError) as caught:
        await client.reattach()
    assert str(client.session_id) not in str(caught.value)


async def test_an_unknown_session_is_refused(errata_url: str) -> None:
    with pytest.raises(SessionUnknown):
        await ErrataClient(errata_url, session_id="nobody").connect()


async def test_a_full_server_is_an_error_at_connect(errata: FakeErrata, errata_url: str) -> None:
    errata.refusals = [{"message": "full", "code": "CAPACITY_REACHED", "active_sessions": 1, "max_sessions": 1}]
    client = ErrataClient(errata_url)
    with pytest.raises(CapacityReached) as caught:
        await client.connect()
    assert (caught.value.retryable, caught.value.details["max_sessions"]) == (True, 1)
    await client.connect()
    await client.close()


async def test_close_is_idempotent_and_a_new_connect_is_a_new_session(errata_url: str) -> None:
    client = ErrataClient(errata_url)
    await client.close()
    await client.reset()
    await client.close()
    await client.close()
    await client.connect()
    assert (client.eid, client.t) == (None, None)
    await client.close()


# -- classes and children


async def test_typed_clients_speak_in_the_environments_classes(errata: FakeErrata, errata_url: str) -> None:
    client = ErrataClient(
        errata_url, action_cls=EchoAction, observation_cls=EchoObservation, state_cls=EchoState, durable=True
    )
    async with client:
        await client.reset()
        for action in (EchoAction(text="a"), {"text": "a"}):
            result = await client.step(action)
            assert isinstance(result.observation, EchoObservation)
            assert (result.observation.text, result.observation.reward) == ("a", result.reward)
        assert isinstance(await client.state(), EchoState)
        for bad in ({"txt": "a"}, 7):
            with pytest.raises(InvalidRequest):
                await client.step(bad)
        child, sibling = await client.fork(1), await client.new_session()
        assert isinstance((await child.step({"text": "b"})).observation, EchoObservation)
        assert isinstance((await sibling.reset()).observation, EchoObservation)
        assert sibling.session_id not in (None, client.session_id)
    assert len(errata.sessions) == 3, "durable sessions are left where they are"


async def test_an_observation_of_another_class_is_a_service_error(errata_url: str) -> None:
    async with ErrataClient(errata_url, observation_cls=EchoAction) as client:
        with pytest.raises(FrameInvalid, match="EchoAction"):
            await client.reset()
        assert client.t == 0, "it was delivered, whatever the client makes of it"
