"""Whatever field of a client's message is wrong, our server answers what the protocol says, and nobody else notices.

All mutations of `client_mutation` go to one server: those of the multiplexed socket on one connection, on which another
session steps on between them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from fastapi import FastAPI

from errata_conformance.exact import encode
from errata_conformance.server_side.sockets import name
from errata_conformance.server_side.witness import RECORDED
from errata_conformance.statements import schema
from errata_protocol.capabilities import PROTOCOL_NAME
from errata_server.app import create_fastapi_app
from errata_server.settings import Settings
from tests.protocol_exchanges import CLASSES
from tests.server.asgi_peer import Peer
from tests.server.conftest import simulated

from .client_mutation import client_mutations
from .mutation import Mutation, changed, other, spaced

BEYOND = 9
"""A number that nothing has reached."""
CALL = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "add", "arguments": {"n": 1}}}


class Strict(Exception):
    """A key stands twice."""


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise Strict
    return dict(pairs)


class Session:
    """A session of a multiplexed socket, after a reset and a step."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.sid, self.key, self.id = peer, name(), name(), 0
        self.eid = ""
        self.total = 0

    async def begin(self) -> Session:
        """Open it, reset it and step."""
        self.peer.send(encode({"sid": self.sid, "type": "open", "data": {"key": self.key}}))
        self.id = 1
        self.peer.send(encode({"sid": self.sid, "id": 1, "type": "reset"}))
        self.eid = (await answer(self.peer, [], sid=self.sid, id=1))["eid"]
        await self.step()
        return self

    async def step(self) -> list[dict[str, Any]]:
        """Step, check that the session is where it was, and return what came on the socket before the answer."""
        self.total += 1
        self.id += 1
        self.peer.send(encode({"sid": self.sid, "id": self.id, "type": "step", "data": {"n": 1}}))
        before: list[dict[str, Any]] = []
        reply = await answer(self.peer, before, sid=self.sid, id=self.id)
        assert reply["type"] == "observation" and reply["data"]["observation"]["total"] == self.total, reply
        return before


async def answer(peer: Peer, before: list[dict[str, Any]], **address: Any) -> dict[str, Any]:
    """Return the next message with this address, and add those before it to a list."""
    found: dict[str, Any] | None = None
    while found is None:
        frame: Any = await peer.receive()
        assert frame is not None, "the server hung up"
        for one in frame if isinstance(frame, list) else [frame]:
            if found is None and {**one, **address} == one:
                found = one
            else:
                before.append(one)
    return found


def legal(kind: str, of: Session, child: Session) -> dict[str, Any]:
    """Return a message with all its fields that a session sends next."""
    bound = {"if": {"t": of.id - 1, "eid": of.eid}, "deadline_ms": 600_000}
    numbered = {"sid": of.sid, "id": of.id + 1}
    whole = encode({"sid": of.sid, "id": of.id + 1, "type": "step", "data": {"n": 1}})
    data: dict[str, Any] = {
        "Open": {"key": child.key, "fence": 1, "group": name()},
        "Resume": [{"sid": of.sid, "key": of.key, "last": 1, "last_seq": 0, "fence": 3}],
        "Ack": {"last": 1, "last_seq": 0},
        "Reset": {"episode_id": "mine"},
        "Step": {"n": 1},
        "McpCall": CALL,
        "McpRead": {"jsonrpc": "2.0", "id": 7, "method": "tools/list"},
        "Fork": {"t": 1, "eid": of.eid, "child": {"sid": child.sid, "key": child.key}},
        "State": {"t": 1, "eid": of.eid},
        "Rewards": {"eid": of.eid},
        "CloseGroup": {"group": name()},
        "Part": {"n": 1, "of": 1, "text": whole},
    }.get(kind, {})
    q = {"sid": of.sid, "q": 5}
    head: dict[str, Any] = {
        "Open": {"sid": child.sid, "type": "open"},
        "Resume": {"type": "resume"},
        "Ack": {"sid": of.sid, "type": "ack"},
        "Cancel": {"sid": of.sid, "id": of.id, "type": "cancel"},
        "CapabilitiesRequest": {**q, "type": "capabilities"},
        "CloseGroup": {"q": 5, "type": "close_group"},
        "McpRead": {**q, "type": "mcp"},
        "McpCall": {**numbered, "type": "mcp", **bound},
        "Part": {**numbered, "type": "part"},
        "Rewards": {**q, "type": "rewards"},
        "State": {**q, "type": "state"},
    }.get(kind, {**numbered, "type": kind.lower(), **bound})
    return head if kind == "Cancel" else {**head, "data": data}


