"""Parses JSON and keeps the exact text of its parts, because payloads are compared by bytes and not by value."""

from __future__ import annotations

import hashlib
import json
import re

_SPACE = re.compile(r"[ \t\r\n,]*")
_COLON = re.compile(r"[ \t\r\n]*:[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def members(text: str) -> dict[str, str]:
    """Return the exact text of each member of a JSON object, by name; of duplicate names the last one counts."""
    at, found = text.index("{") + 1, {}
    while text[at := _end(_SPACE, text, at)] != "}":
        name, at = _DECODER.raw_decode(text, at)
        start = _end(_COLON, text, at)
        _, at = _DECODER.raw_decode(text, start)
        found[name] = text[start:at]
    return found


def elements(frame: str) -> list[str]:
    """Return the exact texts of the envelopes in a frame, which is one envelope or an array of them."""
    frame = frame.strip()
    if not frame.startswith("["):
        return [frame]
    at, found = 1, []
    while frame[at := _end(_SPACE, frame, at)] != "]":
        start = at
        _, at = _DECODER.raw_decode(frame, at)
        found.append(frame[start:at])
    return found


def digest(payload: str | bytes) -> str:
    """Return the digest of a payload's bytes, as on the wire."""
    return "sha256:" + hashlib.sha256(payload.encode() if isinstance(payload, str) else payload).hexdigest()


def encode(value: object) -> str:
    """Return a value as compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()
