"""A proxy that changes one field of one kind of message, and the kit's run through it.

The fields are those of ``rfcs/schemas``. The proxy is an ASGI application around the sample server, so a message passes
it as it passes a proxy on the network, and hundreds of servers, each with one mutation, share a port.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed

from errata_conformance.exact import digest, members
from errata_conformance.results import Outcome
from errata_conformance.sample.episodes import World
from errata_conformance.sample.server import MUX, Server
from errata_conformance.server_side.ledger import Ledger
from errata_conformance.server_side.registry import Check
from errata_conformance.server_side.run import run
from errata_conformance.server_side.target import Target
from errata_conformance.server_side.witness import SCHEMAS
from tests.machine_speed import SLOWDOWN

FOLDER = Path(__file__).parents[2] / "rfcs" / "schemas"
PAYLOAD = "payload"
"""Not a message: the payloads of all deliveries, wherever they stand, with digests of what they have become."""
WHOLE = ""
"""The path of a message itself."""
DELIVERIES = ("Observation", "StateAtReply", "StateAtFrame")
HELD_S = 0.5 * SLOWDOWN
"""How long a delayed message waits for another that overtakes it, in seconds."""
CAUGHT = (Outcome.FAILED, Outcome.BLOCKED, Outcome.NOT_FOLLOWED)
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


# The mutations


@dataclass(frozen=True)
class Mutation:
    """One change of every message of a kind.

    Args:
        message: Name of the kind: of a schema, or one of `fields`.
        path: Names of the members on the way to the field, with dots; ``[]`` for the elements of an array.
        how: One of ``drop``, ``zero``, ``repeat``, ``swap``, ``space``, ``delay``.
        schema: JSON Schema of the field, without references.
    """

    message: str
    path: str
    how: str
    schema: Any = field(compare=False, hash=False)

    def __str__(self) -> str:
        return " ".join(one for one in (self.message, self.path, self.how) if one)


def resolved(schema: Any, root: Any) -> Any:
    """Return a schema with its reference, or that of its alternative which is not null, put in."""
    if "$ref" in schema:
        return resolved(root["$defs"][schema["$ref"].split("/")[-1]], root)
    for one in schema.get("anyOf", ()):
        if one.get("type") != "null":
            return resolved(one, root)
    return schema


def walked(schema: Any, root: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and schema of every field below a schema."""
    schema = resolved(schema, root)
    for name, one in schema.get("properties", {}).items():
        path = f"{before}.{name}" if before else name
        yield path, resolved(one, root)
        yield from walked(one, root, path)
    if isinstance(schema.get("items"), dict):
        yield from walked(schema["items"], root, f"{before}.[]" if before else "[]")


