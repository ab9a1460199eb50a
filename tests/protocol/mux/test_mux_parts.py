"""Large messages as parts between those of other sessions (PROTOCOL D9)."""

from __future__ import annotations

import json
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from errata_protocol.capabilities import ServerLimits
from errata_protocol.errors import FrameTooLarge, InvalidEnvelope, Overloaded
from errata_protocol.mux import (
    ClientProtocol,
    EncodedReply,
    Failed,
    FindSession,
    Replied,
    RunRequest,
    ServerConfig,
    ServerProtocol,
    Stored,
)
from errata_protocol.mux.parts import MESSAGES_AT_ONCE, PART_BYTES, PIECE_BYTES, Assembly, Outbox, Whole
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


def text_of(whole: Whole | None) -> bytes:
    assert whole is not None
    return whole.text


@given(st.lists(st.sampled_from(["a", "é", "€", "😀", '"', "\\", "\n", "x" * 999]), min_size=1, max_size=40))
def test_any_text_comes_back_byte_for_byte_however_it_is_cut(pieces: list[str]) -> None:
    whole = message(SID, "".join(pieces) * (1 + 3 * PART_BYTES // (1 + sum(map(len, pieces)))))
    outbox, assembly = Outbox(8), Assembly(1 << 24)
    outbox.put(SID, whole, {"id": 1})
    came: Whole | None = None
    for frame in outbox.take():
        part = json.loads(frame)
        assert part["sid"] == SID and part["id"] == 1 and part["type"] == "part" and came is None
        data = part["data"]
        assert len(data["text"].encode()) <= PIECE_BYTES + 3
        came = assembly.add((SID, 1), data["n"], data["of"], data["text"])
    assert text_of(came) == whole and assembly.held == 0 and outbox.buffered == 0 and not outbox


def test_messages_up_to_the_bound_travel_whole() -> None:
    outbox = Outbox(8)
    outbox.put(SID, b"x" * PART_BYTES)
    assert outbox.take() == [b"x" * PART_BYTES]


def test_a_large_message_delays_no_other_session_but_its_own() -> None:
    outbox = Outbox(8)
    outbox.put(SID, message(SID, "before"))
    outbox.put(SID, message(SID, "x" * 4 * PART_BYTES), {"id": 1})
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
    outbox.put(SID, message(SID, "x" * 2 * PART_BYTES), {"id": 1})
    told = read(outbox.take())
    assert [m["type"] for m in told[:7]] == ["x"] * 7 and {m["type"] for m in told[7:]} == {"part"}


def test_two_large_messages_take_turns() -> None:
    outbox = Outbox(8)
    outbox.put(SID, message(SID, "x" * 2 * PART_BYTES), {"id": 1})
    outbox.put(OTHER, message(OTHER, "y" * 2 * PART_BYTES), {"id": 1})
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
    assert assembly.add((SID,), 1, 2, "a") is None and text_of(assembly.add((SID,), 2, 2, "b")) == b"ab"


def test_parts_hold_a_bounded_number_of_bytes_and_messages() -> None:
    assembly = Assembly(10)
    assembly.add((SID,), 1, 2, "x" * 6)
    with pytest.raises(Overloaded, match="10 may be") as refused:
        assembly.add((OTHER,), 1, 2, "x" * 6)
    assert assembly.held == 6 and refused.value.details["retry_after"] == 0.1
    with pytest.raises(FrameTooLarge, match="10 bytes"):
        assembly.add((SID,), 2, 2, "x" * 5)
    assert assembly.held == 0
    assembly.add((SID,), 1, 2, "x" * 6)
    with pytest.raises(InvalidEnvelope, match="surrogate"):
        assembly.add((SID,), 2, 2, "\ud800")
    assert assembly.held == 0
    for n in range(MESSAGES_AT_ONCE):
        assert assembly.add((OTHER, n), 1, 2, "") is None
    with pytest.raises(Overloaded, match=f"{MESSAGES_AT_ONCE} messages"):
        assembly.add((SID, 1), 1, 2, "")


@pytest.mark.parametrize("levels", [None, 64])
def test_pieces_however_small_take_no_more_room_than_their_text(levels: int | None) -> None:
    assembly, count = Assembly(1 << 20, levels=levels), 1 << 17
    tracemalloc.start()
    for n in range(1, count):
        assert assembly.add((SID,), n, count, "xy") is None
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert assembly.held == 2 * (count - 1) and held < 2 * assembly.held
    assert text_of(assembly.add((SID,), count, count, "z")) == b"xy" * (count - 1) + b"z"


def test_a_refused_message_is_refused_once_and_can_be_sent_again() -> None:
    assembly = Assembly(5)
    for n in (1, 2):
        with pytest.raises(FrameTooLarge):
            for part in range(1, 5):
                assembly.add((SID, n), part, 9, "xx")
        assert [assembly.add((SID, n), part, 9, "xx") for part in range(4, 10)] == [None] * 6
        assert (assembly.held, text_of(assembly.add((SID, n), 1, 1, "y"))) == (0, b"y")
    with pytest.raises(FrameTooLarge):
        assembly.add((SID, 3), 1, 3, "xxxxxx")
    assert (assembly.add((SID, 3), 1, 2, "a"), text_of(assembly.add((SID, 3), 2, 2, "b"))) == (
        None,
        b"ab",
    )  # anew, before the rest
    with pytest.raises(InvalidEnvelope, match="from part 1"):
        assembly.add((SID, 3), 2, 2, "b")  # the last one: nothing of it is awaited
    with pytest.raises(InvalidEnvelope, match="from part 1"):
        assembly.add((SID, 3), 2, 2, "b")


def test_what_is_remembered_of_refused_messages_is_bounded() -> None:
    assembly = Assembly(5)
    for n in range(2 * MESSAGES_AT_ONCE):
        with pytest.raises(InvalidEnvelope):
            assembly.add((SID, n), 2, 3, "x")
    assert len(assembly._refused) == MESSAGES_AT_ONCE


def test_a_sender_has_so_much_under_way_as_its_peer_holds() -> None:
    size, sids = 3 * PART_BYTES, [f"{n}{SID}" for n in range(9)]
    outbox, assembly = Outbox(8, 2 * size + 1000), Assembly(2 * size + 1000)
    for sid in sids:
        outbox.put(sid, message(sid, "x" * (size - 100)), {"id": 1})
    came = []
    while frames := outbox.take(1):
        for part in read(frames):
            whole = assembly.add((part["sid"],), *part["data"].values())  # type: ignore[attr-defined]
            came += [] if whole is None else [part["sid"]]
    assert came == sids
    outbox.put(SID, message(SID, "x" * 9 * size), {"id": 1})  # one alone may be of any size
    assert len(outbox.take()) > 9 * 3


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
            if isinstance(effect, FindSession):
                effects += server.found(effect, Stored(), 0.0)
            elif isinstance(effect, RunRequest):
                runs.append(effect)
                effects += server.completed(effect, EncodedReply("observation", payload, "e", 0, digest(payload)), 0.0)
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


@pytest.mark.parametrize("whole", [OTHER, None], ids=["another session", "no session"])
def test_parts_of_one_session_do_not_make_an_envelope_of_another(whole: str | None) -> None:
    server = ServerProtocol()
    connection = server.connect()
    text = json.dumps({"sid": whole, "type": "open", "data": {"key": "k" * 22}})
    part = {"sid": SID, "type": "part", "data": {"n": 1, "of": 1, "text": text}}
    effects = server.receive(connection, json.dumps(part), 0.0)
    assert not any(isinstance(effect, FindSession) for effect in effects)
    (error,) = read(connection.data_to_send())
    assert (error["sid"], error["data"]["code"]) == (SID, "INVALID_ENVELOPE")  # type: ignore[index]


def test_a_message_over_the_servers_bound_is_one_error_and_the_next_one_under_its_id_is_its_own() -> None:
    client, server = ClientProtocol(), ServerProtocol(ServerConfig(ServerLimits(max_frame=3 * PART_BYTES)))
    connection = server.connect()
    client.connected(0.0)
    session = client.open(SID, OTHER)  # and has not learned the server's bounds
    client.request(session, "step", json.dumps({"text": "x" * 9 * PART_BYTES}).encode())
    client.request(session, "step", b"{}")
    events, runs = [], []
    for now in range(4):
        effects = [e for frame in client.data_to_send() for e in server.receive(connection, frame, now)]
        for effect in effects:
            if isinstance(effect, FindSession):
                effects += server.found(effect, Stored(), now)
            elif isinstance(effect, RunRequest):
                runs.append(effect)
                effects += server.completed(effect, EncodedReply("observation", b"{}", "e", 0, digest(b"{}")), now)
        events += [e for frame in connection.data_to_send() for e in client.receive(frame, now)]
        client.tick(now)
    failed, replied = (event for event in events if isinstance(event, Failed | Replied))
    assert isinstance(failed, Failed) and failed.error.code == "FRAME_TOO_LARGE" and not failed.recorded
    assert isinstance(replied, Replied) and (replied.id, [run.data for run in runs]) == (1, [b"{}"])
    client.apply_limits(server.config.limits)
    with pytest.raises(FrameTooLarge, match="send less"):
        client.request(session, "step", json.dumps({"text": "x" * 3 * PART_BYTES}).encode())
    with pytest.raises(FrameTooLarge, match="send less"):
        client.read("mcp", session, json.dumps({"text": "x" * 3 * PART_BYTES}).encode())
