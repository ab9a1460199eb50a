"""The sample server: plain and multiplexed sockets on ``/ws``, and the HTTP routes."""

from __future__ import annotations

import asyncio
import json
import math
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..exact import encode
from .episodes import LIMITS, STATUS, Instance, Refusal, World
from .mux import Socket
from .tally import schemas

MUX = "openenv.mux.v1"
PLAIN_KEYS = {"reset": {"type", "data"}, "step": {"type", "data"}, "mcp": {"type", "data"}, "close": {"type"}}


class PlainSession(Instance):
    """A session of a plain socket; with a session_id, of several sockets one after another."""

    session_id: str | None = None
    attached = False
    told = False

    def head(self, kind: str, payload: str) -> dict[str, Any]:
        """Return the fields of a delivery beside data."""
        if not self.told and not self.world.wrong("always-places"):
            return {"type": kind}
        return {"type": kind, **self.place, "digest": self.world.digest(payload)}

    async def answer(self, message: Any) -> str:
        """Execute a client's message and return the text of the frame that answers it.

        Args:
            message: The decoded JSON of the client's frame. Valid is an object whose ``type`` is ``reset``, ``step``,
                ``mcp``, ``state`` or, if the server offers it, ``capabilities``. ``step`` and ``mcp`` need an object as
                ``data``. ``close`` is refused: the caller handles it.

        Returns:
            The answer as JSON text.

        Raises:
            Refusal: The message is invalid, or its execution failed; the caller sends it as an error frame.
        """
        if not isinstance(message, dict):
            raise Refusal("VALIDATION_ERROR")
        kind: Any = message.get("type")
        data: Any = message.get("data")
        if kind == "capabilities" and self.world.answers_capabilities:
            self.told = True
            place = {"session_id": self.session_id, **self.place}
            return encode({"type": kind, "data": {**self.world.capabilities(), "session": place}})
        if kind == "state":
            return await self.state_answer(message)
        if kind not in PLAIN_KEYS:
            raise Refusal("UNKNOWN_TYPE")
        if set(message) - PLAIN_KEYS[kind] or (kind != "reset" and not isinstance(data, dict)):
            raise Refusal("VALIDATION_ERROR")
        async with self.running:
            if kind == "reset":
                payload = await self.reset(data or {})
            elif kind == "mcp" and data.get("method") != "tools/call":
                return encode({"type": "mcp", "data": self.mcp(data)})
            else:
                payload = await self.step(data, kind=kind)
        return spliced(self.head("mcp" if kind == "mcp" else "observation", payload), payload)

    async def state_answer(self, message: dict[str, Any]) -> str:
        """Answer state and state(t)."""
        if set(message) - {"type", "data"} and not self.world.wrong("lax-state"):
            raise Refusal("VALIDATION_ERROR")
        if "data" not in message:
            return encode({"type": "state", "data": self.state()})
        if self.world.production and not self.world.wrong("production-replays"):
            raise Refusal("VALIDATION_ERROR")
        data = message["data"]
        if self.world.wrong("reading-waits") and isinstance(data, dict):
            episode = self.world.episodes.get(data.get("eid") or "")
            if episode is not None and episode.session is not None:
                async with episode.session.running:
                    pass
        return spliced(*self.at(data))


def spliced(head: dict[str, Any], payload: str) -> str:
    """Return {...head, "data": payload} with the payload's exact bytes."""
    return f'{encode(head)[:-1]},"data":{payload}}}'


def error_frame(error: Refusal) -> str:
    """Return an error as a frame."""
    return encode({"type": "error", "data": error.data})


