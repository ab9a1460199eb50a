"""Payload bytes and their digests (PROTOCOL C).

The *payload* P_t of a delivery is the UTF-8 text of its ``data`` value as first sent. It is encoded once and journaled.
Every later message with it is built around these bytes and never encodes the value again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import rfc8785

from . import json_path, json_text
from .normalisers import PREFIX, texts_normalised

DIGEST_PREFIX = "sha256:"


def encode_payload(data: Mapping[str, Any], *, finite: bool = False) -> bytes:
    """Encode a delivery's ``data`` as compact UTF-8 JSON.

    NaN and infinities become null, as on plain sockets of upstream's server; half of a surrogate pair becomes U+FFFD
    (PROTOCOL A4).

    Args:
        data: What is delivered.
        finite: Raise for NaN and infinities instead.

    Raises:
        ValueError: The value cannot be encoded as JSON that every reader can read (`json_text.encode`).
    """
    try:
        return json_text.encode(data, finite=finite)
    except ValueError as error:
        raise ValueError(f"what the environment returned has no JSON form: {error}") from error


def digest(payload: bytes) -> str:
    """Return ``sha256:<hex>`` of the payload bytes (PROTOCOL C1)."""
    return DIGEST_PREFIX + hashlib.sha256(payload).hexdigest()


def canonical(value: Any) -> bytes | None:
    """Return the RFC 8785 form of a JSON value, None if it has none (integers >= 2^53, lone surrogates)."""
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError, RecursionError):
        return None


def semantic_digest(payload: bytes, volatile_fields: Collection[str] = ()) -> str | None:
    """Return the digest that re-execution, fork and recovery compare (PROTOCOL C2).

    Args:
        payload: P_t.
        volatile_fields: ``VOLATILE_FIELDS`` of the observation class, e.g. durations, timestamps and pids; removed
            as by `without_fields`.

    Returns:
        ``sha256:<hex>`` of the RFC 8785 form without the volatile fields; None if there is no such form: payload
        bytes are compared then.
    """
    form = _semantic_form(payload, volatile_fields)
    return None if form is None else digest(form)


def semantic_sha256(payload: bytes, volatile_fields: Collection[str] = ()) -> bytes | None:
    """Return the digest of `semantic_digest` as its 32 bytes, None if there is none."""
    form = _semantic_form(payload, volatile_fields)
    return None if form is None else hashlib.sha256(form).digest()


def _semantic_form(payload: bytes, volatile_fields: Collection[str]) -> bytes | None:
    form = _usual_form(payload, volatile_fields)
    if form is not None:
        return form
    try:
        data = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return canonical(without_fields(data, volatile_fields))


def _usual_form(payload: bytes, volatile_fields: Collection[str]) -> bytes | None:
    """Return the RFC 8785 form, encoded by msgspec at a tenth of the cost; None if the two encodings might differ.

    They are equal if numbers are short and have no exponent, and if sorting by code points and by UTF-16 units gives
    the same order. That msgspec takes the last of two equal keys does not matter, because payloads have none."""
    if b"\\u" in payload or not (payload.isascii() or _ASTRAL.search(payload) is None):
        return None
    if _SIXTEEN in payload.translate(_DIGITS) and _LONG.search(payload):
        return None
    try:
        data = _DECODER.decode(payload)
        if volatile_fields:
            data = without_fields(data, volatile_fields)
        return _ENCODER.encode(data)
    except (ValueError, msgspec.DecodeError, RecursionError):
        return None


def _usual_float(text: str) -> int | float:
    value = float(text)
    if value.is_integer() and abs(value) < 2**53:
        return int(value)  # 1.0 is written 1, and so is -0.0 without its sign
    if 1e-4 <= abs(value) < 2**53:
        return value
    raise ValueError("ECMAScript may write this number in another way than Python")


_ASTRAL = re.compile(rb"[\xf0-\xf4]")  # UTF-8 beyond the Basic Multilingual Plane
_LONG = re.compile(rb"(?<![.\d])\d{16}")  # what may be an integer of 2^53 or more
_DIGITS = bytes(48 if 48 <= byte < 58 else 32 for byte in range(256))  # a search costs ten times as much
_SIXTEEN = b"0" * 16
_DECODER = msgspec.json.Decoder(float_hook=_usual_float)
_HEAD = json.JSONEncoder(separators=(",", ":"))  # json.dumps makes one a call
_ENCODER = msgspec.json.Encoder(order="sorted")


def without_fields(data: Any, names: Collection[str]) -> Any:
    """Return a decoded payload without the fields ``names``.

    A name is removed from an observation and from both ``metadata`` objects; in an MCP result, from its structured
    content and its ``_meta``. Texts are not searched. A path, which begins with ``$``, is removed where it leads
    (`json_path`); one into ``metadata``, in both objects. A name that begins with ``~`` is a normaliser, applied to
    all texts (`normalisers`)."""
    if not names or not isinstance(data, dict):
        return data
    of_texts = [name for name in names if name.startswith(PREFIX)]
    if of_texts:
        names = [name for name in names if not name.startswith(PREFIX)]
        return texts_normalised(without_fields(data, names), [name.removeprefix(PREFIX) for name in of_texts])
    paths = [name for name in names if name.startswith("$")]
    if paths:
        for path in paths:
            data = _without_path(data, json_path.parse(path))
        names = [name for name in names if not name.startswith("$")]
        if not names:
            return data
    without = {k: v for k, v in data.items() if k != "metadata"}
    for holder, inner in _HOLDERS.items():
        if isinstance(data.get(holder), dict):
            without[holder] = {k: _less(v, names) if k in inner else v for k, v in _less(data[holder], names).items()}
    if "metadata" in data:
        without["metadata"] = _less(data["metadata"], names)
    return without


def _without_path(data: Any, path: json_path.Path) -> Any:
    data = json_path.without(data, path)
    if path[:1] == ("metadata",):
        return json_path.without(data, ("observation", *path))
    if path[:2] == ("observation", "metadata"):
        return json_path.without(data, path[1:])
    return data


_HOLDERS = {
    "observation": ("metadata",),
    "result": ("data", "meta", "_meta", "structuredContent", "structured_content"),  # MCP's names and FastMCP's
}
"""Objects whose fields can be volatile, with their inner ones."""


def _less(value: Any, names: Collection[str]) -> Any:
    return {k: v for k, v in value.items() if k not in names} if isinstance(value, dict) else value


def splice(head: Mapping[str, Any], payload: bytes) -> bytes:
    """Build ``{...head, "data": <payload>}`` around the payload's exact bytes.

    Args:
        head: Keys before ``data``, in order; not empty, and without ``data``.
        payload: UTF-8 JSON text.
    """
    return _HEAD.encode(head).encode("ascii")[:-1] + b',"data":' + payload + b"}"
