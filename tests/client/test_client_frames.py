"""`errata_client.wire.frames`: the bytes of `data` as they stand, and nothing else taken for a frame."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from errata_client.wire.frames import DigestMismatch, FrameInvalid, Stamp, parse_frame, replayed, wire_error
from errata_protocol.errors import CapacityReached, EnvironmentFailed, ErrataError, ServiceError, StateOutOfRange
from errata_protocol.payload import digest, splice

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(value=JSON_VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 0, 3]))
def test_raw_is_the_exact_text_of_data_however_written(value: object, ascii_only: bool, indent: int | None) -> None:
    payload = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    try:
        payload.decode("utf-8")
    except UnicodeDecodeError:
        return  # a lone surrogate has no UTF-8 form: no server can send it unescaped
    frame = parse_frame(b' {\t"data" :\n' + payload + b' ,"type": "observation" } ')
    assert frame.raw == payload
    assert frame.data == value


@given(value=JSON_VALUES, t=st.integers(0, 2**53))
def test_what_the_protocol_splices_is_cut_out_again(value: object, t: int) -> None:
    payload = json.dumps(value).encode()
    stamp = Stamp("e1", t, digest(payload))
    head = {"type": "state_at", "eid": "e1", "t": t, "kind": "mcp", "digest": stamp.digest}
    frame = parse_frame(splice(head, payload))
    assert (frame.stamp, frame.kind, frame.raw) == (stamp, "mcp", payload)
    stamp.verify(frame.raw)


def test_data_inside_data_is_not_mistaken_for_it() -> None:
    assert parse_frame('{"x":{"data":1},"type":"state","data":{"data":[2]}}').raw == b'{"data":[2]}'


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"[]",
        b"{}",
        b'{"type":"state"}',
        b'{"data":{}}',
        b'{"type":1,"data":{}}',
        b'{"type":"state","data":{}} x',
        b'{"type":"state","data":{}',
        b'{"type":"state","data":{},}',
        b'{"type":"state","type":"state","data":{}}',
        b'{"type":"state","data":1,"data":2}',
        b'{"type":"state" "data":1}',
        b'{1:2,"type":"state","data":{}}',
        b'{"type":"state","data":"\xff"}',
        b'{"type":"state","data":' + b"[" * 100_000 + b"}",
        b'{"type":"observation","eid":"e","data":{}}',
        b'{"type":"observation","eid":"e","t":-1,"digest":"sha256:0","data":{}}',
        b'{"type":"observation","eid":"e","t":true,"digest":"sha256:0","data":{}}',
        b'{"type":"observation","eid":7,"t":1,"digest":"sha256:0","data":{}}',
    ],
)
def test_a_malformed_frame_is_refused(message: bytes) -> None:
    with pytest.raises(FrameInvalid):
        parse_frame(message)


def test_a_digest_that_does_not_fit_names_both_digests_and_the_next_step() -> None:
    with pytest.raises(DigestMismatch, match=r"t=3 of episode e1.*state_at\(3\)") as caught:
        Stamp("e1", 3, digest(b"1")).verify(b"2")
    assert caught.value.details["computed"] == digest(b"2")


def test_a_replay_of_another_delivery_is_refused() -> None:
    head = {"type": "state_at", "eid": "e1", "t": 4, "kind": "step", "digest": digest(b"{}")}
    frame = parse_frame(splice(head, b"{}"))
    assert replayed(frame, 4, "e1").payload == b"{}"
    for t, eid in [(5, "e1"), (4, "e2")]:
        with pytest.raises(FrameInvalid):
            replayed(frame, t, eid)
    with pytest.raises(FrameInvalid):
        replayed(parse_frame(splice({**head, "kind": "dance"}, b"{}")), 4, "e1")


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        ("CAPACITY_REACHED", CapacityReached),
        ("EXECUTION_ERROR", EnvironmentFailed),
        ("T_OUT_OF_RANGE", StateOutOfRange),
        ("OF_THE_FUTURE", ServiceError),
    ],
)
def test_an_error_frame_keeps_upstreams_text_and_gains_a_type(code: str, cls: type[ErrataError]) -> None:
    error = wire_error({"message": "it broke", "code": code, "extra": 1})
    assert type(error) is cls
    assert str(error) == f"Server error: it broke (code: {code})"
    assert (error.message, error.code, error.details) == ("it broke", code, {"extra": 1})


@pytest.mark.parametrize("data", [None, [], "boom", {}])
def test_an_error_frame_without_fields_is_an_error_all_the_same(data: object) -> None:
    assert "Server error: " in str(wire_error(data))
