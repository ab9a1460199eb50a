"""Values of every kind as JSON text that every reader can read, and text that a decoder refuses, cut apart."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from errata_protocol.errors import EnvironmentFailed
from errata_protocol.json_text import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_TOKENS,
    cut_out,
    elements,
    encode,
    is_readable,
    well_formed,
)
from errata_protocol.payload import digest, encode_payload, semantic_digest


class Half(enum.Enum):
    """An enumeration of what has no UTF-8 form."""

    HIGH = "\ud800"


class Inner(BaseModel):
    """A model with any value."""

    held: Any = None


@dataclasses.dataclass
class Held:
    """A dataclass with any value."""

    held: Any


def nested(levels: int, inside: Any = 1) -> Any:
    for _ in range(levels):
        inside = [inside]
    return inside


def cyclic(inside: Any = None) -> dict[str, Any]:
    value: dict[str, Any] = {"a": inside}
    value["self"] = [value]
    return value


COLLIDING = dict.fromkeys(["\ud800", "\ud801"], 1)
any_text = st.text(st.characters())
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text | st.binary(max_size=4) | st.uuids()
    | st.sampled_from([Half.HIGH, Path("a\udcff"), cyclic(), cyclic("\ud800"), nested(300), 10**400, object(), 1j]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text | st.integers() | st.none(), inner, max_size=4)
    | st.tuples(inner) | st.builds(Inner, held=inner) | st.builds(Held, inner),
    max_leaves=20,
)  # fmt: skip


@given(values, st.booleans())
def test_a_value_is_refused_or_has_a_form_that_every_reader_reads(value: Any, finite: bool) -> None:
    try:
        text = encode({"v": value}, finite=finite)
    except ValueError:
        return
    assert is_readable(text) and msgspec.json.Decoder(msgspec.Raw).decode(text)
    text.decode("utf-8")
    json.dumps(json.loads(text, parse_constant=lambda _: pytest.fail("not JSON")), ensure_ascii=False).encode("utf-8")
    assert encode({"v": value}, finite=finite) == text


@given(any_text)
def test_a_text_stays_as_it_is_but_for_halves_of_surrogate_pairs(text: str) -> None:
    made = well_formed(text)
    made.encode("utf-8")
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert [new for new, old in zip(made, joined, strict=True) if new != old] == ["\ufffd"] * sum(
        "\ud800" <= char <= "\udfff" for char in joined
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("\ud83d and on", "\ufffd and on"), ("name-\udcff.txt", "name-\ufffd.txt"), ("\ud83d\ude00", "😀"),
        ({"\udc00": {"\ud800x": "\udfff"}}, {"\ufffd": {"\ufffdx": "\ufffd"}}), (Path("/d/\udcff"), "/d/\ufffd"),
        (Half.HIGH, "\ufffd"), (Inner(held="\ud800"), {"held": "\ufffd"}), (Held(["\ud800"]), {"held": ["\ufffd"]}),
        (["\ud800", math.nan, uuid.UUID(int=1)], ["\ufffd", None, str(uuid.UUID(int=1))]),
        (("\ud800", b"b"), ["\ufffd", "b"]),
        ({"\ud800": 1, 2: 3, None: 4, (5, 6): 7}, {"\ufffd": 1, "2": 3, "None": 4, "5,6": 7}),
    ],
)  # fmt: skip
def test_half_a_surrogate_pair_becomes_the_replacement_character(value: Any, text: Any) -> None:
    assert json.loads(encode({"v": value})) == {"v": text}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (COLLIDING, "halves"), (b"\xff", "utf-8"), (object(), "object"), (cyclic(), "[Cc]ircular"),
        (cyclic("\ud800"), "levels"), (nested(MAX_DEPTH + 1), "depth"), (nested(MAX_DEPTH + 1, "\ud800"), "depth"),
        (["\ud800", nested(3000)], "levels"), (10**MAX_DIGITS, "digits"), ([-(10**5000)], "digits"),
        (["\ud800", object()], "object"),
    ],
)  # fmt: skip
def test_what_has_no_form_is_refused_with_its_reason(value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        encode({"v": value})


def test_what_lies_within_the_limits_is_encoded() -> None:
    for value in (nested(MAX_DEPTH - 2), 10**MAX_DIGITS - 1, "1" * 5000, [1] * 1000, nested(MAX_DEPTH - 2, "\ud800")):
        assert json.loads(encode({"v": value}))


def test_a_payload_with_half_a_pair_has_both_digests() -> None:
    payload = encode_payload({"observation": {"text": "x\ud800"}})
    assert digest(payload) == digest('{"observation":{"text":"x\ufffd"}}'.encode())
    assert semantic_digest(payload) is not None


@pytest.mark.parametrize("value", ["\ud800", cyclic("\ud800"), object(), nested(300), [10**5000], b"\xff", COLLIDING])
def test_the_wire_form_of_an_error_can_always_be_encoded(value: Any) -> None:
    wire = EnvironmentFailed(f"it said \udcff{value if isinstance(value, str) else ''}", quoted=value).to_wire()
    assert json.loads(msgspec.json.encode(wire)) == wire and "it said \\udcff" in wire["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.just("data"), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.lists(JSON, max_size=4), st.sampled_from([None, 0, 2]), st.booleans())
def test_elements_are_cut_apart_where_the_standard_library_would(
    value: list[Any], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert [json.loads(found.decode("utf-8", "surrogatepass")) for found in elements(text)] == value


@given(st.dictionaries(st.text(max_size=3) | st.just("data"), JSON), st.sampled_from([None, 0, 2]))
def test_a_value_is_cut_out_of_its_object_alone(value: dict[str, Any], indent: int | None) -> None:
    head, cut = cut_out(json.dumps(value, indent=indent).encode(), b"data")
    assert json.loads(head) == ({**value, "data": 0} if "data" in value else value)
    assert cut is None if "data" not in value else json.loads(cut or b"") == value["data"]


@pytest.mark.parametrize(
    "text", [b"", b"[", b'["a', b"[1]]", b"x", b"]", b"[}", b"[1] 2", b"[" + b"[]," * MAX_TOKENS + b"1]"]
)
def test_what_is_no_array_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="fit"):
        elements(text)
    with pytest.raises(ValueError, match="fit"):
        cut_out(b'{"a":' + text[1:] if len(text) > 9 else text.translate(bytes.maketrans(b"[]{}", b"{}[]")), b"data")
