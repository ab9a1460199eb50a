"""The example exchanges of rfcs/PROTOCOL.md and rfcs/notes/: read from the texts, and played against a server here.

An exchange is a block of text behind ``<!-- exchange NAME: ENVIRONMENT -->``. Its lines:

    [1] connect /ws openenv.mux.v1     a client connects; the subprotocol may be left out
    [1] --> TEXT                       it sends a frame
    [1] <-- TEXT                       it receives one
    [1] <x- TEXT                       the server sends one, and the client does not get it
    [1] lost                           the connection breaks
    [1] closed CODE                    the server closes it
    HTTP --> METHOD PATH [BODY]        a request over HTTP
    HTTP <-- STATUS [HEADERS] BODY     its answer
    server stops                       as on SIGTERM

The texts of frames and bodies are the bytes on the wire.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

from errata_protocol.environment import Snapshot
from errata_protocol.markers import Detection, ErrorKind, ErrorMarkers, ErrorSite
from errata_server.app import create_fastapi_app
from errata_server.ids import Ids
from errata_server.journal import MemoryJournal
from errata_server.runtime.runtime import Runtime
from errata_server.sandbox.fake.backend import FakeBackend
from errata_server.settings import Settings
from errata_server.simulation import SimulatedClock

from .environments.toolbox import ToolboxEnvironment
from .server.asgi_peer import REPLY_S, Peer

TEXT = Path(__file__).parents[1] / "rfcs" / "PROTOCOL.md"
NOTES = sorted(TEXT.parent.glob("notes/*.md"))
BLOCK = re.compile(r"<!-- exchange ([\w-]+): (\w+) -->\n+```text\n(.*?)```", re.S)
LINE = re.compile(
    r"\[(?P<socket>\d)\] (?:(?P<way>-->|<--|<x-)(?: (?P<text>.*))?|connect (?P<path>\S+)(?: (?P<sub>\S+))?"
    r"|(?P<lost>lost)|closed (?P<closed>\d+))"
    r"|HTTP --> (?P<method>[A-Z]+) (?P<url>\S+)(?: (?P<body>.*))?|HTTP <--(?P<answer>.*)|(?P<stops>server stops)"
)
SHOWN_HEADERS = ("etag", "x-errata-t", "x-errata-kind", "retry-after")
QUIET_S = 0.25
"""How long nothing comes before a recording takes it that no more will."""


class TallyAction(Action):
    """Add ``n``; ``do`` makes it fail, or end the episode."""

    n: int = 1
    do: str = ""


class TallyObservation(Observation):
    """The sum so far."""

    total: int = 0


class MarkedObservation(ErrorMarkers, Observation):
    """The same, with markers."""

    total: int = 0


class TallyEnvironment(Environment[TallyAction, TallyObservation, State]):
    """A counter that can be restored and forked."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    observation_cls: type[Any] = TallyObservation

    def __init__(self) -> None:
        super().__init__()
        self._total = 0
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
        raise NotImplementedError

    def step(self, action: TallyAction, timeout_s: float | None = None, **_: Any) -> Any:
        raise NotImplementedError

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
        self._total = 0
        self._state = State(episode_id=episode_id, step_count=0)
        return self.observation_cls()

    async def step_async(self, action: TallyAction, timeout_s: float | None = None, **_: Any) -> Any:
        if action.do == "fail":
            raise ValueError("the tally is broken")
        self._total += action.n
        self._state.step_count += 1
        observation = self.observation_cls(total=self._total, reward=float(action.n), done=action.do == "done")
        if action.do == "mark":
            site = ErrorSite(action_field="do", action_span=(0, 4), source="action")
            return observation.with_detection(Detection.of(ErrorKind.COMMAND_NOT_FOUND, site))
        return observation

    @property
    def state(self) -> State:
        return self._state

    async def snapshot(self) -> Snapshot:
        return Snapshot(json.dumps([self._total, self._state.step_count, self._state.episode_id]).encode())

    async def restore(self, snapshot: Snapshot) -> None:
        self._total, steps, episode_id = json.loads(snapshot.state)
        self._state = State(episode_id=episode_id, step_count=steps)

    async def forked(self, episode_id: str) -> None:
        self._state = State(episode_id=episode_id, step_count=0)