@cache
def fields() -> dict[str, dict[str, Any]]:
    """Return the schema of every field of every message of a server, by the message and the field's path."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(FOLDER.glob("*.json")):
        schema = json.loads(file.read_text())
        if not file.name.startswith(("client.", "metadata.")) and "Request" not in file.name:
            found[file.stem] = dict(walked(schema, schema))
    found["plain.Capabilities"] = {
        "type": found["server.CapabilitiesReply"]["type"],
        "data": {"type": "object"},
        **{f"data.{path}": one for path, one in found["plain.Capabilities"].items()},
    }
    for name in ("Observation", "McpReply", "McpReadReply", "StateReply", "Error"):
        address = ("sid", "id", "q", "request", "index")  # which a plain frame does not have
        found[f"plain.{name}"] = {k: v for k, v in found[f"server.{name}"].items() if k not in address}
    found["http.State"] = {"body": {"type": "object"}, "etag": found["server.Observation"]["digest"]}
    found["http.RewardRecord"] = {f"[].{path}": one for path, one in found["http.RewardRecord"].items()}
    parts = {"observation": {"type": "object"}, "reward": {"type": "number"}, "done": {"type": "boolean"}}
    markers = found.pop("observation.ErrorMarkers")
    found[PAYLOAD] = {**parts, **{f"observation.{path}": one for path, one in markers.items()}}
    return found


WHOLES = ("drop", "repeat", "delay")
"""The mutations of a message itself."""


def ways_of(path: str, schema: Any) -> list[str]:
    """Return the mutations of a field."""
    swap = [] if "const" in schema else ["swap"]
    return ["drop", "zero", "repeat", *swap, *(["space"] if path in ("data", "body") else [])]


def mutations() -> list[Mutation]:
    """Return all mutations, in a fixed order."""
    made = []
    for message, known in fields().items():
        if message[:5] in ("serve", "plain"):
            made += [Mutation(message, WHOLE, how, None) for how in WHOLES]
        for path, schema in known.items():
            ways = ways_of(path, schema)
            if message == PAYLOAD:  # of a payload it would not be the same at each reading
                ways = [one for one in ways if one != "swap"]
            if (message, path) == ("http.State", "body"):
                ways = ["zero", "swap", "space"]
            if (message, path) == ("http.State", "etag"):
                ways = ["drop", "zero", "swap"]
            made += [Mutation(message, path, how, schema) for how in ways]
    return made


def other(raw: str | None, schema: Any) -> str:
    """Return the text of a value that the schema allows and that is not `raw`."""
    kind = schema.get("type")
    pattern = schema.get("pattern", "")
    candidates: list[Any]
    if "sha256" in pattern:
        candidates = ["sha256:" + "0" * 64]
    elif pattern:
        candidates = ["A" * 24]
    elif "enum" in schema:
        candidates = list(schema["enum"])
    elif kind == "integer":
        low = schema.get("minimum", 0)
        candidates = [low, low + 1]
    elif kind == "array" and "prefixItems" in schema:
        candidates = [[0, 0], [0, 1]]
    else:
        by_type: dict[str, list[Any]] = {
            "number": [0.0, 1.0],
            "boolean": [False, True],
            "object": [{}, {"other": 0}],
            "array": [[], [{}]],
        }
        candidates = by_type.get(str(kind), ["other", "others"])
    value = None if raw is None else json.loads(raw)
    return json.dumps(next(one for one in candidates if one != value), separators=(",", ":"))


def changed(text: str, path: list[str], change: Callable[[str], list[str]]) -> str:
    """Return a JSON text in which the member at `path` has become those that `change` makes of its text."""
    name, rest = path[0], path[1:]
    if name == "[]":
        found = [changed(one, rest, change) for one in pieces(text)] if text.startswith("[") else None
        return text if found is None else f"[{','.join(found)}]"
    if not text.startswith("{"):
        return text
    made = []
    for key, raw in members(text).items():
        values = [raw] if key != name else [changed(raw, rest, change)] if rest else change(raw)
        made += [f"{json.dumps(key)}:{one}" for one in values]
    return f"{{{','.join(made)}}}"


def pieces(text: str) -> list[str]:
    """Return the texts of an array's elements."""
    at, found, decoder = 1, [], json.JSONDecoder()
    while text[at] != "]":
        _, end = decoder.raw_decode(text, at)
        found.append(text[at:end])
        at = end + (text[end] == ",")
    return found


def spaced(raw: str) -> str:
    """Return the same JSON value with a space in it."""
    return f"{raw[0]} {raw[1:]}" if raw[0] in "{[" else f" {raw}"


