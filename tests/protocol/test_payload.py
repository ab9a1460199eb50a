"""Payload bytes, digests, and splicing (PROTOCOL A4, C)."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from errata_protocol.json_text import well_formed
from errata_protocol.payload import canonical, digest, encode_payload, semantic_digest, splice


@dataclass
class Foreign:
    """A value that is encoded by its fields."""

    value: float


texts = st.text(st.characters(exclude_categories=["Cs"]))
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(texts, json_values))
def test_a_spliced_frame_holds_the_payloads_exact_bytes(data: dict[str, Any]) -> None:
    payload = encode_payload(data)
    frame = splice({"type": "observation", "t": 3}, payload)
    assert frame.endswith(b'"data":' + payload + b"}")
    assert json.loads(frame) == {"type": "observation", "t": 3, "data": json.loads(payload)}
    assert json.loads(payload) == data


def test_a_digest_is_sha256_of_the_bytes() -> None:
    assert digest(b"{}") == "sha256:" + hashlib.sha256(b"{}").hexdigest()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_without_a_json_form_become_null(value: float) -> None:
    assert encode_payload({"a": [value]}) == b'{"a":[null]}'
    assert encode_payload({"a": [value], "b": "\ud800"}) == '{"a":[null],"b":"\ufffd"}'.encode()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("beside", ["NaN", "\ud800"])
def test_numbers_without_a_json_form_are_refused_where_they_have_to_be_finite(value: float, beside: str) -> None:
    for data in ({"a": [value], "b": beside}, {"a": Foreign(value), "b": beside}):
        with pytest.raises(ValueError, match="no JSON form"):
            encode_payload(data, finite=True)
    assert json.loads(encode_payload({"a": [1.5], "b": beside}, finite=True)) == {"a": [1.5], "b": well_formed(beside)}


def test_a_value_without_a_json_form_is_told_by_type() -> None:
    with pytest.raises(ValueError, match="object"):
        encode_payload({"a": object()})


def test_the_semantic_digest_ignores_key_order_and_volatile_fields_wherever_they_stand() -> None:
    one = b'{"observation":{"a":1,"duration_s":0.1,"metadata":{"duration_s":0.1}},"reward":1.0,"done":false}'
    two = b'{"done":false,"reward":1,"observation":{"duration_s":9,"a":1.0,"metadata":{"duration_s":3}}}'
    assert semantic_digest(one, {"duration_s"}) == semantic_digest(two, {"duration_s"}) is not None
    assert semantic_digest(one) != semantic_digest(two)


@pytest.mark.parametrize("payload", [b'{"a":9007199254740993}', b'{"a":"\\ud800"}', b"not json"])
def test_where_no_canonical_form_exists_there_is_no_semantic_digest(payload: bytes) -> None:
    assert semantic_digest(payload) is None


numbers_at_the_edge = st.sampled_from(
    [-0.0, 1.0, 1e15, 2.0**53, 2.0**53 - 1, 2**53 - 1, 10**15, -(10**15), 1e16, 1e21, 1e-4, 9.99e-5, 1e-7, 5e-324, 0.1]
)
awkward = st.sampled_from(["\U0001f600", "\ue000", "\x00", "\x7f", "\u2028", "1234567890123456", "\\ud83d", '"', "/"])


@given(
    st.recursive(
        json_values | numbers_at_the_edge | awkward,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts | awkward, inner, max_size=4),
        max_leaves=20,
    )
)
def test_the_digest_of_any_payload_is_that_of_its_form_by_rfc8785(data: Any) -> None:
    payload = encode_payload({"observation": data})
    form = rfc8785.dumps(json.loads(payload))
    assert semantic_digest(payload) == digest(form)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_is_digested_as_rfc8785_writes_it(number: float) -> None:
    payload = encode_payload({"n": number})
    assert semantic_digest(payload) == digest(rfc8785.dumps({"n": number}))


def test_the_canonical_form_is_rfc_8785() -> None:
    assert canonical({"b": 1.0, "a": "é", "10": 1e21}) == '{"10":1e+21,"a":"é","b":1}'.encode()