class MarkedEnvironment(TallyEnvironment):
    """A counter whose observations have markers."""

    observation_cls = MarkedObservation


CLASSES: dict[str, tuple[type[Any], type[Action], type[Observation]]] = {
    "tally": (TallyEnvironment, TallyAction, TallyObservation),
    "marked": (MarkedEnvironment, TallyAction, MarkedObservation),
    "toolbox": (ToolboxEnvironment, CallToolAction, CallToolObservation),
}


class CountedIds(Ids):
    """Ids of the usual forms, the same ones in every run."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = count()

    def _bytes(self, count: int) -> bytes:
        return hashlib.sha256(f"id {next(self._numbers)}".encode()).digest()[:count]


def application(environment: str) -> tuple[FastAPI, Runtime]:
    """Return a server of one of the examples' environments, and what to stop it by."""
    factory, action_cls, observation_cls = CLASSES[environment]
    runtime = Runtime(
        Settings(),
        journal=MemoryJournal(),
        sandboxes=FakeBackend(),
        ids=CountedIds(),
        clock=SimulatedClock(lambda: 0.0),
    )
    app = create_fastapi_app(
        factory, action_cls, observation_cls, max_concurrent_envs=8, env_name=environment, runtime=runtime
    )
    return app, runtime


@dataclass(frozen=True)
class Exchange:
    """One block of the text.

    Args:
        name: Unique.
        environment: One of `CLASSES`.
        lines: Of the block.
    """

    name: str
    environment: str
    lines: tuple[str, ...]

    def frames(self) -> Iterator[tuple[str, str]]:
        """Yield (direction, text) of every frame on a multiplexed socket; direction is ``-->`` or ``<--``."""
        mux = set()
        for line in self.lines:
            found = read_line(line)
            if found["sub"]:
                mux.add(found["socket"])
            elif found["way"] and found["socket"] in mux:
                yield "-->" if found["way"] == "-->" else "<--", found["text"]


def exchanges(text: str) -> list[Exchange]:
    """Return the exchanges of a text."""
    return [Exchange(name, env, tuple(block.splitlines())) for name, env, block in BLOCK.findall(text)]


def read_line(line: str) -> dict[str, Any]:
    """Return the parts of a line.

    Raises:
        ValueError: It is none.
    """
    found = LINE.fullmatch(line)
    if found is None:
        raise ValueError(f"no line of an exchange: {line!r}")
    return found.groupdict()


def envelopes(frame: str) -> list[str]:
    """Return the exact texts of the envelopes in a frame: how many of them share one depends on the moment."""
    if frame.startswith("["):
        return [bytes(raw).decode() for raw in msgspec.json.decode(frame, type=list[msgspec.Raw])]
    return [frame]