def mutated(mutation: Mutation, message: Any, stranger: Session) -> str:
    """Return a message's text with a mutation; a swap puts in what is another session's, or lies beyond."""
    last = mutation.path.split(".")[-1]
    swapped: Any = {
        "sid": stranger.sid,
        "key": stranger.key,
        "eid": stranger.eid,
        "group": name(),
        "if": {"t": BEYOND},
        "child": {"sid": stranger.sid, "key": stranger.key},
        "data": {},
        "text": "{}",
        "deadline_ms": 700_000,
    }.get(last, BEYOND)

    def change(raw: str) -> list[str]:
        match mutation.how:
            case "drop":
                return []
            case "space":
                return [spaced(raw)]
            case "swap":
                return [encode(swapped)]
        return [other(raw, mutation.schema), *([raw] if mutation.how == "repeat" else [])]

    return changed(encode(message), mutation.path.split("."), change)


UNREAD = ("CapabilitiesRequest", "Close")
"""Messages whose ``data`` is neither an argument nor among those that PROTOCOL D1 has a server check."""
TAKEN = {
    **{"Open": "opened", "Resume": "resumed", "Reset": "observation", "Step": "observation", "McpCall": "mcp"},
    **{"McpRead": "mcp", "Fork": "forked", "Close": "closed", "State": "state_at", "Rewards": "rewards"},
    **{"CapabilitiesRequest": "capabilities", "CloseGroup": "group_closed", "Part": "observation"},
    **{"Ack": None, "Cancel": None},
}
"""What answers a message that is taken; None: nothing does."""
ANSWERED: list[tuple[str, str | None]] = [
    (r"Part sid (zero|swap)", "INVALID_ENVELOPE"),  # PROTOCOL D9: the whole is of another session
    (r"(Capabilit|Part|Resume)\w* sid", "taken"),  # it has none, or it is ignored
    (r"(Ack|Cancel|Mc\w+|Reset|Step|Close|Fork|State|Rewards) sid", "NOT_ATTACHED"),  # PROTOCOL D12
    (r"Open sid", "SESSION_LOST"),  # PROTOCOL D3: the sid of another session; `A`s name the child of a fork before
    (r"(Mc\w+|Reset|Step|Close|Fork) id zero", "CONFLICT"),  # PROTOCOL D4: id 1 was the reset
    (r"(Mc\w+|Reset|Step|Close|Fork) id swap", "OUT_OF_ORDER"),  # PROTOCOL D4
    (r"\w+ if(\.\w+)? (zero|swap)", "PRECONDITION_FAILED"),  # PROTOCOL D6
    (r"\w+ deadline_ms zero", "TIMEOUT"),  # PROTOCOL D10
    (r"Resume data zero", "INVALID_ENVELOPE"),  # PROTOCOL D7: an empty list
    (r"Resume data\.\[\]\.(key|sid)|Resume data\.\[\]\.last swap", "SESSION_LOST"),  # PROTOCOL D7
    (r"Ack data\.last swap|Ack data\.last_seq (zero|swap)", "INVALID_ENVELOPE"),  # PROTOCOL D7: beyond what was sent
    (r"McpCall data (drop|zero|swap)", "INVALID_ENVELOPE"),  # PROTOCOL D2: a method that is no tools/call has a `q`
    (r"(Fork|State|Rewards) data\.eid zero|Fork data\.eid swap", "UNKNOWN_EPISODE"),  # PROTOCOL A2, PROTOCOL D11
    (r"(Fork|State) data\.t swap", "T_OUT_OF_RANGE"),  # PROTOCOL A2, PROTOCOL D11
    (r"Fork data\.child(\.sid)? swap", "VALIDATION_ERROR"),  # PROTOCOL D11: the child's sid is taken
    (r"State data (drop|zero|swap)", "state"),  # PROTOCOL D2: no `t`, the environment's own
    (r"Part data\.of", None),  # PROTOCOL D9: there is another part to come
    (r"Part data\.(n|text)", "INVALID_ENVELOPE"),  # PROTOCOL D9: it does not follow, or the whole is no envelope
]
"""Mutations whose text is well-formed -> how they are answered, with the clause; all others are taken."""


