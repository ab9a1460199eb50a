"""A client that changes one field of one kind of message, and the kit for clients that judges it.

The fields are those of ``rfcs/schemas``. The sample client runs on the kit's own event loop; what it sends passes a
`Line` as it passes a proxy on the network. As the kit asks for few of the messages that a client may send,
`Talkative` also sends all others, in scenarios of their own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from errata_conformance.client_side.program import Answer, Program
from errata_conformance.client_side.sample import Client, Session
from errata_conformance.client_side.scenarios import SCENARIOS, Body, Candidate, played, played_out
from errata_conformance.client_side.stage import Stage
from errata_conformance.client_side.witness import BASE, KINDS
from errata_conformance.exact import encode
from errata_conformance.sample.server import MUX
from errata_conformance.server_side.sockets import name
from tests.machine_speed import SLOWDOWN

from .mutation import CAUGHT, FOLDER, WHOLE, WHOLES, Line, Mutation, Mutator, walked, ways_of

REPLY_S = 1.5 * SLOWDOWN
"""How long the talkative client waits for a reply that a mutation may have taken away, in seconds."""
PLAIN = {"capabilities": "CapabilitiesRequest", "close": "Close", "reset": "Reset", "step": "Step", "mcp": "Mcp"}
"""Type of a plain message -> the kind of message that it is here, as ``plain.NAME``; ``state`` has two."""
HTTP = {"fork": "http.ForkRequest", "rewards": "http.RewardPost"}
"""Last part of a path -> the kind of message that its body is."""
TALK = "talk"
"""Type of a request that no program is sent: the client says all that it can say."""


# The mutations


@cache
def client_fields() -> dict[str, dict[str, Any]]:
    """Return the schema of every field of every message of a client, by the message and the field's path."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(FOLDER.glob("*.json")):
        schema = json.loads(file.read_text())
        if file.name.startswith("client.") or "Request" in file.name or file.stem == "http.RewardPost":
            found[file.stem] = dict(walked(schema, schema))
    kind, data = {"type": {"type": "string", "const": None}}, {"data": {"type": "object"}}
    for plain in PLAIN.values():
        found[f"plain.{plain}"] = kind | ({} if plain in ("CapabilitiesRequest", "Close") else data)
    found["plain.State"] = kind
    of_data = found["plain.StateAtRequest"]
    found["plain.StateAtRequest"] = kind | data | {f"data.{path}": schema for path, schema in of_data.items()}
    return found


def client_mutations() -> list[Mutation]:
    """Return all mutations, in a fixed order."""
    made = []
    for message, known in client_fields().items():
        if not message.startswith("http."):
            made += [Mutation(message, WHOLE, how, None) for how in WHOLES]
        made += [
            Mutation(message, path, how, schema) for path, schema in known.items() for how in ways_of(path, schema)
        ]
    return made


def named(mux: bool, text: str) -> str:
    """Return the kind of a WebSocket message of the client."""
    value = json.loads(text)
    kind = value["type"]
    if mux:
        return "client." + (("McpCall" if "id" in value else "McpRead") if kind == "mcp" else KINDS[kind])
    return "plain." + (("StateAtRequest" if "data" in value else "State") if kind == "state" else PLAIN[kind])


# The client


class Mutated(Client):
    """The sample client behind a proxy.

    Args:
        mutator: The mutation.
        url: Base URL of the server.
    """

    def __init__(self, mutator: Mutator, url: str) -> None:
        super().__init__(url, None)
        self.mutator = mutator
        self.sockets: list[ClientConnection] = []

    async def connect(self, query: str = "", offer: bool = True) -> ClientConnection:
        """Connect through the proxy."""
        socket = await super().connect(query, offer)
        line = Line(self.mutator, partial(ClientConnection.send, socket))

        async def send(text: str) -> None:
            await line.send(named(socket.subprotocol == MUX, text), text)

        socket.send = send  # type: ignore[method-assign, assignment]
        self.sockets.append(socket)
        return socket

    def post(self, path: str, body: str) -> tuple[int, str]:
        """Send a POST request through the proxy."""
        return super().post(path, self.mutator.text(HTTP[path.rsplit("/", 1)[1]], body))


