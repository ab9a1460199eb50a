"""Records to bytes and back; what a crash tears is cut off, what was durable and is broken is said."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import EnvironmentOutputInvalid, JournalUnavailable
from errata_server.journal import DeliveryRow, EpisodeRow, RewardRow, SessionChange, SessionRow, codec
from errata_server.journal.codec import HEADER_BYTES, LOOSE, MARK, Deletion, Header, LogRecord

from .journal_rows import delivery

HEADER = Header(3, b"saltsalt")

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
maybe_text = st.none() | text
integer = st.integers(-(2**63), 2**63 - 1)
number = st.floats(allow_nan=False)
data = st.binary(max_size=50)
refs = st.lists(st.builds(SnapshotRef, text, text, maybe_text), max_size=3).map(tuple)

sessions = st.builds(
    SessionRow, text, text, text, integer, number, st.booleans(), maybe_text,
    st.sampled_from(["open", "closed", "lost", "expired"]), maybe_text, maybe_text, maybe_text,
    st.none() | data, maybe_text,
)  # fmt: skip
episodes = st.builds(
    EpisodeRow, text, text, text, number, maybe_text, maybe_text, maybe_text, st.none() | integer, maybe_text
)
count = st.none() | st.integers(0, 2**63 - 1)
deliveries = st.builds(
    DeliveryRow, text, count, text, count,
    st.sampled_from(["reset", "step", "mcp", "fork", "close"]), data, data, text, data, data, st.none() | data,
    st.none() | data, refs, number, st.none() | number, st.booleans(), maybe_text, maybe_text,
)  # fmt: skip
changes = st.builds(
    SessionChange, text, st.none() | st.sampled_from(["open", "closed", "lost"]), st.none() | st.booleans()
)
rewards = st.builds(RewardRow, text, integer, number, text, text, text, count, number)
deletions = st.builds(Deletion, text, text, integer, integer)
records = st.lists(sessions | episodes | deliveries | changes | rewards | deletions, max_size=4)


def encoded(records: list[LogRecord]) -> bytes:
    return b"".join(map(codec.encode_record, records))


def decoded(body: bytes) -> list[LogRecord]:
    return [record for _, _, record in codec.decode_records(body)]


def segment(bodies: list[list[LogRecord]], *, loose: bool = False) -> tuple[bytes, list[int]]:
    """Return a segment of one frame for each list, and where its frames end."""
    made, ends = codec.encode_header(HEADER), [HEADER_BYTES]
    for body in bodies:
        made += codec.encode_frame(encoded(body), HEADER, len(made), loose=loose)
        ends.append(len(made))
    return made, ends


def scanned(made: bytes) -> tuple[list[LogRecord], int, int]:
    """Return the records, the good and the torn bytes of a segment whose header is whole."""
    found = codec.scan(made[HEADER_BYTES:], HEADER)
    return [record for _, body in found.bodies for record in decoded(body)], found.good_bytes, found.torn_bytes


@given(records)
def test_records_come_back_as_they_were_each_from_its_place(written: list[LogRecord]) -> None:
    body = encoded(written)
    placed = list(codec.decode_records(body))
    assert [record for _, _, record in placed] == written
    for at, size, record in placed:
        assert codec.decode_record(body[at : at + size]) == (record, size)


@given(st.lists(records, max_size=4), st.booleans())
def test_a_segment_comes_back_whole_or_from_any_frame_on(bodies: list[list[LogRecord]], loose: bool) -> None:
    made, ends = segment(bodies, loose=loose)
    assert scanned(made) == ([record for body in bodies for record in body], ends[-1], 0)
    assert codec.decode_header(made) == HEADER
    for n, end in enumerate(ends):
        found = codec.scan(made[end:], HEADER, end)
        assert [decoded(body) for _, body in found.bodies] == bodies[n:]
        assert all(made[offset : offset + len(body)] == body for offset, body in found.bodies)


@given(st.lists(records, max_size=4), st.data())
def test_a_segment_cut_anywhere_keeps_each_whole_frame_and_nothing_else(
    bodies: list[list[LogRecord]], draw: st.DataObject
) -> None:
    made, ends = segment(bodies)
    cut = draw.draw(st.integers(HEADER_BYTES, len(made)))
    whole = sum(1 for end in ends[1:] if end <= cut)
    assert scanned(made[:cut]) == (
        [record for body in bodies[:whole] for record in body],
        ends[whole],
        cut - ends[whole],
    )


@given(st.lists(records.filter(bool), min_size=1, max_size=3), st.data())
def test_one_changed_byte_is_never_read_as_a_record(bodies: list[list[LogRecord]], draw: st.DataObject) -> None:
    made, ends = segment(bodies)
    at = draw.draw(st.integers(0, len(made) - 1))
    broken = bytearray(made)
    broken[at] ^= draw.draw(st.integers(1, 255))
    if at < HEADER_BYTES:
        assert codec.decode_header(bytes(broken)) is None
    elif any(bytes(broken[end : end + len(MARK)]) == LOOSE for end in ends[:-1]):
        assert scanned(bytes(broken)) == scanned(made)  # see the test below
    elif at < ends[-2]:  # in a frame with a good one behind it
        with pytest.raises(JournalUnavailable, match="damaged"):
            scanned(bytes(broken))
    else:
        assert scanned(bytes(broken))[1] == ends[-2]


@given(st.lists(records.filter(bool), min_size=1, max_size=3), st.data())
def test_a_mark_that_becomes_the_other_changes_no_record(bodies: list[list[LogRecord]], draw: st.DataObject) -> None:
    """The two marks differ by one bit, and checksums do not cover it: it says how a frame was written, not what."""
    made, ends = segment(bodies)
    at = draw.draw(st.sampled_from(ends[:-1]))
    assert scanned(made[:at] + LOOSE + made[at + len(MARK) :]) == scanned(made)


@given(records.filter(bool), st.data())
def test_a_record_read_alone_is_checked_alone(written: list[LogRecord], draw: st.DataObject) -> None:
    broken = bytearray(codec.encode_record(written[0]))
    broken[draw.draw(st.integers(0, len(broken) - 1))] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(ValueError):
        codec.decode_record(bytes(broken))


def test_a_torn_frame_before_ones_that_did_not_wait_for_its_sync_is_a_crash_and_no_damage() -> None:
    made, ends = segment([[Deletion("a")], [Deletion("b")], [Deletion("c")]], loose=True)
    broken = bytearray(made)
    broken[ends[0] + 15] ^= 1
    assert scanned(bytes(broken)) == ([], ends[0], len(made) - ends[0])


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_foreign_bytes_are_refused_with_one_kind_of_error(body: bytes) -> None:
    try:
        decoded(body)
    except ValueError:
        pass


def test_a_frame_in_a_payload_does_not_pass_for_one() -> None:
    """An agent that knows the format, but not the salt, writes frames into its output."""
    forged = codec.encode_frame(encoded([Deletion("e1")]), Header(3, b"\0" * 8), HEADER_BYTES)
    made, _ = segment([[SessionRow(forged.hex(), "e", "none", 1, 1.0)]])
    body = encoded([Deletion("e")]) + forged
    made += codec.encode_frame(body, HEADER, len(made))[:-3]  # torn: the search behind it meets the forged frame
    assert scanned(made)[2] > 0


def test_a_frame_that_lies_elsewhere_is_none() -> None:
    frame = codec.encode_frame(encoded([Deletion("e1")]), HEADER, HEADER_BYTES + 10)
    assert scanned(codec.encode_header(HEADER) + frame)[0] == []


@pytest.mark.parametrize("value", ["\ud800", 2**64, object()])
def test_what_has_no_form_is_told_to_the_one_who_wrote_it(value: Any) -> None:
    with pytest.raises(EnvironmentOutputInvalid, match="cannot be journaled"):
        codec.encode_record(SessionRow("s", value, "none", 1, 1.0))


@pytest.mark.parametrize(
    "over", [{"t": -1}, {"t": 2**63}, {"id": 2**63}, {"kind": "no"}, {"kind": {}}, {"reward": 10**400}]
)
def test_a_delivery_that_no_index_could_hold_has_no_form(over: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentOutputInvalid, match="cannot be journaled"):
        codec.encode_record(delivery("e", **{"t": 0, **over}))


def test_a_record_of_an_older_version_with_fewer_columns_is_read_with_defaults() -> None:
    def record(kind: int, values: bytes) -> bytes:
        return struct.pack("<IBI", len(values), kind, zlib.crc32(bytes((kind,)) + values)) + values

    assert decoded(record(2, b"\x94\xa1e\xa1s\xa1n\xcb" + bytes(8))) == [EpisodeRow("e", "s", "n", 0.0)]
    assert decoded(record(4, b"\x93\xa1s\xa6closed\xc3")) == [SessionChange("s", "closed", True)]
    assert decoded(record(5, b"\x91\xa1e")) == [Deletion("e")]


def test_these_bytes_are_what_version_2_writes() -> None:
    """A journal of today must be read by tomorrow's version: whoever changes this otherwise than by a column at
    the end of a record changes MAGIC, too."""
    made, _ = segment([[SessionChange("s", "closed", True), Deletion("é", "s", 2, 1)]])
    assert made.hex() == (
        "6572726174616a32" "0300000000000000" "0000000000000000" "73616c7473616c74" "76ccacd0"
        "e74af002" "26000000" "ecb50f64"
        "0c000000" "04" "abb11077" "94a173a6636c6f736564c3c0"
        "08000000" "05" "2d427adb" "94a2c3a9a1730201"
    )  # fmt: skip