def read(text: str) -> tuple[dict[str, Any], bool]:
    """Return the value of a message, and whether a key stands twice in it."""
    try:
        return json.loads(text, object_pairs_hook=unique), False
    except Strict:
        return json.loads(text), True


def expected(mutation: Mutation, text: str) -> str | None:
    """Return the error code, or the type of the answer, that the protocol has for a mutation; None for nothing."""
    kind = mutation.message.split(".")[1]
    value, twice = read(text)
    if mutation.path == "type":
        return "UNKNOWN_TYPE" if mutation.how == "zero" else "INVALID_ENVELOPE"
    whole = value if kind == "Cancel" else {"data": {}, **value}
    if kind in UNREAD:
        whole["data"] = {}
    wrong = next(iter(jsonschema.Draft202012Validator(schema(mutation.message)).iter_errors(whole)), None)
    if twice or wrong is not None:
        argument = mutation.path.startswith("data.") if twice else wrong is not None and "data" in wrong.absolute_path
        return "VALIDATION_ERROR" if kind == "Fork" and argument else "INVALID_ENVELOPE"
    for pattern, answer_ in ANSWERED:
        if re.match(pattern, str(mutation).removeprefix("client.")):
            return TAKEN[kind] if answer_ == "taken" else answer_
    return TAKEN[kind]


def outcome(message: dict[str, Any]) -> str:
    return str(message["data"]["code"] if message["type"] == "error" else message["type"])


@pytest.fixture
def app() -> FastAPI:
    return create_fastapi_app(*CLASSES["tally"], max_concurrent_envs=1000, runtime=simulated(Settings()))


async def test_every_mutation_on_a_multiplexed_socket_gets_its_answer_and_others_go_on(app: FastAPI) -> None:
    mux = {"subprotocols": (PROTOCOL_NAME,)}
    tried = 0
    async with Peer(app, **mux) as peer, Peer(app, **mux) as elsewhere:
        stranger, bystander = await Session(elsewhere).begin(), await Session(peer).begin()
        for mutation in client_mutations():
            side, kind = mutation.message.split(".")
            if side != "client" or not mutation.path:
                continue
            session, child = await Session(peer).begin(), Session(peer)
            message = legal(kind, session, child)
            text = mutated(mutation, message, stranger)
            if text == encode(message):
                continue  # a field that the message does not have
            tried += 1
            wanted = expected(mutation, text)
            peer.send(text)
            came = await bystander.step()
            late = [await answer(peer, [])] if wanted is not None and not came else []
            found = next(iter([*came, *late]), None)
            assert (None if found is None else outcome(found)) == wanted, (str(mutation), text, came)
            if found is None or found["type"] == "error":
                if found is not None and wanted in ("INVALID_ENVELOPE", "UNKNOWN_TYPE"):
                    assert found["index"] == 0, (str(mutation), found)
                session.id += wanted in RECORDED and found is not None and "id" in found
                if (kind, wanted) != ("Part", None):  # which waits for the rest
                    await session.step()  # nothing was changed, and the id is free
    assert tried > 300