class Mutator:
    """Makes a mutation of the messages of one server or client.

    Args:
        mutation: The mutation; None to change nothing.
        values: Texts of values that the field has elsewhere, for ``swap`` where the last one is the same.
        known: The fields of the messages; those of a server by default.

    Attributes:
        applied: How many messages it has changed.
    """

    def __init__(
        self, mutation: Mutation | None, values: Collection[str] = (), known: dict[str, dict[str, Any]] | None = None
    ) -> None:
        self.mutation, self.applied = mutation, 0
        self._known = fields() if known is None else known
        self.seen: dict[str, set[str]] = {}
        """Kinds of messages that passed, and as `KIND PATH` their fields, each with texts of its values."""
        self.failed: Exception | None = None
        """What went wrong in the proxy itself, which no check is to be thanked for."""
        self._values = sorted(values)
        self._last: str | None = None

    def text(self, name: str, text: str) -> str:
        """Return a message of a kind as it is sent on."""
        try:
            return self._text(name, text)
        except Exception as error:
            self.failed = error
            raise

    def http(self, name: str, body: str, headers: dict[str, str]) -> str:
        """Return the body of an HTTP answer, and change its headers."""
        try:
            return self._http(name, body, headers)
        except Exception as error:
            self.failed = error
            raise

    def _text(self, name: str, text: str) -> str:
        self._note(name, text)
        mutation = self.mutation
        if mutation is None or not mutation.path:
            return text
        if mutation.message == PAYLOAD:
            return self._payload(name, text)
        return self._counted(text, changed(text, mutation.path.split("."), self._change)) if self.is_of(name) else text

    def is_of(self, name: str) -> bool:
        """Return whether the mutation is of these messages."""
        return self.mutation is not None and self.mutation.message == name

    def _http(self, name: str, body: str, headers: dict[str, str]) -> str:
        if name != "http.State":
            return self.text(name, body)
        mutation, etag = self.mutation, json.dumps(headers["etag"].strip('"'))
        if mutation is None:
            for path, text in ((WHOLE, body), ("body", body), ("etag", etag)):
                self._saw(name, path, [text])
            self._note_payload(body)
        elif mutation.message == PAYLOAD:
            made = self._counted(body, changed(body, mutation.path.split("."), self._change))
            headers["etag"] = headers["etag"].replace(digest(body), digest(made))
            return made
        elif self.is_of(name) and mutation.path == "body":
            return self._counted(body, self._change(body)[0])
        elif self.is_of(name):
            values = self._change(etag)
            self.applied += values != [etag]
            del headers["etag"]
            headers |= {"etag": f'"{json.loads(one)}"' for one in values}  # noqa: B035 - one or none
        return body

    def _payload(self, name: str, text: str) -> str:
        assert self.mutation is not None
        if name.split(".")[1] not in DELIVERIES:
            return text
        data = members(text)["data"]
        made = changed(data, self.mutation.path.split("."), self._change)
        text = changed(text, ["data"], lambda _: [made])
        return self._counted(data, made) and changed(text, ["digest"], lambda _: [json.dumps(digest(made))])

    def _counted(self, before: str, after: str) -> str:
        self.applied += before != after
        return after

    def _change(self, raw: str) -> list[str]:
        assert self.mutation is not None
        how, last = self.mutation.how, self._last
        self._last = raw
        if how == "drop":
            return []
        if how == "space":
            return [spaced(raw)]
        if how == "swap":
            return [next((one for one in (last, *self._values) if one not in (None, raw)), raw)]
        return [other(raw, self.mutation.schema), *([raw] if how == "repeat" else [])]

    def _note(self, name: str, text: str) -> None:
        if self.mutation is None:
            for path in (WHOLE, *self._known.get(name, ())):
                self._saw(name, path, at(text, path))
            if name.split(".")[1] in DELIVERIES:
                self._note_payload(members(text)["data"])

    def _note_payload(self, payload: str) -> None:
        for path in fields()[PAYLOAD]:
            self._saw(PAYLOAD, path, at(payload, path))

    def _saw(self, name: str, path: str, values: list[str]) -> None:
        held = self.seen.setdefault(f"{name} {path}".strip(), set()) if values else set()
        held.update(values[: 3 - len(held)])


def at(text: str, path: str) -> list[str]:
    """Return the texts of a field's values in a message."""
    found: list[str] = []

    def note(raw: str) -> list[str]:
        found.append(raw)
        return [raw]

    if path:
        changed(text, path.split("."), note)
    return found if path else [text]


# The proxy


def named(mux: bool, text: str) -> str:
    """Return the kind of a WebSocket message of the server."""
    value = json.loads(text)
    kind = value["type"]
    if kind == "part":
        return "server.Part"
    if kind == "mcp":
        name = "McpReply" if ("id" in value if mux else "eid" in value) else "McpReadReply"
    else:
        name = SCHEMAS[kind]
    plain = {"StateAtReply": "StateAtFrame", "CapabilitiesReply": "Capabilities"}
    return f"server.{name}" if mux else f"plain.{plain.get(name, name)}"


HTTP = {
    ("POST", "fork"): "http.ForkReply",
    ("GET", "rewards"): "http.RewardRecord",
    ("POST", "rewards"): "http.RewardPost",
}


class Proxy:
    """An ASGI application that mutates what another one sends."""

    def __init__(self, app: Any, mutator: Mutator) -> None:
        self._app, self._mutator = app, mutator

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] == "websocket":
            await self._app(scope, receive, _Frames(self._mutator, scope, send).send)
        else:
            await self._app(scope, receive, _Answer(self._mutator, scope, send).send)


class Line:
    """One direction of a connection, on which messages are mutated.

    Args:
        mutator: The mutation.
        on: Called with the text of each message that goes on.
    """

    def __init__(self, mutator: Mutator, on: Callable[[str], Awaitable[None]]) -> None:
        self._mutator, self._on = mutator, on
        self._held: list[str] = []
        self._timers: set[asyncio.Task[None]] = set()

    async def send(self, name: str, text: str) -> None:
        """Send a message of a kind on, if and as the mutation has it."""
        text = self._mutator.text(name, text)
        mutation = self._mutator.mutation
        how = mutation.how if mutation is not None and not mutation.path and self._mutator.is_of(name) else None
        self._mutator.applied += how is not None
        if how == "delay":
            self._held.append(text)
            timer = asyncio.create_task(self._later())
            self._timers.add(timer)
            timer.add_done_callback(self._timers.discard)
            return
        for _ in range({None: 1, "repeat": 2, "drop": 0}[how]):
            await self._on(text)
        await self.release()

    async def _later(self) -> None:
        await asyncio.sleep(HELD_S)
        await self.release()

    async def release(self) -> None:
        """Send on what was delayed."""
        while self._held:
            try:
                await self._on(self._held.pop(0))
            except (RuntimeError, OSError, ConnectionClosed):
                return  # the socket is closed


