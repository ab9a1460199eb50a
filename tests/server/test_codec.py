"""Records to bytes and back; what a crash tears is cut off, what was durable and is broken is said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import EnvironmentOutputInvalid, JournalUnavailable
from errata_server.journal import DeliveryRow, EpisodeRow, SessionChange, SessionRow, codec
from errata_server.journal.codec import HEADER_BYTES, Deletion, Header, LogRecord

HEADER = Header(3, b"saltsalt")

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
maybe_text = st.none() | text
integer = st.integers(-(2**63), 2**63 - 1)
number = st.floats(allow_nan=False)
data = st.binary(max_size=50)
refs = st.lists(st.builds(SnapshotRef, text, text, maybe_text), max_size=3).map(tuple)

sessions = st.builds(
    SessionRow, text, text, text, integer, number, st.booleans(), maybe_text,
    st.sampled_from(["open", "closed", "lost"]), maybe_text, maybe_text,
)  # fmt: skip
episodes = st.builds(
    EpisodeRow, text, text, text, number, maybe_text, maybe_text, maybe_text, st.none() | integer, maybe_text
)
deliveries = st.builds(
    DeliveryRow, text, st.none() | integer, text, st.none() | integer,
    st.sampled_from(["reset", "step", "mcp", "fork"]), data, data, text, data, data, st.none() | data,
    st.none() | data, refs, number, st.none() | number, st.booleans(), maybe_text, maybe_text,
)  # fmt: skip
changes = st.builds(
    SessionChange, text, st.none() | st.sampled_from(["open", "closed", "lost"]), st.none() | st.booleans()
)
records = st.lists(sessions | episodes | deliveries | changes | st.builds(Deletion, text), max_size=4)


def segment(bodies: list[list[LogRecord]]) -> tuple[bytes, list[int]]:
    """Return a segment of one frame for each list, and where its frames end."""
    made, ends = codec.encode_header(HEADER), [HEADER_BYTES]
    for body in bodies:
        made += codec.encode_frame(codec.encode_records(body), HEADER, len(made))
        ends.append(len(made))
    return made, ends


@given(records)
def test_records_come_back_as_they_were(written: list[LogRecord]) -> None:
    assert codec.decode_records(codec.encode_records(written)) == written


@given(st.lists(records, max_size=4))
def test_a_segment_comes_back_whole(bodies: list[list[LogRecord]]) -> None:
    made, ends = segment(bodies)
    found = codec.scan(made)
    assert found.records == [record for body in bodies for record in body]
    assert (found.good_bytes, found.torn_bytes) == (ends[-1], 0)
    assert codec.decode_header(made) == HEADER


@given(st.lists(records, max_size=4), st.data())
def test_a_segment_cut_anywhere_keeps_each_whole_frame_and_nothing_else(
    bodies: list[list[LogRecord]], draw: st.DataObject
) -> None:
    made, ends = segment(bodies)
    cut = draw.draw(st.integers(0, len(made)))
    found = codec.scan(made[:cut])
    whole = sum(1 for end in ends[1:] if end <= cut)
    assert found.records == [record for body in bodies[:whole] for record in body]
    assert found.good_bytes == (ends[whole] if cut >= HEADER_BYTES else 0)
    assert found.good_bytes + found.torn_bytes == cut


@given(st.lists(records.filter(bool), min_size=1, max_size=3), st.data())
def test_one_changed_byte_is_never_read_as_a_record(bodies: list[list[LogRecord]], draw: st.DataObject) -> None:
    made, ends = segment(bodies)
    at = draw.draw(st.integers(0, len(made) - 1))
    broken = bytearray(made)
    broken[at] ^= draw.draw(st.integers(1, 255))
    if at < ends[-2]:  # in the header, or in a frame with a good one behind it
        with pytest.raises(JournalUnavailable, match="damaged"):
            codec.scan(bytes(broken))
    else:
        assert codec.scan(bytes(broken)).good_bytes == ends[-2]


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_foreign_bytes_are_refused_with_one_kind_of_error(body: bytes) -> None:
    try:
        codec.decode_records(body)
    except ValueError:
        pass


def test_a_frame_in_a_payload_does_not_pass_for_one() -> None:
    """An agent that knows the format, but not the salt, writes frames into its output."""
    forged = codec.encode_frame(codec.encode_records([Deletion("e1")]), Header(3, b"\0" * 8), HEADER_BYTES)
    made, _ = segment([[SessionRow(forged.hex(), "e", "none", 1, 1.0)]])
    body = codec.encode_records([Deletion("e")]) + forged
    made += codec.encode_frame(body, HEADER, len(made))[:-3]  # torn: the search behind it meets the forged frame
    assert codec.scan(made).torn_bytes > 0


def test_a_frame_that_lies_elsewhere_is_none() -> None:
    frame = codec.encode_frame(codec.encode_records([Deletion("e1")]), HEADER, HEADER_BYTES + 10)
    assert codec.scan(codec.encode_header(HEADER) + frame).records == []


@pytest.mark.parametrize("value", ["\ud800", 2**63, object()])
def test_what_has_no_form_is_told_to_the_one_who_wrote_it(value: Any) -> None:
    with pytest.raises(EnvironmentOutputInvalid, match="cannot be journaled"):
        codec.encode_records([SessionRow("s", value, "none", 1, 1.0)])


def test_a_record_of_an_older_version_with_fewer_columns_is_read_with_defaults() -> None:
    old = bytes([2, 4]) + b"\x05\x01\0\0\0e\x05\x01\0\0\0s\x05\x01\0\0\0n\x04" + bytes(8)
    assert codec.decode_records(old) == [EpisodeRow("e", "s", "n", 0.0)]
    change = bytes.fromhex("04030501000000730506000000636c6f73656402")
    assert codec.decode_records(change) == [SessionChange("s", "closed", True)]


def test_these_bytes_are_what_version_1_writes() -> None:
    """A journal of today must be read by tomorrow's version: whoever changes this otherwise than by a column at
    the end of a record changes MAGIC, too."""
    made, _ = segment([[SessionChange("s", "closed", True), Deletion("é")]])
    assert made.hex() == (
        "6572726174616a31" "0300000000000000" "73616c7473616c74" "e3b8f0cc"
        "e74af001" "1e000000" "6c12cf43"
        "0404" "0501000000" "73" "0506000000" "636c6f736564" "02" "00"
        "0501" "0502000000" "c3a9"
    )  # fmt: skip
