"""Large messages as parts between those of other sessions (PROTOCOL D9)."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from errata_protocol.errors import InvalidEnvelope
from errata_protocol.mux import ClientProtocol, Find, Replied, Reply, Run, ServerProtocol, Stored
from errata_protocol.mux.parts import PART_BYTES, PIECE_BYTES, Assembly, Outbox
from errata_protocol.payload import digest

SID, OTHER = "Zq3vK8s0T1u5Wb7Yc9Xd2A", "other0Zq3vK8s0T1u5Wb7Y"


def read(frames: list[bytes]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for frame in frames:
        text = json.loads(frame)
        found += text if isinstance(text, list) else [text]
    return found


def message(sid: str, text: str) -> bytes:
    return msgspec.json.encode({"sid": sid, "id": 1, "type": "x", "data": text})


@given(st.lists(st.sampled_from(["a", "é", "€", "😀", '"', "\\", "\n", "x" * 999]), min_size=1, max_size=40))
def test_any_text_comes_back_byte_for_byte_however_it_is_cut(pieces: list[str]) -> None:
    whole = message(SID, "".join(pieces) * (1 + 3 * PART_BYTES // (1 + sum(map(len, pieces)))))
    outbox, assembly = Outbox(8), Assembly(1 << 24)
    outbox.put(SID, whole, id=1)
    came = None
    for frame in outbox.take():
        part = json.loads(frame)
        assert part["sid"] == SID and part["id"] == 1 and part["type"] == "part" and came is None
        data = part["data"]
        assert len(data["text"].encode()) <= PIECE_BYTES + 3
        came = assembly.add((SID, 1), data["n"], data["of"], data["text"])
    assert came == whole and assembly.held == 0 and outbox.buffered == 0 and not outbox


def test_messages_up_to_the_bound_travel_whole() -> None:
    outbox = Outbox(8)
    outbox.put(SID, b"x" * PART_BYTES)
    assert outbox.take() == [b"x" * PART_BYTES]


def test_a_large_message_delays_no_other_session_but_its_own() -> None:
    outbox = Outbox(8)
    outbox.put(SID, message(SID, "before"))
    outbox.put(SID, message(SID, "x" * 4 * PART_BYTES), id=1)
    outbox.put(SID, message(SID, "after"))
    outbox.put(OTHER, message(OTHER, "free"))
    told = read(outbox.take())
    order = [(m["sid"], m["data"]["n"] if m["type"] == "part" else m["data"]) for m in told]  # type: ignore[index]
    parts = [place for place, (sid, n) in enumerate(order) if isinstance(n, int)]
    assert order.index((SID, "before")) < parts[0] and order[-1] == (SID, "after")
    assert order.index((OTHER, "free")) < parts[-1]


def test_a_large_message_waits_for_small_ones_of_its_session_that_were_first() -> None:
    outbox = Outbox(2)
    for n in range(7):
        outbox.put(SID, message(SID, f"small {n}"))
    outbox.put(SID, message(SID, "x" * 2 * PART_BYTES), id=1)
    told = read(outbox.take())
    assert [m["type"] for m in told[:7]] == ["x"] * 7 and {m["type"] for m in told[7:]} == {"part"}


def test_two_large_messages_take_turns() -> None:
    outbox = Outbox(8)
    outbox.put(SID, message(SID, "x" * 2 * PART_BYTES), id=1)
    outbox.put(OTHER, message(OTHER, "y" * 2 * PART_BYTES), id=1)
    assert [m["sid"] for m in read(outbox.take())] == [SID, OTHER] * 5


def test_what_is_taken_is_about_what_was_asked_for() -> None:
    outbox = Outbox(1)
    for n in range(10):
        outbox.put(SID, message(SID, str(n)))
    first = outbox.take(1)
    assert len(first) == 1 and outbox
    assert [m["data"] for m in read(first + outbox.take())] == [str(n) for n in range(10)]


def test_frames_are_bounded_by_elements_and_bytes() -> None:
    outbox = Outbox(3)
    for n in range(7):
        outbox.put(SID, message(SID, str(n)))
    assert [len(json.loads(frame)) if frame[:1] == b"[" else 1 for frame in outbox.take()] == [3, 3, 1]
    for _ in range(3):
        outbox.put(SID, b"x" * (PART_BYTES // 2))
    assert len(outbox.take()) == 2


@pytest.mark.parametrize(
    "parts",
    [[(2, 2, "b")], [(1, 2, "a"), (1, 2, "a")], [(1, 3, "a"), (2, 4, "b")], [(1, 3, "a"), (3, 3, "c")], [(3, 2, "")]],
)
def test_a_part_that_does_not_follow_drops_its_message(parts: list[tuple[int, int, str]]) -> None:
    assembly = Assembly(100)
    with pytest.raises(InvalidEnvelope, match="from part 1"):
        for n, of, text in parts:
            assembly.add((SID,), n, of, text)
    assert assembly.held == 0
    assert assembly.add((SID,), 1, 2, "a") is None and assembly.add((SID,), 2, 2, "b") == b"ab"


def test_parts_hold_a_bounded_number_of_bytes() -> None:
    assembly = Assembly(10)
    assembly.add((SID,), 1, 2, "x" * 6)
    with pytest.raises(InvalidEnvelope, match="10 bytes"):
        assembly.add((OTHER,), 1, 2, "x" * 6)
    assert assembly.held == 6
    with pytest.raises(InvalidEnvelope, match="surrogate"):
        assembly.add((SID,), 2, 2, "\ud800")


def test_large_actions_and_observations_pass_both_machines() -> None:
    client, server = ClientProtocol(), ServerProtocol()
    connection = server.connect()
    client.connected(0.0)
    session = client.open(SID, OTHER)
    action = json.dumps({"text": "é\\" * PART_BYTES}, ensure_ascii=False).encode()
    payload = b'{"observation":%s,"reward":null,"done":false}' % action
    client.request(session, "step", action)
    client.request(session, "step", b"{}")
    events, runs = [], []
    for _ in range(4):
        effects = [e for frame in client.data_to_send() for e in server.receive(connection, frame, 0.0)]
        for effect in effects:
            if isinstance(effect, Find):
                effects += server.found(effect, Stored(), 0.0)
            elif isinstance(effect, Run):
                runs.append(effect)
                effects += server.completed(effect, Reply("observation", payload, "e", 0, digest(payload)), 0.0)
        for frame in connection.data_to_send():
            assert len(frame) < 2 * PART_BYTES
            events += client.receive(frame, 0.0)
    assert [run.data for run in runs] == [action, b"{}"]
    assert [event.payload for event in events if isinstance(event, Replied)] == [payload, payload]


@pytest.mark.parametrize("inner", [b"[]", b"{}", b"nonsense", b'{"type":"part","data":{"n":1,"of":1,"text":""}}'])
def test_parts_that_make_no_envelope_are_told(inner: bytes) -> None:
    server = ServerProtocol()
    connection = server.connect()
    part = {"q": 1, "type": "part", "data": {"n": 1, "of": 1, "text": inner.decode()}}
    server.receive(connection, json.dumps(part), 0.0)
    (error,) = read(connection.data_to_send())
    assert error["data"]["code"] == "INVALID_ENVELOPE"  # type: ignore[index]
