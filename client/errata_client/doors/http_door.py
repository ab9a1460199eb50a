"""`HttpDoor`: calls the server's HTTP routes for given-out sessions, forks, episodes and rewards (PROTOCOL A5, G)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx
import msgspec
from pydantic import BaseModel, ValidationError

from errata_protocol.capabilities import Capabilities
from errata_protocol.errors import (
    RETRY_AFTER_S,
    CapacityReached,
    ErrataError,
    Misdirected,
    NotSupported,
    ServiceError,
    SessionUnknown,
)
from errata_protocol.exception_text import text_of
from errata_protocol.labels import HEADER, NO_LABELS, Labels
from errata_protocol.printable import printable
from errata_protocol.replay import (
    AgentText,
    EpisodeAggregates,
    EpisodeDetail,
    EpisodePage,
    ForkReply,
    RewardPost,
    StateAt,
    TurnPage,
    episode_path,
)
from errata_protocol.shards import shard_of

from ..connections.waiting import waits_at
from ..deliveries.late_rewards import Reward, read_rewards
from ..deliveries.read_keys import READ_KEYS
from ..fleet.members import Members, lost_error
from ..wire.frames import FrameInvalid, Stamp, as_kind, is_known_code, wire_error

ModelT = TypeVar("ModelT", bound=BaseModel)
AnswerT = TypeVar("AnswerT")

SHORTEST_WAIT_S = 0.05
"""A server that asks for less is asked again after the usual time, seconds."""

_SCHEMES = {"ws": "http", "wss": "https"}


def http_base(ws_url: str) -> str:
    """Return the base URL of the HTTP routes of a server with the socket URL ``.../ws``."""
    parts = urlsplit(ws_url)
    path = parts.path.removesuffix("/ws")
    return urlunsplit((_SCHEMES.get(parts.scheme, parts.scheme), parts.netloc, path, "", ""))


def without_secrets(url: str | None) -> str:
    """Return a URL for texts that may be logged: without user, password and query, which may hold a session's id."""
    parts = urlsplit(url or "")
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")) or "(no server yet)"


def why_no_fork(capabilities: Capabilities | None) -> str:
    """Return a message that says why a server offers no forks, and what to change.

    Args:
        capabilities: The server's; None for a vanilla one.
    """
    if capabilities is None:
        return (
            "it is not an Errata server: serve the environment with errata_server, or open a new_session() and repeat "
            "the actions"
        )
    if not capabilities.offers("state_at"):
        return "it is in production mode, which has no fork: serve it in simulation mode"
    return (
        f"environment {capabilities.environment!r} can neither be restored nor run again: give it snapshot() and "
        "restore(), or, where the same requests give the same observations, serve it with --deterministic "
        "(deterministic=True in code)"
    )