class Player:
    """Plays an exchange.

    Args:
        app: The server.
        runtime: Its runtime.
        stack: Ends what is left connected.
    """

    def __init__(self, app: FastAPI, runtime: Runtime, stack: AsyncExitStack) -> None:
        self._app, self._runtime, self._stack = app, runtime, stack
        self.peers: dict[str, Peer] = {}
        self._arrived: dict[str, list[str]] = {}

    async def do(self, part: dict[str, Any]) -> str | None:
        """Do what a line of the client's says; return the answer of HTTP."""
        if part["path"]:
            path, _, query = part["path"].partition("?")
            subprotocols = (part["sub"],) if part["sub"] else ()
            peer = Peer(self._app, path, query=query, subprotocols=subprotocols)
            self.peers[part["socket"]] = await self._stack.enter_async_context(peer)
            assert peer.answer["type"] == "websocket.accept" and peer.answer.get("subprotocol") == part["sub"]
            self._arrived[part["socket"]] = []
        elif part["way"] == "-->":
            self.peers[part["socket"]].send(part["text"])
        elif part["lost"]:
            peer = self.peers.pop(part["socket"])
            peer._sent.put_nowait({"type": "websocket.disconnect", "code": 1006})
            await asyncio.wait_for(peer._task, REPLY_S)
        elif part["stops"]:
            await self._runtime.shutdown.drain(REPLY_S)
        elif part["method"]:
            transport = httpx.ASGITransport(self._app, client=("testclient", 50000))
            async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
                answer = await client.request(part["method"], part["url"], content=part["body"])
            shown = "; ".join(f"{name}: {answer.headers[name]}" for name in SHOWN_HEADERS if name in answer.headers)
            return f"{answer.status_code} {f'[{shown}] ' if shown else ''}{answer.text}"
        return None

    async def next_frame(self, socket: str, wait_s: float = REPLY_S) -> str:
        """Return the next envelope of a socket as the line that says so.

        Raises:
            TimeoutError: None came.
        """
        arrived = self._arrived[socket]
        if not arrived:
            message = await asyncio.wait_for(self.peers[socket].got.get(), wait_s)
            if message["type"] == "websocket.close":
                return f"[{socket}] closed {message['code']}"
            arrived += envelopes(message["text"])
        return f"[{socket}] <-- {arrived.pop(0)}"


@asynccontextmanager
async def player(environment: str) -> AsyncIterator[Player]:
    """Start a server, and end it with all connections."""
    app, runtime = application(environment)
    async with AsyncExitStack() as stack:
        yield Player(app, runtime, stack)
    await runtime.close()


async def played(exchange: Exchange) -> list[str]:
    """Play what the client does in an exchange; return its lines with what a server answers now.

    The server's frames are read where the text has them, one for one: a frame that holds several envelopes stands there
    as one line for each. More frames than the text has stand at the end.
    """
    lines: list[str] = []
    async with player(exchange.environment) as now:
        answer: str | None = None
        for line in exchange.lines:
            part = read_line(line)
            if part["answer"] is not None:
                assert answer is not None, "an answer of HTTP stands behind its request"
                lines.append(f"HTTP <-- {answer}")
            elif part["way"] in ("<--", "<x-") or part["closed"]:
                got = await now.next_frame(part["socket"])
                lines.append(got if part["way"] != "<x-" else got.replace("<--", "<x-", 1))
            else:
                answer = await now.do(part)
                lines.append(line)
        for socket in now.peers:
            while not now.peers[socket].got.empty():
                lines.append(await now.next_frame(socket))
    return lines


async def recorded(exchange: Exchange) -> list[str]:
    """As `played`, but what the text has of the server counts for nothing: all that comes is written down.

    Requests with no line of the server between them are sent together. A line ``<x-`` behind them says that the client
    gets none of their replies.
    """
    lines: list[str] = []
    parts = [read_line(line) for line in exchange.lines]
    mine = [
        i for i, p in enumerate(parts) if not (p["answer"] is not None or p["way"] in ("<--", "<x-") or p["closed"])
    ]
    async with player(exchange.environment) as now:
        for i, following in zip(mine, [*mine[1:], len(parts)], strict=True):
            answer = await now.do(parts[i])
            lines.append(exchange.lines[i])
            if answer is not None:
                lines.append(f"HTTP <-- {answer}")
            if following == i + 1 < len(parts) and parts[i]["way"] and parts[following]["way"]:
                continue
            had = Counter(part["socket"] for part in parts[i + 1 : following] if part["way"] in ("<--", "<x-"))
            lost = any(part["way"] == "<x-" for part in parts[i + 1 : following])
            for socket in list(now.peers):
                while True:
                    try:  # as many as the text had are waited for, however busy the machine is
                        got = await now.next_frame(socket, REPLY_S if had[socket] > 0 else QUIET_S)
                    except TimeoutError:
                        break
                    had[socket] -= 1
                    lines.append(got.replace("<--", "<x-", 1) if lost else got)
                    if "] closed" in got:
                        break
    return lines