class _Frames:
    """What a WebSocket of the server sends."""

    def __init__(self, mutator: Mutator, scope: Any, send: Send) -> None:
        self._on = send
        self._line = Line(mutator, lambda text: send({"type": "websocket.send", "text": text}))
        self._mux = MUX in scope["subprotocols"]

    async def send(self, message: Any) -> None:
        """Send a message on, if and as the mutation has it."""
        if message["type"] != "websocket.send":
            await self._line.release()
            await self._on(message)
            return
        await self._line.send(named(self._mux, message["text"]), message["text"])


class _Answer:
    """What an HTTP request is answered with."""

    def __init__(self, mutator: Mutator, scope: Any, send: Send) -> None:
        self._mutator, self._on = mutator, send
        *_, last = scope["path"].split("/")
        self._name = HTTP.get((scope["method"], last))
        if re.search(r"/states/\d+$", scope["path"]):
            self._name = "http.State"
        self._start: Any = None
        self._body = b""

    async def send(self, message: Any) -> None:
        """Send a message on, as the mutation has it."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        headers = {key.decode(): value.decode() for key, value in self._start["headers"]}
        body = self._body
        if self._name is not None and self._start["status"] == 200:
            body = self._mutator.http(self._name, body.decode(), headers).encode()
            headers["content-length"] = str(len(body))
        pairs = [(key.encode(), value.encode()) for key, value in headers.items()]
        await self._on({**self._start, "headers": pairs})
        await self._on({**message, "body": body})


class Switchboard(Server):
    """Many servers on one port, each below a path of its own."""

    def __init__(self) -> None:
        super().__init__(World())
        self.app = self  # type: ignore[assignment]
        self._apps: dict[str, Any] = {}

    def add(self, mutator: Mutator) -> str:
        """Add a server behind a proxy with this mutation, and return its path."""
        path = f"/{len(self._apps)}"
        self._apps[path] = Proxy(Server(World()).app, mutator)
        return path

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve a connection to one of them."""
        first, _, rest = scope["path"].removeprefix("/").partition("/")
        path = f"/{rest}"
        await self._apps[f"/{first}"]({**scope, "path": path, "raw_path": path.encode()}, receive, send)


# The kit through the proxy


@dataclass(frozen=True)
class Judge:
    """Runs checks against servers with a mutation.

    Args:
        url: Address of the switchboard.
        switchboard: The servers.
        target: The server as the kit knows it, without a mutation.
    """

    url: str
    switchboard: Switchboard
    target: Target

    def at(self, mutator: Mutator, reply_s: float) -> Target:
        """Return a new server with a mutation."""
        url = self.url + self.switchboard.add(mutator)
        ledger = Ledger()
        ledger.capabilities = self.target.ledger.capabilities
        return replace(self.target, url=url, reply_s=reply_s, ledger=ledger)

    async def seen(self, checks: list[Check], jobs: int) -> dict[str, Seen]:
        """Run each check on a server without a mutation; return what is known of each kind of message and field."""
        places = asyncio.Semaphore(jobs)
        found: dict[str, Seen] = {}

        async def one(check: Check) -> None:
            async with places:
                mutator = Mutator(None)
                (result,) = await run(self.at(mutator, self.target.reply_s), [check])
            assert result.outcome not in CAUGHT, result
            for name, values in mutator.seen.items():
                seen = found.setdefault(name, Seen())
                seen.values |= values
                seen.checks.append((result.seconds, check))

        await asyncio.gather(*map(one, checks))
        return found

    async def survives(self, mutation: Mutation, seen: Seen, reply_s: float) -> bool:
        """Run the checks that see a field, quick ones first, until one notices its mutation; return if none does."""
        mutator = Mutator(mutation, seen.values)
        target = self.at(mutator, reply_s)
        for _, check in sorted(seen.checks, key=lambda one: one[0]):
            (result,) = await run(target, [check])
            assert mutator.failed is None, (mutation, mutator.failed)
            if result.outcome in CAUGHT:
                return False
        assert mutator.applied, f"{mutation} changed nothing"
        return True


@dataclass
class Seen:
    """Checks that see a kind of message or a field, each after its seconds, and texts of the field's values."""

    checks: list[tuple[float, Check]] = field(default_factory=list)
    values: set[str] = field(default_factory=set)