class Server:
    """The application.

    Args:
        world: Its state.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.sockets: set[Socket] = set()
        self.stopping = False
        self.socket_type: type[Socket] = Socket
        self.ignores_session_id = False
        """As OpenEnv before 0.5 does."""
        episode = "/episodes/{eid}"
        routes: list[Any] = [
            Route("/health", self.health),
            Route("/schema", self.schema),
            Route("/metadata", self.metadata),
            Route("/mcp", self.mcp, methods=["POST"]),
            Route("/capabilities", self.capabilities),
            *([Route("/conformance/probe", self.probe)] if self.world.probe is not None else []),
            WebSocketRoute("/ws", self.ws),
        ]
        if not world.production:
            routes += [
                Route(f"{episode}/states/{{t}}", self.state_at),
                Route(f"{episode}/fork", self.fork, methods=["POST"]),
            ]
        if not world.production or world.wrong("production-rewards"):
            routes += [
                Route(f"{episode}/rewards", self.rewards, methods=["GET"]),
                Route(f"{episode}/rewards", self.reward, methods=["POST"]),
            ]
        self.app = Starlette(routes=routes, exception_handlers={Refusal: self.refused})

    # HTTP

    def owner(self, connection: Any) -> str | None:
        """Return the principal of a request.

        Raises:
            PermissionError: It has no valid token.
        """
        if self.world.tokens is None:
            return None
        token = str(connection.headers.get("authorization", "")).removeprefix("Bearer ")
        if token not in self.world.tokens:
            raise PermissionError
        return token

    async def refused(self, _request: Request, error: Any) -> Response:
        """Answer with an error."""
        status = 400 if self.world.wrong("http-status-400") else STATUS.get(error.code, 404)
        return JSONResponse(error.data, status)

    async def health(self, _request: Request) -> Response:
        return JSONResponse({"status": "healthy"})

    async def probe(self, _request: Request) -> Response:
        return JSONResponse(self.world.probe)

    async def schema(self, _request: Request) -> Response:
        return JSONResponse(schemas(self.world.declared and not self.world.wrong("schema-without-fields")))

    async def metadata(self, _request: Request) -> Response:
        return JSONResponse({"name": "tally", "description": "adds numbers", "version": "1"})

    async def capabilities(self, _request: Request) -> Response:
        found = self.world.capabilities()
        if self.world.wrong("http-differs"):
            found["extensions"] = {}
        return JSONResponse(found)

    async def mcp(self, request: Request) -> Response:
        """Answer JSON-RPC; it can open and close plain sessions."""
        try:
            asked = json.loads(await request.body())
        except ValueError:
            asked = {}
        method, params = asked.get("method"), asked.get("params") or {}
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": asked.get("id")}
        try:
            self.world.own(params.get("session_id"), "misdirected-session-error")
        except Refusal as error:
            return JSONResponse({**answer, "error": {"code": -32000, "message": "not here", "data": error.data}})
        session = self.world.plain.get(str(params.get("session_id")))
        if session is None and self.world.wrong("sid-as-session-id"):
            session = self.world.sessions.get(str(params.get("session_id")))
        if method == "openenv/session/create":
            made = PlainSession(self.world, self.owner(request))
            made.session_id = str(uuid.uuid4())
            self.world.plain[made.session_id] = made
            answer["result"] = {"session_id": made.session_id}
        elif "session_id" in params and session is None:
            answer["error"] = {"code": -32602, "message": "unknown session"}
        elif method == "openenv/session/close":
            del self.world.plain[params["session_id"]]
            answer["result"] = {"session_id": params["session_id"], "closed": True}
        elif method == "tools/list":
            answer = (session or Instance(self.world, None)).mcp(asked)
        else:
            answer["error"] = {"code": -32600 if method is None else -32601, "message": "unknown method"}
        return JSONResponse(answer)

    async def state_at(self, request: Request) -> Response:
        episode = self.world.episode(request.path_params["eid"], self.owner(request))
        t = request.path_params["t"]
        if not t.isdecimal():
            raise Refusal("VALIDATION_ERROR")
        payload = self.world.payload(episode, int(t))
        etag = self.world.digest(payload)
        if not self.world.wrong("etag-without-quotes"):
            etag = f'"{etag}"'
        if request.headers.get("if-none-match") == etag and not self.world.wrong("no-not-modified"):
            return Response(status_code=304, headers={"ETag": etag})
        return Response(payload, media_type="application/json", headers={"ETag": etag})

    async def fork(self, request: Request) -> Response:
        owner, eid = self.owner(request), request.path_params["eid"]
        try:
            asked = json.loads(await request.body())
        except ValueError:
            raise Refusal("VALIDATION_ERROR") from None
        if self.world.wrong("fork-lax") and isinstance(asked, dict):
            asked = {"request_id": str(uuid.uuid4()), **asked}
        t: Any = asked.get("t") if isinstance(asked, dict) else None
        request_id = asked.get("request_id") if isinstance(asked, dict) else None
        right = isinstance(asked, dict) and set(asked) == {"t", "request_id"} and type(t) is int and 0 <= t < 2**53
        if not right or not isinstance(request_id, str) or not 1 <= len(request_id) <= 255:
            raise Refusal("VALIDATION_ERROR")
        self.world.episode(eid, owner)
        known = self.world.forks.get((eid, request_id))
        if known is None or self.world.wrong("second-child"):
            child = self.world.forked(eid, t, owner)
            session = PlainSession(self.world, owner)
            session.session_id, session.episode = str(uuid.uuid4()), child
            child.session = child.session or session
            self.world.plain[session.session_id] = session
            known = {"session_id": session.session_id, "eid": child.eid, "t": 0, "origin": {"eid": eid, "t": t}}
            self.world.forks[eid, request_id] = known
        if known["origin"]["t"] != t and not self.world.wrong("request-id-any-t"):
            raise Refusal("CONFLICT", eid=eid)
        return JSONResponse(known)

    async def rewards(self, request: Request) -> Response:
        episode = self.world.episode(request.path_params["eid"], self.owner(request))
        return JSONResponse([{"eid": episode.eid, **one} for one in episode.rewards])

    async def reward(self, request: Request) -> Response:
        """Add one reward, or an array of them, all or none."""
        wrong = self.world.wrong
        episode = self.world.episode(request.path_params["eid"], self.owner(request))
        try:
            asked = json.loads(await request.body())
        except ValueError:
            raise Refusal("VALIDATION_ERROR") from None
        own = asked if isinstance(asked, list) else [asked]
        known = {one["reward_id"]: one for one in episode.rewards}
        fresh: list[dict[str, Any]] = []
        for one in own:
            self._check(one, episode)
            if one["reward_id"] in known and not wrong("reward-twice"):
                if known[one["reward_id"]] != one:
                    if wrong("reward-partly"):
                        self._keep(episode, fresh)
                    if not wrong("reward-replaced"):
                        raise Refusal("CONFLICT")
                    known[one["reward_id"]].update(one)
                continue
            fresh.append(one)
        self._keep(episode, fresh)
        text = encode(asked) if not wrong("reward-not-finite") else "{}"
        return Response(text, media_type="application/json")

    def _check(self, one: Any, episode: Any) -> None:
        wrong = self.world.wrong
        if not isinstance(one, dict) or set(one) != {"t", "value", "source", "reward_id"}:
            raise Refusal("VALIDATION_ERROR")
        value, t = one["value"], one["t"]
        if isinstance(value, bool) or not isinstance(value, int | float) or type(t) is not int or t < 0:
            raise Refusal("VALIDATION_ERROR")
        if not math.isfinite(value) and not wrong("reward-not-finite"):
            raise Refusal("VALIDATION_ERROR")
        if any(not isinstance(one[name], str) or not 1 <= len(one[name]) <= 255 for name in ("source", "reward_id")):
            raise Refusal("VALIDATION_ERROR")
        own = one["source"] == "environment" or one["reward_id"].startswith("environment:")
        if own and not wrong("reward-of-environment"):
            raise Refusal("VALIDATION_ERROR")
        if t > episode.t and not wrong("reward-anywhere"):
            raise Refusal("T_OUT_OF_RANGE", eid=episode.eid, t=t, deliveries=len(episode.payloads))

    def _keep(self, episode: Any, rewards: list[dict[str, Any]]) -> None:
        for one in rewards:
            if self.world.wrong("reward-replaces"):
                episode.rewards = [other for other in episode.rewards if other["t"] != one["t"]]
            if self.world.wrong("reward-in-delivery"):
                payload = json.loads(episode.payloads[one["t"]])
                episode.payloads[one["t"]] = encode({**payload, "reward": one["value"]})
            episode.rewards.append(one)
            if hasattr(episode.session, "rewarded"):
                episode.session.rewarded(episode, one)

    # Sockets

    async def ws(self, connection: WebSocket) -> None:
        """Serve a socket, plain or multiplexed."""
        mux = MUX in connection.scope["subprotocols"]
        try:
            owner = self.owner(connection)
        except PermissionError:
            if not (mux and self.world.wrong("mux-without-token")):
                await connection.close(1008)
                return
            owner = "one"
        named = mux or self.world.wrong("named-unasked")
        await connection.accept(subprotocol=MUX if named else None)
        try:
            await (self.multiplexed if mux else self.plain)(connection, owner)
        except (WebSocketDisconnect, RuntimeError):
            return

    async def plain(self, connection: WebSocket, owner: str | None) -> None:
        """Serve a plain socket."""
        session_id = None if self.ignores_session_id else connection.query_params.get("session_id")
        try:
            self.world.own(session_id, "misdirected-session-error")
        except Refusal as error:
            await connection.send_text(error_frame(error))
            await connection.close()
            return
        session = PlainSession(self.world, owner) if session_id is None else self.world.plain.get(session_id)
        if session is None and self.world.wrong("sid-as-session-id") and session_id in self.world.sessions:
            session = PlainSession(self.world, owner)
        if session is None or session.attached:
            await connection.send_text(error_frame(Refusal("SESSION_ERROR")))
            await connection.close()
            return
        session.attached, session.told = True, False
        try:
            while True:
                event = await connection.receive()
                if event["type"] == "websocket.disconnect":
                    return
                text = event.get("text") or (event.get("bytes") or b"").decode()
                try:
                    message = json.loads(text)
                    if isinstance(message, dict) and message == {"type": "close"}:
                        await connection.close(1000)
                        return
                    frame = await session.answer(message)
                except json.JSONDecodeError:
                    frame = error_frame(Refusal("INVALID_JSON"))
                except Refusal as error:
                    frame = error_frame(error)
                await connection.send_text(frame)
                if self.world.wrong("unsolicited-push") and '"t":1,' in frame:
                    await connection.send_text(encode({"type": "reward", "data": {}}))
        finally:
            session.attached = False

    async def multiplexed(self, connection: WebSocket, owner: str | None) -> None:
        """Serve a multiplexed socket."""
        socket = self.socket_type(self.world, owner)
        self.sockets.add(socket)

        async def sending() -> None:
            while True:
                text = await socket.out.get()
                if text is None:
                    await connection.close(1012 if self.stopping else 1008)
                    return
                await connection.send_text(text)

        sender = asyncio.create_task(sending())
        try:
            while True:
                socket.receive(await connection.receive_text())
        finally:
            self.sockets.discard(socket)
            socket.gone()
            sender.cancel()

    async def drain(self) -> None:
        """Send goaway, answer what was admitted, and close."""
        self.stopping = True
        for socket in list(self.sockets):
            if not self.world.wrong("stops-silently"):
                socket.send({"type": "goaway"}, encode({"retry_after": 0.5}))
        for session in self.world.sessions.values():
            await session.idle()
        for socket in list(self.sockets):
            socket.out.put_nowait(None)
        await asyncio.sleep(0.1)


class Running(uvicorn.Server):
    """A server that drains before it stops."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._drain = drain

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Drain on a signal, then stop."""
        loop = asyncio.get_running_loop()
        self._stopping = loop.create_task(self._stop(sig, frame))

    async def _stop(self, sig: int, frame: Any) -> None:
        await self._drain()
        super().handle_exit(sig, frame)


def running(world: World, port: int, host: str = "127.0.0.1", server: Server | None = None) -> Running:
    """Return a server that is ready to run, for a world or for a given application."""
    server = server or Server(world)
    config = uvicorn.Config(
        server.app,
        host,
        port,
        log_level="warning",
        ws_max_size=LIMITS["max_frame"] * 2,
        lifespan="off",
        ws_ping_interval=None,
    )
    return Running(config, server.drain)
