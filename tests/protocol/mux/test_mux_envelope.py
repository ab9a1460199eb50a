"""One strict scan before admission, and exact bytes (PROTOCOL D1, C1, D4)."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from errata_protocol.errors import FrameTooLarge, InvalidEnvelope, RemoteProtocolError, Unparsable
from errata_protocol.json_text import MAX_TOKENS, MAX_VALUES, ValueCounter, depth
from errata_protocol.mux.envelope import (
    MAX_DEPTH,
    MAX_HEAD_BYTES,
    Element,
    Envelope,
    Malformed,
    join_frame,
    read_assembled,
    read_frame,
    read_server_frame,
    write_envelope,
    write_reply,
)
from errata_protocol.mux.messages import OPEN_DATA, RESUME_DATA, read_data

SID = "Zq3vK8s0T1u5Wb7Yc9Xd2A"
STEP = b'{"sid":"%s","id":7,"type":"step","data":{"a":1}}' % SID.encode()


def good(element: Element) -> tuple[Envelope, bytes]:
    assert not isinstance(element, Malformed), element
    return element


def bad(element: Element) -> Malformed:
    assert isinstance(element, Malformed), element
    return element


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":  1.0 , "b":"\\u00e9"}', '{"é":"😀"}'.encode(), b"[]", b"1e5", b'"a:b"', b"null", b'{"x":{"y":":"}}',
        b'{"a":1,"a":2}', b'"\\ud83d\\ude00"', b"-0.0", b"123456789012345678901234567890",
    ],
)  # fmt: skip
def test_data_is_kept_byte_for_byte(data: bytes) -> None:
    for frame in (b'{"sid":"%s","id":7,"type":"step","data":%s}', b'{ "data" : %.0s%s , "type":"step" }'):
        envelope, kept = good(read_frame(frame % (SID.encode(), data))[0])
        assert kept == data and envelope.type == "step"


def test_a_text_frame_is_read_like_a_binary_one() -> None:
    assert read_frame(STEP.decode())[0] == read_frame(STEP)[0] or good(read_frame(STEP.decode())[0])[1] == b'{"a":1}'
    with pytest.raises(Unparsable, match="UTF-8"):
        read_frame('{"type":"\ud800"}')


@pytest.mark.parametrize(
    "frame",
    [
        b"", b" ", b"{", b"[", b"[{}", b"nul", b"{}{}", b"'a'", b"\xff", b"\xef\xbb\xbf{}", STEP + b",",
        b'{"type":"a"}x', b'{"type":NaN}', b'{"type":"a",}', b'{"type":"\xff"}', b'[{"type":"a"} {"type":"a"}]',
        *(b'{"type":"a","data":%s}' % data for data in (b'"\xff"', b'"\xed\xa0\x80"', b'"\\ud8 0"', b"01", b'"\x01"')),
        b'{"type":"a","data":' + b"[" * 5000 + b"]" * 5000 + b"}", b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_frame_that_is_no_json_is_refused_whole(frame: bytes) -> None:
    with pytest.raises(Unparsable):
        read_frame(frame)
    with pytest.raises(Unparsable):
        read_frame(b"[" + STEP + b"," + frame + b"]" if frame.strip() else b"[" + STEP + b",]")


HALVES = (b'{"a":"\\ud800"}', b'{"\\udcff":1}', b'["\\udc00\\ud800"]', b'"\\uDBFF"')


@pytest.mark.parametrize("data", HALVES)
def test_half_a_surrogate_pair_in_data_is_left_to_who_reads_the_data(data: bytes) -> None:
    element = b'{"sid":"%s","id":7,"type":"step","data": %s }' % (SID.encode(), data)
    for frame in (element, b" [" + STEP + b" , " + element + b"," + STEP + b"]"):
        read = [good(found) for found in read_frame(frame)]
        assert data in [kept for _, kept in read]
        assert all((envelope.sid, envelope.id) == (SID, 7) for envelope, _ in read)


@pytest.mark.parametrize(
    "element",
    [
        b'{"type":"\\ud800"}', b'{"type":"a","\\udfff":1}', b'{"type":"a","data":{},"data":"\\ud800"}', b'"\\ud800"',
        b'{"type":"a","if":{"t":1,"eid":"\\ud800"},"data":"\\ud800"}', b'{"sid":"\\ud800","type":"a"}', b'["\\ud800"]',
        b'{"type":"a","data":' + b"[" * 64 + b'"\\ud800"' + b"]" * 64 + b"}",
    ],
)  # fmt: skip
def test_half_a_surrogate_pair_elsewhere_concerns_its_own_element(element: bytes) -> None:
    frame = b"[" + STEP + b"," + element + b"]"
    first, second = read_frame(frame)
    assert good(first)[1] == b'{"a":1}' and isinstance(second, Malformed)


def test_a_frame_with_half_a_pair_is_not_searched_for_ever() -> None:
    element = b'{"type":"a","data":["\\ud800"' + b",[]" * MAX_TOKENS + b"]}"
    with pytest.raises(Unparsable):
        read_frame(b"[" + STEP + b"," + element + b"]")


@pytest.mark.parametrize("data", [*HALVES, b"NaN", b"[" * 5000 + b"]" * 5000, b"1" * 5000, b'{"a":"\\x"}'])
def test_a_client_reads_the_rest_of_a_frame_with_data_that_it_cannot_read(data: bytes) -> None:
    head = b'{"sid":"%s","id":7,"type":"observation","eid":"ep","t":1,"digest":"d","data":' % SID.encode()
    other = head + b'{"a":1}}'
    for frame in (b"[%s,%s%s},%s]" % (other, head, data, other), head + data + b"}"):
        read = read_server_frame(frame)
        assert data in [kept for _, kept in read]
        assert all((envelope.sid, envelope.id, envelope.t) == (SID, 7, 1) for envelope, _ in read)


@pytest.mark.parametrize(
    ("element", "why"),
    [
        (b'{"sid":"%s","sid":"%s","id":7,"type":"step"}', "'sid' stands twice"),
        (b'{"sid":"%.0s%s","id":7,"id":8,"type":"step"}', "'id' stands twice"),
        (b'{"sid":"%.0s%s","\\u0069d":7,"id":7,"type":"step"}', "'id' stands twice"),
        (b'{"sid":"%.0s%s","id":7,"type":"step","data":{"x":1},"data":{"a":1,"b":2}}', "'data' stands twice"),
        (b'{"sid":"%.0s%s","id":7,"type":"step","data":{},"data":{}}', "'data' stands twice"),
        (b'{"sid":"%.0s%s","id":7,"type":"step","if":{"t":1,"t":2}}', "'t' stands twice"),
        (b'{"sid":"%.0s%s","id":0,"type":"step"}', ">= 1"),
        (b'{"sid":"%.0s%s","id":-1,"type":"step"}', ">= 1"),
        (b'{"sid":"%.0s%s","id":9007199254740992,"type":"step"}', "<= 9007199254740991"),
        (b'{"sid":"%.0s%s","id":1.0,"type":"step"}', "int"),
        (b'{"sid":"%.0s%s","id":1e2,"type":"step"}', "int"),
        (b'{"sid":"%.0s%s","id":"1","type":"step"}', "int"),
        (b'{"sid":"%.0s%s","id":true,"type":"step"}', "int"),
        (b'{"sid":"%.0s%s","id":null,"type":"step"}', "int"),
        (b'{"sid":"%.0s%s","id":7,"q":9007199254740993,"type":"step"}', "<="),
        (b'{"sid":"%.0s%s","id":7,"type":"step","extra":1}', "extra"),
        (b'{"sid":"%.0s%s","id":7}', "type"),
        (b'{"sid":"%.0s%s","id":7,"type":1}', "str"),
        (b'{"sid":"%.0s%s","id":7,"type":"step","if":{}}', "t"),
        (b'{"sid":"%.0s%s","id":7,"type":"step","if":{"t":-1}}', ">= 0"),
        (b'{"sid":"%.0s%s","id":7,"type":"step","deadline_ms":1.5}', "int"),
        (b'{"sid":5,"id":7,"type":"%.0s%.0s"}', "str"),
    ],
)
def test_a_bad_element_is_told_alone_and_the_others_are_read(element: bytes, why: str) -> None:
    element %= (SID.encode(), SID.encode())
    assert why in bad(read_frame(element)[0]).error.message
    before, wrong, after = read_frame(b"[" + b",".join([STEP, element, STEP]) + b"]")
    assert good(before)[1] == good(after)[1] == b'{"a":1}'
    assert why in bad(wrong).error.message


@pytest.mark.parametrize("element", [b"5", b"null", b'"x"', b"[]", b"[[]]", b"true"])
def test_an_element_that_is_no_object_is_bad(element: bytes) -> None:
    assert bad(read_frame(b"[" + STEP + b"," + element + b"]")[1]).sid is None


def test_a_bad_element_is_addressed_where_it_can_be_read() -> None:
    wrong = bad(read_frame(STEP[:-1] + b',"more":1}')[0])
    assert (wrong.sid, wrong.id, wrong.q) == (SID, 7, None)
    doubled = bad(read_frame(STEP[:-1] + b',"id":8}')[0])
    assert (doubled.sid, doubled.id) == (None, None), "which of the two ids was meant"


@pytest.mark.parametrize("levels", [1, 62, 63, 64, 65, 200])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_an_envelope_nests_at_most_64_levels(levels: int, brackets: str) -> None:
    inner = "[" * levels + "]" * levels if brackets == "[]" else '{"a":' * levels + "1" + "}" * levels
    frame = f'{{"sid":"{SID}","id":1,"type":"step","data":{inner}}}'.encode()
    assert depth(frame) == levels + 1
    for element in (read_frame(frame)[0], read_frame(b"[" + STEP + b"," + frame + b"]")[1]):
        if levels + 1 <= MAX_DEPTH:
            assert good(element)[1] == inner.encode()
        else:
            assert "levels" in bad(element).error.message


def test_brackets_in_strings_and_side_by_side_are_no_depth() -> None:
    data = json.dumps({"code": "[[[{{{" * 50 + '\\"', "rows": [[], {}] * 500})
    _, kept = good(read_frame(f'{{"type":"step","data":{data}}}')[0])
    assert kept == data.encode() and depth(kept) == 3


def test_colons_in_data_are_no_sign_of_a_second_key() -> None:
    data = b'{"url":"http://a:1/","x":{":":":"}}'
    assert good(read_frame(b'{"sid":"%s","id":1,"type":"step","data":%s}' % (SID.encode(), data))[0])[1] == data


def test_frames_over_a_limit_are_not_read() -> None:
    with pytest.raises(FrameTooLarge, match="parts"):
        read_frame(STEP, max_bytes=10)
    with pytest.raises(FrameTooLarge, match="envelopes"):
        read_frame(b"[" + b",".join([STEP] * 3) + b"]", max_elements=2)


@pytest.mark.parametrize("frame", [b"[]", b" [ ] "])
def test_d1_an_empty_array_is_answered_as_what_is_no_frame(frame: bytes) -> None:
    with pytest.raises(Unparsable, match="empty array"):
        read_frame(frame)


@pytest.mark.parametrize(
    ("adapter", "data"),
    [
        (OPEN_DATA, b'{"key":"%s","key":"%s"}'),
        (OPEN_DATA, b'{"key":"short%.0s%.0s"}'),
        (OPEN_DATA, b'{"key":"%s","more":"%s"}'),
        (OPEN_DATA, b'{"key":"%s%.0s","fence":1.0}'),
        (OPEN_DATA, b'{"key":"%s%.0s","fence":"1"}'),
        (RESUME_DATA, b'[{"sid":"%s","key":"%s","last":1,"last":2}]'),
        (RESUME_DATA, b'[{"sid":"%s","key":"%s","last":-1}]'),
        (RESUME_DATA, b'{"sid":"%s","key":"%s"}'),
    ],
)
def test_control_messages_are_read_strictly_and_never_quote_a_key(adapter: Any, data: bytes) -> None:
    with pytest.raises(InvalidEnvelope) as caught:
        read_data(adapter, data % (SID.encode(), SID.encode()))
    assert SID not in str(caught.value)


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab:é", max_size=3), inner),
)  # fmt: skip


@given(values, st.booleans())
def test_a_reply_is_read_back_with_its_exact_payload(value: Any, plain: bool) -> None:
    payload = json.dumps(value, ensure_ascii=plain).encode()
    hot = write_reply(SID, 7, "observation", "e-1", 3, "sha256:ab", payload)
    head = {"sid": SID, "id": 7, "type": "observation", "eid": "e-1", "t": 3, "digest": "sha256:ab"}
    assert hot == write_envelope(head, payload)
    (envelope, data), (_, again) = read_server_frame(join_frame([hot, hot]))
    assert data == again == payload and (envelope.id, envelope.t, envelope.eid) == (7, 3, "e-1")


@pytest.mark.parametrize("frame", [b"", b"{", b"5", b'{"type":5}', b'[{"type":"a"},5]', b"\xff", b"[" * 10_000])
def test_a_server_that_speaks_nonsense_is_told_so(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="connect again"):
        read_server_frame(frame)


PIECES = [
    *[
        b'{"sid":"%s"' % SID.encode(),
        b'"id":',
        b'"q":',
        b'"type":"step"',
        b'"data":',
        b'"if":{"t":1}',
        b"{",
        b"}",
        b"[",
        b"]",
    ],
    *[
        b",",
        b":",
        b'"',
        b"1",
        b"-1",
        b"9007199254740992",
        b"1.0",
        b"null",
        b"true",
        b"\\",
        b"\xff",
        b"\xc3\xa9",
        b"\\ud800",
    ],
    *[b'"sid":"x"', b'"deadline_ms":5', b" ", b"NaN", b"{}", b"[]", STEP, STEP + b",", b'"\\u0069d":3', b"0" * 30],
]


def random_frame(rng: random.Random) -> bytes:
    """Return a frame that is nearly one: pieces of the grammar, or a good one with some bytes changed."""
    if rng.random() < 0.5:
        return b"".join(rng.choices(PIECES, k=rng.randint(0, 14)))
    frame = bytearray(b"[" + b",".join([STEP] * rng.randint(1, 3)) + b"]" if rng.random() < 0.5 else STEP)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(frame))
        frame[place : place + rng.randint(0, 2)] = rng.choice([*PIECES, bytes([rng.randrange(256)])])
    return bytes(frame)


class Twice(Exception):
    """A key stands twice."""


def oracle(frame: bytes) -> list[Any]:
    """Read a frame with the standard library, slowly: which elements are good, by the words of PROTOCOL D1."""

    def unique(pairs: list[tuple[str, Any]]) -> Any:
        return ("twice" if len({key for key, _ in pairs}) != len(pairs) else "once", dict(pairs))

    def no_constant(name: str) -> Any:
        raise ValueError(name)

    text = frame.decode()
    read = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    return [_is_good(element) for element in (read if isinstance(read, list) else [read])]


def _is_good(element: Any) -> bool:
    if not isinstance(element, tuple) or element[0] == "twice":
        return False
    fields = element[1]

    def integer(value: Any, low: int) -> bool:
        return type(value) is int and low <= value < 2**53

    try:  # no half of a surrogate pair, except in data
        json.dumps({**fields, "data": 0}, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    condition = fields.get("if", ("once", {"t": 0}))
    return (
        fields.keys() <= {"sid", "id", "q", "type", "data", "if", "deadline_ms"}
        and isinstance(fields.get("type"), str)
        and (fields.get("sid") is None or isinstance(fields["sid"], str))
        and all(integer(fields[name], 1) for name in ("id", "q") if name in fields)
        and ("deadline_ms" not in fields or integer(fields["deadline_ms"], 0))
        and isinstance(condition, tuple)
        and condition[0] == "once"
        and condition[1].keys() == {"t"}
        and integer(condition[1]["t"], 0)
    )


def test_random_frames_are_read_as_the_standard_library_reads_them() -> None:
    seed = int(os.environ.get("ERRATA_FUZZ_SEED", "0"))
    rng = random.Random(seed)
    counts = {"unparsable": 0, "good": 0, "bad": 0}
    for number in range(int(os.environ.get("ERRATA_FUZZ_FRAMES", "5000"))):
        frame = random_frame(rng)
        try:
            expected = oracle(frame) or None
        except (ValueError, RecursionError):
            expected = None
        try:
            elements: list[Element] | None = read_frame(frame)
        except Unparsable:
            elements = None
        told = None if elements is None else [not isinstance(element, Malformed) for element in elements]
        assert told == expected, (seed, number, frame)
        if told is None:
            counts["unparsable"] += 1
        else:
            counts["good"] += sum(told)
            counts["bad"] += len(told) - sum(told)
    assert min(counts.values()) > 50, counts


MANY = b"[" + b"1," * MAX_VALUES + b"1]"


def assembled(text: bytes) -> Element:
    values = ValueCounter(levels=MAX_DEPTH)
    any(values.add(text))
    return read_assembled(text, values, max_bytes=1 << 24)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"sid":"%s","id":7,"type":"step","data":', b"}"),
        (b'{"data" : ', b' , "type":"step" ,"id":7, "sid" : "%s" }\n'),
        (b'{"type":"reset","labels":{"group":"a [1]} \\"b"},"data":', b',"sid":"%s","if":{"t":3},"id":7}'),
    ],
)
def test_a_request_with_too_many_values_is_read_without_its_data(before: bytes, after: bytes) -> None:
    text = (before + MANY + after).replace(b"%s", SID.encode())
    envelope, data = good(assembled(text))
    assert (envelope.sid, envelope.id, data) == (SID, 7, MANY)


@pytest.mark.parametrize(
    "text",
    [
        b'{"type":"step","id":7,"data":%s,"data":{}}',
        b'{"type":"step","id":7,"data":%s,"d\\u0061ta":[]}',
        b'{"type":"step","id":7,"id":8,"data":%s}',
        b'{"type":"step","data":%s}',
        b'{"type":"open","id":7,"data":%s}',
        b'{"type":"step","id":7,"more":1,"data":%s}',
        b'{"type":"step","id":7,"data":%s',
        b'{"type":"step","id":7,"data":%s}}x',
        b"%s",
        b'{"type":"step","id":7,"data":%s,"sid":"' + b"x" * MAX_HEAD_BYTES + b'"}',
    ],
)
def test_no_other_envelope_has_too_many_values(text: bytes) -> None:
    with pytest.raises(InvalidEnvelope):
        assembled(text.replace(b"%s", MANY))


@given(st.text(alphabet='[{}]",\\ab: ', max_size=60), st.integers(1, 7), st.integers(0, 8))
def test_levels_are_those_of_the_value_however_the_text_is_cut(text: str, piece: int, most: int) -> None:
    value = {"k": [text, {text: [[]]}], text: text}
    written = json.dumps(value).encode()
    counter = ValueCounter(levels=most)
    for at in range(0, len(written), piece):
        any(counter.add(written[at : at + piece]))
    assert depth(written) == 5 and counter.nests_too_deep == (most < 5)


def test_an_envelope_in_parts_nests_as_deep_as_one_in_a_frame() -> None:
    for levels in (MAX_DEPTH - 1, MAX_DEPTH):
        text = b'{"sid":"%s","id":1,"type":"step","data":%s}' % (SID.encode(), b"[" * levels + b"]" * levels)
        if levels < MAX_DEPTH:
            assert good(assembled(text)) == good(read_frame(text)[0])
        else:
            with pytest.raises(InvalidEnvelope, match="levels"):
                assembled(text)