PLAIN: list[tuple[str, str]] = [
    (r"\w+ type (drop|zero)", "UNKNOWN_TYPE"),
    (r"\w+ \S+ repeat", "INVALID_JSON"),  # PROTOCOL A: the same key twice
    (r"(Step|Mcp) data drop|StateAtRequest data (zero|swap)|StateAtRequest data\.t drop", "VALIDATION_ERROR"),
    (r"StateAtRequest data\.eid zero", "UNKNOWN_EPISODE"),
    (r"StateAtRequest data\.t swap", "T_OUT_OF_RANGE"),
    (r"StateAtRequest data drop", "state"),
    (r"StateAtRequest", "state_at"),
    (r"(Reset|Step)", "observation"),
    (r"Mcp", "mcp"),
]
"""Mutations on a plain socket -> the code of the error, or the type of the answer (PROTOCOL A2)."""


async def test_every_mutation_on_a_plain_socket_gets_its_answer_and_the_session_goes_on(app: FastAPI) -> None:
    tried = 0
    async with Peer(app, subprotocols=(PROTOCOL_NAME,)) as elsewhere, Peer(app) as peer:
        stranger = await Session(elsewhere).begin()
        for mutation in client_mutations():
            side, kind = mutation.message.split(".")
            if side != "plain" or not mutation.path:
                continue
            await peer.ask({"type": "reset"})
            await peer.ask({"type": "step", "data": {"n": 1}})
            place: Any = await peer.ask({"type": "capabilities"})
            message = {
                "CapabilitiesRequest": {"type": "capabilities"},
                "Close": {"type": "close"},
                "State": {"type": "state"},
                "StateAtRequest": {"type": "state", "data": {"t": 1, "eid": place["data"]["session"]["eid"]}},
                "Reset": {"type": "reset", "data": {"episode_id": "mine"}},
                "Step": {"type": "step", "data": {"n": 1}},
                "Mcp": {"type": "mcp", "data": CALL},
            }[kind]
            tried += 1
            text = mutated(mutation, message, stranger)
            found: Any = await peer.ask(text)
            name_ = str(mutation).removeprefix("plain.")
            wanted = next(answer_ for pattern, answer_ in PLAIN if re.match(pattern, name_))
            assert outcome(found) == wanted, (str(mutation), text, found)
            if found["type"] == "error":
                after: Any = await peer.ask({"type": "step", "data": {"n": 1}})
                assert after["data"]["observation"]["total"] == 2, (str(mutation), after)
    assert tried > 40


async def test_every_mutation_over_http_gets_its_status(app: FastAPI) -> None:
    """A key twice is no JSON (400), a field of another form is 422, and a `t` beyond the last delivery 404."""
    async with Peer(app, subprotocols=(PROTOCOL_NAME,)) as peer:
        session = await Session(peer).begin()
        token = hmac.new(
            hashlib.sha256(b"\0".join([b"errata-mux", session.sid.encode(), session.key.encode()])).digest(),
            b"errata-read",
            hashlib.sha256,
        ).digest()
        read_key = base64.urlsafe_b64encode(token).decode().rstrip("=")  # PROTOCOL F2
        transport = httpx.ASGITransport(app)
        headers = {"authorization": f"Bearer {read_key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver", headers=headers) as client:
            for mutation in client_mutations():
                if not mutation.message.startswith("http."):
                    continue
                fork = mutation.message == "http.ForkRequest"
                message: dict[str, Any] = {
                    "t": 1,
                    "request_id": name(),
                    "labels": {"group": "g", "step": 3, "run": "r"},
                }
                if not fork:
                    message = {"t": 1, "value": 0.5, "source": "judge", "reward_id": name()}
                text = mutated(mutation, message, session)
                reply = await client.post(f"/episodes/{session.eid}/{'fork' if fork else 'rewards'}", content=text)
                beyond = (mutation.path, mutation.how) == ("t", "swap")
                name_ = mutation.path in ("request_id", "reward_id", "source")
                swapped = 422 if name_ else 404 if beyond else 200  # a number where a name belongs
                wanted = {"drop": 422, "zero": 200, "repeat": 400, "swap": swapped}[mutation.how]
                if mutation.path.startswith("labels") and mutation.how != "repeat":
                    sent = json.loads(text)
                    wanted = 200 if jsonschema.Draft202012Validator(schema(mutation.message)).is_valid(sent) else 422
                assert reply.status_code == wanted, (str(mutation), text, reply.text)
        await session.step()