class HttpDoor:
    """HTTP client of one server. Connections are kept open, and belong to the event loop that opened them.

    Args:
        ws_url: The server's ``.../ws`` URL.
        headers: Sent with every request, as on the socket.
        timeout_s: Timeout of one request, seconds.
        trust_env: Use the proxies of the environment variables; off for loopback, as with the socket.
    """

    def __init__(self, ws_url: str, *, headers: Mapping[str, str] | None, timeout_s: float, trust_env: bool) -> None:
        self.ws_url = ws_url
        self._base = http_base(ws_url)
        self._headers = dict(headers or {})
        self._timeout_s = timeout_s
        self._trust_env = trust_env
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._members: Members | None = None
        self._bases: dict[str, str] = {}  # where members are that are elsewhere, or were, by shard

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: everything but the open connections."""
        return {**self.__dict__, "_client": None, "_loop": None, "_members": None}

    async def create_session(self, labels: Labels = NO_LABELS) -> str:
        """Create a session that outlives its socket and return its id.

        Args:
            labels: Labels of its episodes.

        Raises:
            CapacityReached: The server has no instance left.
            NotSupported: The server has no ``POST /mcp``.
            ConnectionError: The server cannot be reached.
        """
        for_socket = {"for_socket": True}  # proposal A: A-15
        reply = await self._rpc("openenv/session/create", for_socket, {HEADER: labels.header()} if labels else None)
        session_id = reply.get("session_id")
        if not isinstance(session_id, str) or not session_id:
            raise FrameInvalid(f"openenv/session/create answered no session_id: {reply!r}")
        return session_id

    async def close_session(self, session_id: str) -> None:
        """End a given-out session; does nothing where the server has no such session."""
        try:
            await self._rpc("openenv/session/close", {"session_id": session_id})
        except SessionUnknown:
            pass

    async def fork(self, eid: str, t: int, request_id: str, labels: Labels | None = None) -> ForkReply:
        """Fork an episode at ``t``.

        A request whose connection fails is sent once more: the same ``request_id`` always gives the same child.

        Args:
            eid: The episode.
            t: Delivery that is the child's t=0.
            request_id: Name of the request, new for each child.
            labels: All labels of the child; None gives it the parent's.

        Raises:
            ErrataError: The server's error, e.g. UnknownEpisode.
            ConnectionError: The server could not be reached twice.
            TimeoutError: No answer in time.
        """
        path, body = f"{episode_path(eid)}/fork", {"t": t, "request_id": request_id}
        if labels is not None:
            body["labels"] = msgspec.to_builtins(labels)
        try:
            response = await self._send("POST", path, body, eid=eid)
        except ConnectionError:
            response = await self._send("POST", path, body, eid=eid)
        reply = _model(ForkReply, response)
        if reply.read_key is not None:
            READ_KEYS.add(reply.eid, reply.read_key)
        return reply

    async def episodes(self, query: Mapping[str, Any]) -> EpisodePage:
        """Return one page of the server's episodes; see `Episodes.episodes`."""
        given = {name: value for name, value in query.items() if value is not None}
        return _model(EpisodePage, await self._send("GET", "/episodes", params=given))

    async def aggregates(self, query: Mapping[str, Any]) -> EpisodeAggregates:
        """Return sums over the server's episodes; see `Episodes.aggregates`."""
        return _model(EpisodeAggregates, await self._send("GET", "/episodes/aggregates", params=query))

    async def episode(self, eid: str) -> EpisodeDetail:
        """Return an episode and the list of its turns.

        Raises:
            UnknownEpisode: There is no such episode.
            NotSupported: The server has no such route, e.g. a vanilla OpenEnv server.
        """
        return _model(EpisodeDetail, await self._send("GET", episode_path(eid), eid=eid))

    async def state_at(self, eid: str, t: int) -> StateAt:
        """Return delivery ``t`` of an episode, verified by the digest in the ETag header."""
        response = await self._send("GET", f"{episode_path(eid)}/states/{t}", eid=eid)
        announced = response.headers.get("etag", "").removeprefix("W/").strip('"')
        kind = as_kind(response.headers.get("x-errata-kind"))
        if kind is None:
            raise FrameInvalid(f"state t={t} of episode {eid} came without a known X-Errata-Kind")
        Stamp(eid, t, announced).verify(response.content)
        return StateAt(eid, t, kind, response.content, announced, "server")

    async def turns(self, eid: str, query: Mapping[str, Any]) -> TurnPage:
        """Return a page of an episode's turns; see `Episodes.turns`."""
        return _model(TurnPage, await self._send("GET", f"{episode_path(eid)}/turns", params=query, eid=eid))

    async def action(self, eid: str, t: int) -> bytes:
        """Return the whole request that delivery ``t`` of an episode answered."""
        return (await self._send("GET", f"{episode_path(eid)}/states/{t}/action", eid=eid)).content

    async def agent_text(self, eid: str, t: int) -> AgentText:
        """Return what the agent read of delivery ``t`` of an episode."""
        return _model(AgentText, await self._send("GET", f"{episode_path(eid)}/states/{t}/agent_text", eid=eid))

    async def rewards(self, eid: str) -> list[Reward]:
        """Return the late rewards of an episode."""
        return read_rewards(_json(await self._send("GET", f"{episode_path(eid)}/rewards", eid=eid)), eid)

    async def post_rewards(self, eid: str, rewards: Sequence[RewardPost]) -> list[Reward]:
        """Post rewards for deliveries of an episode, all or none; see `Episodes.post_rewards`."""
        path, body = f"{episode_path(eid)}/rewards", [reward.model_dump() for reward in rewards]
        return read_rewards(_json(await self._send("POST", path, body, eid=eid)), eid)

    async def aclose(self) -> None:
        """Close idle connections. A later request opens new ones."""
        client, loop = self._client, self._loop
        self._client = self._loop = None
        if client is not None and loop is asyncio.get_running_loop():
            await client.aclose()
        if self._members is not None:
            await self._members.aclose()

    async def _rpc(self, method: str, params: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
        shard = shard_of(str(params.get("session_id")))
        return await self._routed(lambda base: self._rpc_once(base, method, params, headers), shard)

    async def _rpc_once(
        self, base: str, method: str, params: dict[str, Any], headers: dict[str, str] | None
    ) -> dict[str, Any]:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        reply = _json(await self._send_once(base, "POST", "/mcp", body, headers=headers))
        if not isinstance(reply, dict):
            raise FrameInvalid(f"{method} answered no JSON-RPC object: {reply!r}")
        if (error := reply.get("error")) is not None:
            raise _rpc_error(method, error)
        result = reply.get("result")
        return result if isinstance(result, dict) else {}

    async def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
        params: Any = None,
        eid: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        shard = shard_of(eid) if eid is not None else None
        return await self._routed(lambda base: self._send_once(base, method, path, body, params, eid, headers), shard)

    async def _routed(self, ask: Callable[[str], Awaitable[AnswerT]], shard: str | None) -> AnswerT:
        """Return the answer to a request, from the member that has what it is about.

        While it comes to a server of another data directory, where nothing is done (MISDIRECTED), or its member is down
        or elsewhere, it is sent again until ``timeout_s`` is over.

        Args:
            ask: Sends the request to a base URL.
            shard: Name of the shard that the request is about; None where it names none.
        """
        clock = asyncio.get_running_loop().time
        deadline, has_moved = clock() + self._timeout_s, False
        while True:
            base, wait_s = await self.base_of(shard), RETRY_AFTER_S
            try:
                return await ask(base)
            except (Misdirected, ConnectionError) as error:
                if isinstance(error, Misdirected):
                    named, after_s = error.details.get("shard"), error.details.get("retry_after")
                    shard = named if isinstance(named, str) else shard
                    wait_s = after_s if isinstance(after_s, int | float) and after_s >= SHORTEST_WAIT_S else wait_s
                    await self.find(shard, base)
                elif not await self.find(shard, base):
                    raise
                has_moved = not has_moved and await self.base_of(shard) != base
                if not has_moved and clock() + wait_s > deadline:
                    raise
            if not has_moved:
                await asyncio.sleep(wait_s)

    async def base_of(self, shard: str | None) -> str:
        """Return the base URL at which a shard is asked for, as far as is known; of any member that serves for None.

        Raises:
            ConnectionError: The address is that of a list, in which there is no such member, or it cannot be read.
            ErrataError: The members cannot be read.
        """
        if shard is not None and shard in self._bases:
            return self._bases[shard]
        if self._base.startswith(("http://", "https://")):
            return self._base
        for one in await self._known_members().read():
            if one.state == "up" if shard is None else one.shard == shard:
                return one.url
        raise ConnectionError(f"no member of {self._base} " + ("is up" if shard is None else f"has the shard {shard}"))

    async def find(self, shard: str | None, base: str) -> bool:
        """Look where a shard's member is now, after it was not found at a base URL.

        Only members that the fleet lists are asked: a `url` in an error is no reason to send a token there.

        Returns:
            Whether it is elsewhere, or down and to be waited for.

        Raises:
            SessionLost: It is lost.
        """
        if shard is None:
            return False
        found = await self._known_members().of(shard)
        if found is None:
            return False
        if found.state == "lost":
            raise lost_error(found)
        self._bases[shard] = found.url
        return found.url != base or found.state == "down"

    def _known_members(self) -> Members:
        if self._members is None:
            self._members = Members(self._base, self._headers)
        return self._members

    async def _send_once(
        self,
        base: str,
        method: str,
        path: str,
        body: Any = None,
        params: Any = None,
        eid: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        client = self._client_here()
        key = READ_KEYS.get(eid) if eid is not None and "authorization" not in client.headers else None
        shown = {**(headers or {}), **({"Authorization": f"Bearer {key}"} if key is not None else {})}
        try:
            with waits_at(self._base).on(f"the answer to a {method} request", self._timeout_s):
                response = await client.request(method, base + path, json=body, params=params, headers=shown)
        except httpx.TransportError as error:
            if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
                raise TimeoutError(f"{method} {path} got no answer within {self._timeout_s} s") from error
            raise ConnectionError(f"{method} {base}{path} failed: {text_of(error)}") from error
        if response.is_success:
            return response
        raise _http_error(method, path, response)

    def _client_here(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            # Connections belong to the loop that opened them and cannot be closed from here.
            self._client = httpx.AsyncClient(
                headers=self._headers, timeout=self._timeout_s, trust_env=self._trust_env, follow_redirects=True
            )
            self._loop = loop
        return self._client


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except (ValueError, RecursionError) as error:
        raise FrameInvalid(f"{response.request.url.path} answered no JSON: {response.text[:80]!r}") from error


def _model(cls: type[ModelT], response: httpx.Response) -> ModelT:
    try:
        return cls.model_validate(_json(response))
    except ValidationError as error:
        raise FrameInvalid(f"{response.request.url.path} answered no {cls.__name__}: {error}") from error


def _http_error(method: str, path: str, response: httpx.Response) -> ErrataError:
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
    if is_known_code(body):
        return wire_error(body)
    if response.status_code in (404, 405):
        why = body.get("detail") if isinstance(body, dict) else None
        detail = f": {printable(why, 1000)}" if isinstance(why, str) else ""
        return NotSupported(f"{method} {path}: this server has no such route ({response.status_code}{detail})")
    return ServiceError(f"{method} {path} answered {response.status_code}: {response.text[:200]!r}")


def _rpc_error(method: str, error: Any) -> ErrataError:
    fields = error if isinstance(error, dict) else {}
    message = str(fields.get("message", error))
    data = fields.get("data")
    if isinstance(data, dict) and is_known_code(data):
        return wire_error({"message": message, **data})
    if isinstance(data, dict) and "max_sessions" in data:  # OpenEnv's server sends these numbers without a code
        return wire_error({"message": message, "code": CapacityReached.code, **data})
    if "session" in message.lower() and "unknown" in message.lower():
        return SessionUnknown(f"{method}: {message}")
    return ServiceError(f"{method}: {message}")
