"""Payload bytes and their digests (PROTOCOL C).

The *payload* P_t is the UTF-8 text of the ``data`` value of a delivery as first sent. It is made once, journaled, and
from then on only spliced: an envelope is built around the bytes, never by encoding the value again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import rfc8785
from pydantic_core import PydanticSerializationError, to_json

DIGEST_PREFIX = "sha256:"


def encode_payload(data: Mapping[str, Any]) -> bytes:
    """Encode a delivery's ``data`` as compact UTF-8 JSON.

    NaN and infinities become null, as upstream's server does on plain sockets (PROTOCOL A4). Lone surrogates, which
    have no UTF-8 form, are written as ``\\udXXX`` escapes, again as upstream does.

    Raises:
        ValueError: The value has no JSON form; the message names the type at fault.
    """
    try:
        return to_json(data, inf_nan_mode="null", serialize_unknown=False)
    except (PydanticSerializationError, UnicodeEncodeError) as error:
        if "surrogate" not in str(error):
            raise ValueError(f"observation has no JSON form: {error}") from error
    try:
        return json.dumps(_plain(data), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError) as error:
        raise ValueError(f"observation has no JSON form: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    return json.loads(to_json(value, inf_nan_mode="null"))


def digest(payload: bytes) -> str:
    """Return ``sha256:<hex>`` of the payload bytes (PROTOCOL C1)."""
    return DIGEST_PREFIX + hashlib.sha256(payload).hexdigest()


def canonical(value: Any) -> bytes | None:
    """Return the RFC 8785 form of a JSON value, or None where it has none (integers >= 2^53, lone surrogates)."""
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError, RecursionError):
        return None


def semantic_digest(payload: bytes, volatile_fields: Collection[str] = ()) -> str | None:
    """Return the digest that re-execution, fork and recovery compare (PROTOCOL C2).

    Args:
        payload: P_t.
        volatile_fields: ``VOLATILE_FIELDS`` of the observation class: durations, timestamps, pids. They are left out
            of ``observation`` and of both ``metadata`` objects.

    Returns:
        ``sha256:<hex>`` of the RFC 8785 form without the volatile fields; None where no such form exists, and then
        payload bytes are compared.
    """
    try:
        data = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    if volatile_fields and isinstance(data, dict):
        observation = data.get("observation")
        holders = [observation, data.get("metadata")]
        if isinstance(observation, dict):
            holders.append(observation.get("metadata"))
        for holder in holders:
            if isinstance(holder, dict):
                for name in volatile_fields:
                    holder.pop(name, None)
    form = canonical(data)
    return None if form is None else digest(form)


def splice(head: Mapping[str, Any], payload: bytes) -> bytes:
    """Build ``{...head, "data": <payload>}`` around the payload's exact bytes.

    Args:
        head: Keys before ``data``, in order; must not hold ``data`` and must not be empty.
        payload: UTF-8 JSON text.
    """
    return json.dumps(head, separators=(",", ":")).encode("ascii")[:-1] + b',"data":' + payload + b"}"
