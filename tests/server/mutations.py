"""Seeded mutations of valid frames: bytes flipped, tokens swapped, cut off, nested, other types, odd numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

ODD: tuple[str, ...] = (
    "null", "true", "[]", "{}", '""', "0", "-1", "-0.0", "0.1", "1e999", "-1e999", "NaN", "Infinity",
    str(2**53), str(2**63), str(2**70), "-" + "9" * 400, "9" * 5000, "1e400", "5e-324",
    '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"\u202e"', '"../../etc/passwd"', '"x\\u0000y"',
    '"' + "k" * 5000 + '"', '{"' + "k" * 5000 + '":1}', '{"":{}}', '{"a":1,"a":2}', '{"\\ud800":1}',
    "[" * 40 + "]" * 40, "[" * 300 + "]" * 300, '{"a":' * 2000 + "1" + "}" * 2000, "[" * 5000,
    '"ep_' + "A" * 24 + '"', '"step"', '"reset"', "[[1,2],{}]", '{"__class__":"x"}', '{"self":1,"func":2}',
)  # fmt: skip
"""JSON values, and what looks like one, by which a mutation replaces another."""

_TOKENS = (
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    '"',
    "\\",
    "\\u",
    "null",
    "1e",
    "-",
    "\u2028",
    "\ufeff",
    "\x00",
    " ",
    "é",
    "💥",
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in _places(item, (*path, key)))]


def _rendered(value: Any, at: tuple[Any, ...], text: str) -> str:
    """Return ``value`` as JSON with ``text`` in place of what stands at ``at``."""
    if not at:
        return text
    key, *rest = at
    if isinstance(value, dict):
        items = (
            f"{json.dumps(k)}:{_rendered(v, tuple(rest), text) if k == key else json.dumps(v)}"
            for k, v in value.items()
        )
        return "{" + ",".join(items) + "}"
    return (
        "["
        + ",".join(_rendered(v, tuple(rest), text) if n == key else json.dumps(v) for n, v in enumerate(value))
        + "]"
    )


def _other_value(chance: random.Random, frame: Any) -> str:
    return _rendered(frame, chance.choice(_places(frame)), chance.choice(ODD))


def _wrapped(chance: random.Random, frame: Any) -> str:
    at = chance.choice(_places(frame))
    there = frame
    for key in at:
        there = there[key]
    text, deep = json.dumps(there), chance.choice((1, 2, 60, 300))
    return _rendered(
        frame, at, "[" * deep + text + "]" * deep if chance.random() < 0.5 else '{"a":' * deep + text + "}" * deep
    )


def _more_keys(chance: random.Random, frame: Any) -> str:
    text = json.dumps(frame)
    key = chance.choice(('"type"', '"data"', '"id"', '"t"', '"\\u0000"', '"' + "k" * 2000 + '"', '"\\ud800"', "1"))
    return f"{text[:-1]}{',' if len(text) > 2 else ''}{key}:{chance.choice(ODD)}}}"


def _fewer_keys(chance: random.Random, frame: Any) -> str:
    return json.dumps({key: value for key, value in frame.items() if chance.random() < 0.6})


def _cut(chance: random.Random, frame: Any) -> str:
    text = json.dumps(frame)
    return text[: chance.randrange(len(text))]


def _tokens(chance: random.Random, frame: Any) -> str:
    text = json.dumps(frame)
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(text) + 1)
        text = text[:start] + chance.choice(_TOKENS) + text[start + chance.randint(0, 3) :]
    return text


def _swapped(chance: random.Random, frame: Any) -> str:
    text = json.dumps(frame)
    one, other = sorted(chance.randrange(len(text)) for _ in range(2))
    return text[:one] + text[other:] + text[one:other]


def _doubled(chance: random.Random, frame: Any) -> str:
    return json.dumps(frame) * 2 if chance.random() < 0.5 else json.dumps([frame] * chance.randint(0, 3))


def _flipped(chance: random.Random, frame: Any) -> bytes:
    raw = bytearray(json.dumps(frame).encode())
    for _ in range(chance.randint(1, 4)):
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    return bytes(raw)


_KINDS: tuple[Callable[[random.Random, Any], str | bytes], ...] = (
    _other_value, _other_value, _other_value, _wrapped, _more_keys, _fewer_keys, _cut, _tokens, _swapped, _doubled,
    _flipped,
)  # fmt: skip


def mutation(chance: random.Random, frames: list[dict[str, Any]]) -> str | bytes:
    """Return one mutated frame; text is valid UTF-8, bytes may be anything."""
    made = chance.choice(_KINDS)(chance, chance.choice(frames))
    return made.encode() if isinstance(made, str) and chance.random() < 0.1 else made