class Talkative(Mutated):
    """A client that also sends what the kit asks no client for.

    It looks at no answer: what is wrong in its messages the kit has to see. It waits for each, so that it acknowledges
    and names nothing that has not come, but not for ever.
    """

    async def handle(self, line: Answer) -> Answer:
        """Execute a request and return the answer."""
        if line["type"] != TALK:
            return await super().handle(line)
        socket = await self.connect()
        if socket.subprotocol == MUX:
            await self.talk(socket)
            await self.hurry(socket)
        else:
            await self.talk_plainly(socket)
        await socket.close()
        return {"type": "talked", "data": {}}

    async def ask(self, socket: ClientConnection, message: dict[str, Any], **wanted: Any) -> dict[str, Any]:
        """Send a message, and return the first one with the members `wanted` that comes; none if it is late."""
        await socket.send(encode(message))
        try:
            async with asyncio.timeout(REPLY_S):
                while True:
                    reply: dict[str, Any] = json.loads(await socket.recv())
                    if {**reply, **wanted} == reply:
                        return reply
        except TimeoutError:
            return {}

    async def talk(self, socket: ClientConnection) -> None:
        """Send every message of a multiplexed socket."""
        self.mux = socket
        one, child, group = Session(), Session(), name()
        opened = {"sid": one.sid, "type": "open", "data": {"key": one.key, "fence": 1, "group": group}}
        await self.ask(socket, opened, type="opened")
        await self.ask(socket, {"sid": one.sid, "q": 1, "type": "capabilities", "data": {}}, q=1)
        bound = {"deadline_ms": 600_000}
        reset = {"sid": one.sid, "id": 1, "type": "reset", **bound, "data": {"episode_id": "side"}}
        eid = (await self.ask(socket, reset, id=1)).get("eid", "none")
        at = {"if": {"t": 0, "eid": eid}, **bound}
        await self.ask(socket, {"sid": one.sid, "id": 2, "type": "step", **at, "data": {"n": 2}}, id=2)
        call = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "add", "arguments": {"n": 1}}}
        at = {"if": {"t": 1, "eid": eid}, **bound}
        await self.ask(socket, {"sid": one.sid, "id": 3, "type": "mcp", **at, "data": call}, id=3)
        tools = {"jsonrpc": "2.0", "id": 8, "method": "tools/list"}
        await self.ask(socket, {"sid": one.sid, "q": 2, "type": "mcp", "data": tools}, q=2)
        await self.ask(socket, {"sid": one.sid, "q": 3, "type": "state", "data": {}}, q=3)
        await self.ask(socket, {"sid": one.sid, "q": 4, "type": "state", "data": {"t": 2, "eid": eid}}, q=4)
        reward = {"t": 1, "value": 0.5, "source": "judge", "reward_id": name()}
        await asyncio.to_thread(self.post, f"/episodes/{eid}/rewards", encode(reward))
        await self.ask(socket, {"sid": one.sid, "q": 5, "type": "rewards", "data": {"eid": eid}}, q=5)
        await socket.send(encode({"sid": one.sid, "type": "ack", "data": {"last": 2, "last_seq": 1}}))
        at = {"if": {"t": 2, "eid": eid}, **bound}
        data = {"t": 1, "eid": eid, "child": {"sid": child.sid, "key": child.key}}
        await self.ask(socket, {"sid": one.sid, "id": 4, "type": "fork", **at, "data": data}, id=4)
        whole = encode({"sid": one.sid, "id": 5, "type": "step", "data": {"n": 4}})
        for n, text in ((1, whole[:30]), (2, whole[30:])):
            part = {"sid": one.sid, "id": 5, "type": "part", "data": {"n": n, "of": 2, "text": text}}
            await (self.ask(socket, part, id=5) if n == 2 else socket.send(encode(part)))
        whole = encode({"sid": one.sid, "q": 6, "type": "state", "data": {}})
        part = {"sid": one.sid, "q": 6, "type": "part", "data": {"n": 1, "of": 1, "text": whole}}
        await self.ask(socket, part, q=6)
        await socket.send(encode({"sid": one.sid, "id": 5, "type": "cancel"}))
        entries: list[dict[str, Any]] = [
            {"sid": one.sid, "key": one.key, "fence": 2, "last": 3, "last_seq": 1},
            {"sid": child.sid, "key": child.key, "fence": 1},
        ]
        await self.ask(socket, {"type": "resume", "data": entries}, sid=child.sid, type="resumed")
        where = await self.ask(socket, {"sid": child.sid, "id": 1, "type": "reset", **bound}, id=1)
        at = {"if": {"t": 0, "eid": where.get("eid", "none")}, **bound}
        again = {"sid": child.sid, "id": 2, "type": "reset", **at, "data": {}}
        where = await self.ask(socket, again, id=2)
        at = {"if": {"t": 0, "eid": where.get("eid", "none")}, **bound}
        await self.ask(socket, {"sid": child.sid, "id": 3, "type": "close", **at, "data": {}}, id=3)
        await self.ask(socket, {"q": 7, "type": "close_group", "data": {"group": group}}, q=7)

    async def hurry(self, socket: ClientConnection) -> None:
        """Send messages behind each other, without waiting for answers: what is delayed is overtaken."""
        one, child = Session(), Session()
        call = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "add", "arguments": {"n": 1}}}
        numbered: list[tuple[str, Any]] = [("reset", {}), ("step", {"n": 2}), ("mcp", call)]
        numbered += [("fork", {"t": 1, "child": {"sid": child.sid, "key": child.key}}), ("step", {"n": 3})]
        requests = [{"sid": one.sid, "id": n, "type": kind, "data": data} for n, (kind, data) in enumerate(numbered, 1)]
        for message in ({"sid": one.sid, "type": "open", "data": {"key": one.key, "fence": 1}}, *requests[:-1]):
            await socket.send(encode(message))
        await self.ask(socket, requests[-1], id=5)
        again = await self.connect()
        await again.send(encode({"type": "resume", "data": [{"sid": one.sid, "key": one.key, "fence": 2}]}))
        await self.ask(again, {"sid": one.sid, "id": 6, "type": "close"}, id=6)

    async def talk_plainly(self, socket: ClientConnection) -> None:
        """Send every message of a plain socket."""
        await self.ask(socket, {"type": "reset", "data": {}})
        found = await self.ask(socket, {"type": "capabilities"})
        eid = found.get("data", {}).get("session", {}).get("eid", "none")
        await self.ask(socket, {"type": "step", "data": {"n": 1}})
        await self.ask(socket, {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 8, "method": "tools/list"}})
        await self.ask(socket, {"type": "state", "data": {"t": 1, "eid": eid}})
        await self.ask(socket, {"type": "state"})
        await socket.send('{"type":"close"}')


