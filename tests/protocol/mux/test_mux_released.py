"""Peers of an earlier version: what they said still means the same, and what is said to them holds all that they know.

`tests/golden/released/` keeps a conversation of each version (`scripts/wire.py --release`). A version may say more than
one before it, never less and never something else; a client takes no notice of fields that it does not know, and a
server only sends messages of other types to who asked for them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from errata_protocol.mux import CLIENT_MESSAGES, Attached, ClientEvent, ClientProtocol, Replied
from errata_protocol.mux.envelope import Malformed, read_frame

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("wire", ROOT / "scripts" / "wire.py")
assert _spec is not None and _spec.loader is not None
wire = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(wire)

RELEASED = sorted((ROOT / "tests" / "golden" / "released").glob("mux-*.json"))
Conversation = list[list[dict[str, list[str]]]]

each = pytest.mark.parametrize("path", RELEASED, ids=lambda path: path.stem)


def envelopes(frames: list[str]) -> Iterator[dict[str, Any]]:
    for frame in frames:
        said = json.loads(frame)
        yield from said if isinstance(said, list) else [said]


def holds(new: Any, old: Any) -> bool:
    """Whether ``new`` says all that ``old`` does; fields of objects may have come."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(name in new and holds(new[name], old[name]) for name in old)
    if isinstance(old, list):
        return isinstance(new, list) and len(new) == len(old) and all(map(holds, new, old))
    return bool(new == old) and type(new) is type(old)


def hear(said: Conversation, change: Any = lambda frame: frame) -> list[ClientEvent]:
    """Return what a client of today makes of what a server said in a conversation."""
    client, events = ClientProtocol(), []
    exchanges = iter(said)

    def exchange() -> None:
        for turn in next(exchanges):
            client.data_to_send()
            for frame in turn["server"]:
                events.extend(client.receive(change(frame), 0.0))

    wire.drive(client, exchange, lambda: None)
    return events


def told(event: ClientEvent) -> tuple[Any, ...]:
    """Return what an event says, without the objects of this process."""
    fields = {f.name: getattr(event, f.name) for f in dataclasses.fields(event) if f.name not in ("session", "read")}
    if (request := fields.pop("request", None)) is not None:
        fields["id"] = request.id
    if (error := fields.get("error")) is not None:
        fields["error"] = (error.code, error.message)
    if (position := fields.get("position")) is not None:
        fields["position"] = position.model_dump()
    return type(event).__name__, fields


def test_there_is_a_conversation_to_keep_to() -> None:
    assert RELEASED


@each
def test_what_an_old_client_says_is_read_as_it_was_meant(path: Path) -> None:
    models = {model.model_fields["type"].annotation.__args__[0]: model for model in CLIENT_MESSAGES}  # type: ignore[union-attr]
    seen = set()
    for turn in (turn for exchange in json.loads(path.read_text()) for turn in exchange):
        for frame in turn["client"]:
            elements = read_frame(frame)
            for element, said in zip(elements, envelopes([frame]), strict=True):
                assert not isinstance(element, Malformed), element
                envelope, data = element
                assert json.loads(data) == said.get("data", {})
                for name in ("sid", "id", "q", "type", "deadline_ms"):
                    if name in said:
                        assert getattr(envelope, name) == said[name]
                seen.add(said["type"])
    assert seen >= {"open", "reset", "step", "mcp", "fork", "state", "rewards", "capabilities", "close_group", "ack"}
    assert seen <= set(models)


@each
def test_a_server_of_today_tells_an_old_client_all_that_it_expects(path: Path) -> None:
    shell = wire.Shell()
    connection = shell.protocol.connect()
    answered = 0
    for number, exchange in enumerate(json.loads(path.read_text())):
        if number == 2:
            shell.push()  # where `wire.drive` has it
        for turn in exchange:
            for frame in turn["client"]:
                shell.perform(shell.protocol.receive(connection, frame, 0.0))
            now = list(envelopes([frame.decode() for frame in connection.data_to_send()]))
            before = list(envelopes(turn["server"]))
            assert holds(now, before), (now, before)
            answered += len(before)
    assert answered > 12


@each
def test_a_client_of_today_understands_an_old_server(path: Path) -> None:
    then = hear(json.loads(path.read_text()))
    now = hear(wire.conversation())
    assert [told(event) for event in then] == [told(event) for event in now]
    assert sum(isinstance(event, Replied) for event in then) >= 3 and any(isinstance(e, Attached) for e in then)


@each
def test_a_client_takes_no_notice_of_what_a_later_server_adds(path: Path) -> None:
    """So a client of today is the old client of tomorrow."""
    own = {"observation", "mcp", "state", "state_at"}  # their data is the environment's, byte for byte

    def more(frame: str) -> str:
        changed = []
        for envelope in envelopes([frame]):
            kind = envelope["type"]
            envelope["later"] = {"more": [1]}
            if kind not in own and isinstance(envelope.get("data"), dict) and kind != "reward":
                envelope["data"]["later"] = 1
            changed.append(envelope)
        return json.dumps(changed, separators=(",", ":"), ensure_ascii=False)

    said = json.loads(path.read_text())
    known, unknown = [told(event) for event in hear(said)], [told(event) for event in hear(said, more)]
    for (kind, fields), (other, others) in zip(known, unknown, strict=True):
        assert kind == other
        if "payload" in fields and fields.get("type") not in (*own, None):
            assert holds(json.loads(others.pop("payload")), json.loads(fields.pop("payload")))
        assert holds(others, fields)
