"""Plain sockets attached to a session by its id: replies are read again, and requests act once (PROTOCOL A7)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from errata_server.app import create_fastapi_app
from errata_server.runtime.runtime import Runtime
from errata_server.sessions import named_requests
from errata_server.settings import Settings

from .asgi_peer import Peer
from .environments import CountAction, CountEnvironment, CountObservation


class Served:
    """An application and a session that was given out."""

    def __init__(self, app: FastAPI, sid: str, runtime: Runtime) -> None:
        self.app = app
        self.sid = sid
        self.runtime = runtime

    @contextlib.asynccontextmanager
    async def attached(self, *, told: bool = True) -> AsyncIterator[Peer]:
        """Yield a socket that is attached to the session; one that is told has asked for capabilities."""
        async with Peer(self.app, query=f"session_id={self.sid}") as peer:
            if told:
                await peer.ask('{"type":"capabilities"}')
            yield peer


@contextlib.asynccontextmanager
async def served(
    data_dir: Path | None, sid: str | None = None, environment: type[CountEnvironment] = CountEnvironment
) -> AsyncIterator[Served]:
    """Serve a counter; with the id of a session of an earlier server, its journal has that session."""
    runtime = Runtime(Settings(data_dir=data_dir))
    app = create_fastapi_app(environment, CountAction, CountObservation, max_concurrent_envs=8, runtime=runtime)
    async with app.router.lifespan_context(app):
        if sid is None:
            transport = httpx.ASGITransport(app=app, client=("testclient", 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
                create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
                sid = (await client.post("/mcp", json=create)).json()["result"]["session_id"]
        assert sid is not None
        yield Served(app, sid, runtime)


async def raw(peer: Peer, frame: dict[str, Any] | str) -> str:
    """Return the text of the reply to a frame."""
    peer.send(frame if isinstance(frame, str) else json.dumps(frame))
    text: str = (await peer.got.get())["text"]
    return text


def step(n: int, request_id: str | None = None, **more: Any) -> dict[str, Any]:
    named = {} if request_id is None else {"request_id": request_id}
    return {"type": "step", "data": {"n": n, **more}, **named}


def data_of(text: str) -> str:
    return text[text.index('"data":') :]


def position(answer: dict[str, Any]) -> dict[str, Any]:
    """Return where capabilities say that the session is."""
    return {name: value for name, value in answer["data"]["session"].items() if name != "read_key"}


async def count(peer: Peer) -> int:
    """Return how many steps the environment has made."""
    answer = await peer.ask('{"type":"state"}')
    assert answer is not None
    return int(answer["data"]["step_count"])


async def test_only_an_attached_socket_that_has_asked_is_offered_it(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        async with Peer(here.app) as own:
            answer = await own.ask('{"type":"capabilities"}')
            assert answer is not None and "delivery" not in answer["data"]["extensions"]
            assert "first" not in answer["data"]["session"]
            for frame in ({"type": "delivery", "data": {"t": 0}}, step(1, "a")):
                assert json.loads(await raw(own, frame))["data"]["code"] in ("UNKNOWN_TYPE", "VALIDATION_ERROR")
            assert await count(own) == 0
        async with here.attached(told=False) as peer:
            assert json.loads(await raw(peer, step(1, "a")))["data"]["code"] == "VALIDATION_ERROR"
            assert json.loads(await raw(peer, {"type": "delivery", "data": {"t": 0}}))["data"]["code"] == "UNKNOWN_TYPE"
            answer = await peer.ask('{"type":"capabilities"}')
            assert answer is not None
            assert answer["data"]["extensions"]["delivery"] == answer["data"]["extensions"]["request_id"] == 1
            assert position(answer) == {"session_id": here.sid, "eid": None, "t": None, "first": None}


async def test_a_reply_is_read_again_on_the_next_socket(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        async with here.attached() as peer:
            sent = [await raw(peer, {"type": "reset", "data": {}})] + [await raw(peer, step(n)) for n in range(3)]
        async with here.attached(told=False) as peer:
            answer = await peer.ask('{"type":"capabilities"}')
            assert answer is not None
            eid = json.loads(sent[0])["eid"]
            assert position(answer) == {"session_id": here.sid, "eid": eid, "t": 3, "first": 0}
            for t, frame in enumerate(sent):
                assert await raw(peer, {"type": "delivery", "data": {"t": t}}) == frame
            gone = json.loads(await raw(peer, {"type": "delivery", "data": {"t": 4}}))["data"]
            assert gone.pop("message") and gone == {"code": "T_OUT_OF_RANGE", "eid": eid, "t": 3, "first": 0}


@pytest.mark.parametrize("data", [{}, {"t": -1}, {"t": 1.0}, {"t": True}, {"t": "1"}, {"t": 0, "eid": "x"}, None])
async def test_what_is_no_delivery_request_is_refused(data: Any) -> None:
    async with served(None) as here, here.attached() as peer:
        await raw(peer, {"type": "reset", "data": {}})
        for frame in ({"type": "delivery", "data": data}, {"type": "delivery", "data": {"t": 0}, "more": 1}):
            assert json.loads(await raw(peer, frame))["data"]["code"] == "VALIDATION_ERROR"


async def test_a_session_that_began_with_a_step_has_no_delivery_0() -> None:
    async with served(None) as here, here.attached() as peer:
        assert json.loads(await raw(peer, step(1, "a")))["t"] == 1
        answer = await peer.ask('{"type":"capabilities"}')
        assert answer is not None and answer["data"]["session"]["first"] == 1
        assert json.loads(await raw(peer, {"type": "delivery", "data": {"t": 0}}))["data"]["first"] == 1


async def test_a_request_that_is_sent_again_acts_once(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        async with here.attached() as peer:
            reset = await raw(peer, {"type": "reset", "data": {"seed": 1, "episode_id": "x"}, "request_id": "a"})
            assert json.loads(reset)["request_id"] == "a"
            again = '{"request_id":"a", "data":{"episode_id":"x",  "seed":1}, "type":"reset"}'
            assert await raw(peer, again) == reset
            frame = await raw(peer, step(2, "b"))
            assert [await raw(peer, step(2, "b")) for _ in range(3)] == [frame] * 3
            assert list(json.loads(frame)) == ["type", "eid", "t", "digest", "request_id", "data"]
        async with here.attached() as peer:
            assert await raw(peer, step(2, "b")) == frame
            assert json.loads(await raw(peer, step(2, "c")))["t"] == 2
            assert data_of(await raw(peer, {"type": "delivery", "data": {"t": 1}})) == data_of(frame)
            assert await count(peer) == 2


async def test_data_is_the_same_with_an_id_and_without() -> None:
    async with served(None) as here, here.attached() as peer:
        plain = await raw(peer, step(0, do="nan"))
        assert data_of(await raw(peer, step(0, "a", do="nan"))) == data_of(plain)


async def test_an_error_is_a_reply_too(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        async with here.attached() as peer:
            await raw(peer, {"type": "reset", "data": {}})
            plain = json.loads(await raw(peer, step(1, do="raise")))
            failed = await raw(peer, step(1, "a", do="raise"))
            assert json.loads(failed) == {**plain, "request_id": "a"}
            assert await raw(peer, step(1, "a", do="raise")) == failed
            wrong = await raw(peer, {"type": "step", "data": {"n": []}, "request_id": "b"})
            assert json.loads(wrong)["data"]["code"] == "VALIDATION_ERROR" and json.loads(wrong)["request_id"] == "b"
            assert await raw(peer, {"type": "step", "data": {"n": []}, "request_id": "b"}) == wrong
            before = await count(peer)
        async with here.attached() as peer:
            assert await raw(peer, step(1, "a", do="raise")) == failed
            assert await count(peer) == before


@pytest.mark.parametrize("method", ["tools/list", "nope", "tools/call"])
async def test_an_mcp_reply_that_is_no_delivery_is_kept(method: str) -> None:
    async with served(None) as here, here.attached() as peer:
        data = {"jsonrpc": "2.0", "id": 7, "method": method, "params": {}}
        first = await raw(peer, {"type": "mcp", "data": data, "request_id": "a"})
        assert json.loads(first)["type"] == "mcp" and json.loads(first)["request_id"] == "a"
        assert json.loads(first)["data"] == json.loads(await raw(peer, {"type": "mcp", "data": data}))["data"]
        assert await raw(peer, {"type": "mcp", "data": data, "request_id": "a"}) == first


@pytest.mark.parametrize("request_id", ["", "x" * 256, "\ud800", 5, None, True, ["a"], {}])
async def test_what_is_no_id_is_refused_and_nothing_runs(request_id: Any) -> None:
    async with served(None) as here, here.attached() as peer:
        answer = await peer.ask({**step(1), "request_id": request_id})
        assert answer is not None and answer["data"]["code"] == "VALIDATION_ERROR" and "request_id" not in answer
        assert await count(peer) == 0


async def test_an_id_of_another_request_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as here, here.attached() as peer:
        first = await raw(peer, step(1, "a"))
        for other in (step(2, "a"), {"type": "reset", "data": {"n": 1}, "request_id": "a"}):
            answer = json.loads(await raw(peer, other))
            assert answer["data"]["code"] == "REQUEST_ID_REUSED" and answer["request_id"] == "a"
        assert await raw(peer, step(1, "a")) == first
        assert await count(peer) == 1


async def test_a_restarted_server_knows_what_ran(tmp_path: Path) -> None:
    async with served(tmp_path) as here, here.attached() as peer:
        reset = await raw(peer, {"type": "reset", "data": {}, "request_id": "r"})
        frames = [await raw(peer, step(n, str(n))) for n in range(5)]
        failed = await raw(peer, step(1, "f", do="raise"))
        frames.append(await raw(peer, step(7, "7")))
    async with served(tmp_path, here.sid) as again, again.attached() as peer:
        assert await raw(peer, step(7, "7")) == frames[-1]
        assert await raw(peer, step(1, "f", do="raise")) == failed
        assert [await raw(peer, step(n, str(n))) for n in range(5)] == frames[:5]
        assert await raw(peer, {"type": "reset", "data": {}, "request_id": "r"}) == reset
        answer = json.loads(await raw(peer, step(8, "7")))
        assert answer["data"]["code"] == "REQUEST_ID_REUSED"
        new = json.loads(await raw(peer, step(1, "8")))
        assert (
            new["t"] == 7 and new["data"]["observation"]["n"] == sum(range(5)) + 1 + 7 + 1
        )  # the failed step had counted


async def test_a_reply_of_a_deleted_episode_is_gone(tmp_path: Path) -> None:
    async with served(tmp_path) as here, here.attached() as peer:
        reset = json.loads(await raw(peer, {"type": "reset", "data": {}, "request_id": "a"}))
        await raw(peer, {"type": "reset", "data": {}, "request_id": "b"})
        transport = httpx.ASGITransport(app=here.app, client=("testclient", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            assert (await client.delete(f"/episodes/{reset['eid']}")).status_code in (200, 204)
        answer = json.loads(await raw(peer, {"type": "reset", "data": {}, "request_id": "a"}))
        assert answer["data"]["code"] == "REPLY_GONE" and answer["request_id"] == "a"


async def test_what_is_held_for_a_session_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_requests, "KEPT", 8)
    async with served(None) as here, here.attached() as peer:
        for n in range(30):
            await raw(peer, step(1, str(n)))
        sessions = [one for one in _objects(named_requests.NamedRequests) if "29" in one._named]
        assert [len(one._named) for one in sessions] == [8]


async def test_a_request_of_a_lost_socket_ends_before_its_repetition_is_looked_up() -> None:
    async with served(None) as here:
        async with Peer(here.app, query=f"session_id={here.sid}") as lost:
            await lost.ask('{"type":"capabilities"}')
            lost.send(json.dumps(step(3, "a")))  # its reply is never read
        async with here.attached() as peer:
            answer = json.loads(await raw(peer, step(3, "a")))
            assert answer["t"] == 1 and answer["data"]["observation"]["n"] == 3
            assert await count(peer) == 1


class MisbehavingEnvironment(CountEnvironment):
    """Ends a step in ways that servers lose the reply of, after it counted."""

    async def step_async(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        self._state.step_count += 1
        match action.do:
            case "cancel":
                raise asyncio.CancelledError
            case "exit":
                raise SystemExit
            case "no UTF-8":
                raise ValueError(b"caf\xe9".decode("utf-8", "surrogateescape"))
            case "change":
                action.metadata["kept"]["with"] = object()
        return CountObservation(n=self._state.step_count)


@pytest.mark.parametrize("do", ["cancel", "exit", "no UTF-8", "change"])
async def test_a_request_acts_once_however_its_handler_ends(tmp_path: Path, do: str) -> None:
    frame = step(1, "a", do=do, metadata={"kept": {}})
    async with served(tmp_path, environment=MisbehavingEnvironment) as here:
        async with here.attached() as peer:
            await raw(peer, {"type": "reset", "data": {}})
            first = await raw(peer, frame)
            assert json.loads(first)["request_id"] == "a"
            assert await raw(peer, frame) == first
        async with here.attached() as peer:
            assert await raw(peer, frame) == first
            assert await count(peer) == 1


async def test_a_request_acts_once_while_its_error_is_being_journaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first socket is gone, and the session free, before the error is in the journal."""
    fails = step(1, "a", do="raise")
    async with served(None) as here:
        store, commits, may_commit = here.runtime.store, asyncio.Semaphore(0), asyncio.Event()
        commit = store.commit

        async def slow(*records: Any) -> None:
            commits.release()
            await may_commit.wait()
            await commit(*records)

        async with here.attached() as lost:
            await raw(lost, {"type": "reset", "data": {}})
            monkeypatch.setattr(store, "commit", slow)
            lost.send(json.dumps(fails))
            await commits.acquire()
            lost.hang_up()
            async with here.attached() as peer:
                peer.send(json.dumps(fails))
                with pytest.raises(TimeoutError):  # a second execution would commit too
                    await asyncio.wait_for(commits.acquire(), 0.3)
                may_commit.set()
                reply = await peer.receive()
                assert reply is not None and reply["request_id"] == "a" and reply["data"]["message"] == "boom"
                assert await count(peer) == 1


def _objects(kind: type) -> list[Any]:
    import gc

    return [one for one in gc.get_objects() if type(one) is kind]  # isinstance runs code of the objects