class Local(Program):
    """A client on this event loop.

    Args:
        client: The client.
        reply_s: Time limit for an answer, in seconds.
    """

    def __init__(self, client: Client, reply_s: float) -> None:
        super().__init__(reply_s)
        self._client = client
        self._lines: asyncio.Queue[Answer] = asyncio.Queue()
        self.working = asyncio.create_task(self._work())

    async def write(self, line: Answer) -> None:
        """Hand a request to the client."""
        self._lines.put_nowait(line)

    async def _work(self) -> None:
        while True:
            line = await self._lines.get()
            try:
                answer = await self._client.handle(line)
            except (ConnectionClosed, OSError) as error:
                answer = {"type": "error", "data": {"code": "CONNECTION", "message": str(error)}}
            except Exception as error:  # as a process ends by it
                await self.ended(f"; the client has ended: {error!r}")
                return
            await self.took({"session": line["session"], **answer})


async def _talked(candidate: Candidate, multiplexed: bool) -> None:
    async with played(candidate, Stage(multiplexed=multiplexed)) as (_, client):
        client.reply_s *= 40  # it waits for many replies
        await client.ask("side", TALK)


SCENES: list[tuple[str, str, Body]] = [
    *SCENARIOS,
    *[(BASE, f"all that a client may say, {n}", partial(_talked, multiplexed=True)) for n in ("once", "twice")],
    *[(BASE, f"the same on a plain socket, {n}", partial(_talked, multiplexed=False)) for n in ("once", "twice")],
]
"""The kit's scenarios, and those in which the client talks: twice, as names are for one session each."""


# The kit on the client


class Seen:
    """Scenarios that see a kind of message or a field, each after its seconds, and texts of the field's values."""

    def __init__(self) -> None:
        self.scenes: list[tuple[float, tuple[str, str, Body]]] = []
        self.values: set[str] = set()


def candidate(mutator: Mutator, reply_s: float) -> Candidate:
    """Return a client with a mutation.

    Args:
        mutator: The mutation.
        reply_s: Time limit for each of its answers, in seconds.
    """

    @asynccontextmanager
    async def start(url: str, _: float) -> AsyncIterator[Program]:
        client = Talkative(mutator, url)
        local = Local(client, reply_s)
        try:
            yield local
        finally:
            local.working.cancel()
            for socket in client.sockets:
                socket.transport.abort()

    return Candidate(start)


async def seen_by(jobs: int, reply_s: float) -> dict[str, Seen]:
    """Play each scenario with a client without a mutation; return what is known of each kind of message and field."""
    places = asyncio.Semaphore(jobs)
    found: dict[str, Seen] = {}

    async def one(scene: tuple[str, str, Body]) -> None:
        async with places:
            mutator = Mutator(None, known=client_fields())
            result = await played_out(scene, candidate(mutator, reply_s))
        assert result.outcome not in CAUGHT, result
        for key, values in mutator.seen.items():
            seen = found.setdefault(key, Seen())
            seen.values |= values
            seen.scenes.append((result.seconds, scene))

    await asyncio.gather(*map(one, SCENES))
    return found


async def survives(mutation: Mutation, seen: Seen, reply_s: float) -> bool:
    """Play the scenarios that see a field, quick ones first, until one notices its mutation; return if none does."""
    mutator = Mutator(mutation, seen.values, client_fields())
    client = candidate(mutator, reply_s)
    for _, scene in sorted(seen.scenes, key=lambda one: one[0]):
        result = await played_out(scene, client)
        assert mutator.failed is None, (mutation, mutator.failed)
        if result.outcome in CAUGHT:
            return False
    assert mutator.applied, f"{mutation} changed nothing"
    return True
