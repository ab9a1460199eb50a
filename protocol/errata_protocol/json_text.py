"""JSON text that every reader can read: encodes values for the wire, and cuts text apart that a decoder refuses.

Decoders differ in what they read, and one message that a decoder refuses makes all others of its frame unreadable. So
what is written here stays within the limits of the strictest reader in use (decision 163).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from pydantic_core import to_json, to_jsonable_python

from .bounded_json import no_constant

MAX_DEPTH = 254
"""Most levels of objects and arrays that are written: pydantic's limit, and a quarter of what the standard library and
msgspec read."""

MAX_DIGITS = 308
"""Most digits of an integer that is written: with more, it may be beyond what a double holds."""

MAX_TOKENS = 100_000
"""Most tokens that `elements` and `cut_out` read: every bracket, and commas and colons of the outermost value."""

MAX_VALUES = 50_000
"""Most values, keys not counted, of a message that is decoded: these, not its bytes, are what takes time."""

_GLANCE = 1024**2
"""Characters in which all commas and brackets are counted at a time."""
_PIECE = 64 * 1024
"""Characters in which those outside of strings are counted at a time."""
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRINGS = re.compile(_STRING, re.DOTALL)
_PLAIN_STRINGS = re.compile(rb'"[^"]*+"')
_TOKEN = re.compile(rb'(?:[^"\[\]{},:]++|' + _STRING + rb")*+([\[\]{},:])", re.DOTALL)
_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+([\[\]{}])", re.DOTALL)
_LEVELS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_SPACE = b" \t\r\n"
_NO_MARKS = bytes(set(range(256)) - set(b'"[]{},'))
_HALF = re.compile("[\ud800-\udfff]")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_RAW = msgspec.json.Decoder(msgspec.Raw)
_LONG = re.compile(rb"(?<!\d)\d{%d}" % (MAX_DIGITS + 1))
_TWO_DIGITS = re.compile(rb"\d\d")


def encode(value: Any, *, finite: bool = False) -> bytes:
    """Encode a value as compact UTF-8 JSON that every reader can read.

    Half of a surrogate pair, which has no UTF-8 form, becomes U+FFFD, as in `well_formed`. Keys that are no strings
    become strings. NaN and infinities become null.

    Args:
        value: Value of types that pydantic can serialize.
        finite: Whether to raise for NaN and infinities instead.

    Raises:
        ValueError: The value has no such form: it holds a value of another type, bytes that are not UTF-8, itself, more
            than `MAX_DEPTH` levels, an integer of more than `MAX_DIGITS` digits, or keys of one object that are equal
            once their surrogates are replaced.
    """
    mode: Any = "constants" if finite else "null"
    try:
        text = to_json(value, inf_nan_mode=mode, serialize_unknown=False)
    except ValueError as error:
        if "surrogates not allowed" not in str(error):
            raise
        text = to_json(_with_text(value, 1), inf_nan_mode=mode, serialize_unknown=False)
    # One byte is found by memchr, in a tenth of the time; most texts have no capital N or I.
    if finite and ((text.find(b"N") >= 0 and b"NaN" in text) or (text.find(b"I") >= 0 and b"Infinity" in text)):
        json.loads(text, parse_constant=no_constant)  # unless it stands in a string
    # A run of digits that is too long holds two neighbours of a sparse sample; most texts need no other search.
    sampled = text[:: MAX_DIGITS // 2]
    if _TWO_DIGITS.search(sampled) and _LONG.search(text) and _LONG.search(_STRINGS.sub(b'""', text)):
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits, which may be beyond what a double holds")
    return text


def well_formed(text: str) -> str:
    """Return a text with U+FFFD for each half of a surrogate pair; halves that stand side by side become their pair."""
    if _HALF.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def has_surrogates(text: bytes) -> bool:
    """Return whether JSON text has escapes of surrogates: of whole pairs, or of halves that some decoders refuse."""
    return _SURROGATE.search(text) is not None


def is_readable(text: bytes) -> bool:
    """Return whether every reader can read valid JSON text: not if it has half of a surrogate pair.

    Earlier versions wrote such payloads into journals.
    """
    if not has_surrogates(text):
        return True
    try:
        _RAW.decode(text)
    except msgspec.DecodeError:
        return False
    return True


def _with_text(value: Any, level: int) -> Any:
    """Return a value with all its texts `well_formed`."""
    if level > MAX_DEPTH:  # before Python's recursion limit; the value may hold itself
        raise ValueError(f"it nests more than the {MAX_DEPTH} levels that are sent")
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, Mapping):
        made = {
            well_formed(key) if isinstance(key, str) else key: _with_text(item, level + 1)
            for key, item in value.items()
        }
        if len(made) != len(value):
            raise ValueError("keys of one object differ only in halves of surrogate pairs, which are replaced")
        return made
    if isinstance(value, list | tuple | set | frozenset):
        return [_with_text(item, level + 1) for item in value]
    if value is None or isinstance(value, int | float | bytes):
        return value
    plain = to_jsonable_python(value, inf_nan_mode="constants", serialize_unknown=False)  # a model, a path, a date
    return plain if plain is value else _with_text(plain, level)


class ValueCounter:
    """Counts the values and levels of one JSON text, which may come in parts. What is not JSON has some number too.

    Args:
        most: Number of values up to which the text has not too many.
        levels: Number of levels up to which the text nests not too deep; None where that is not asked. Where it is,
            each part is counted at once: small parts that wait for it take much more memory than their text.
    """

    def __init__(self, most: int = MAX_VALUES, levels: int | None = None) -> None:
        self._most = most
        self._levels = levels
        self._may_have = 0
        self._count = 0
        self._level = 0
        self._deepest = 0
        self._parts: list[bytes | str] = []
        self._in_string = False
        self._backslash = b""  # one that escapes the first character of the next piece

    @property
    def has_too_many(self) -> bool:
        """Whether the text so far has too many values."""
        return self._count > self._most

    @property
    def nests_too_deep(self) -> bool:
        """Whether the text so far has too many levels. What follows a piece with too many values is not looked at."""
        return self._levels is not None and self._deepest > self._levels

    def add(self, part: bytes | str) -> Iterator[bool]:
        """Count those of the next part; yield, a piece at a time, whether the text has too many so far.

        Between two pieces others may get a turn. What comes after a piece with which it has too many is not read.
        """
        for at in range(0, len(part) if self._levels is None else 0, _GLANCE):
            if at:
                yield False
            glance = part[at : at + _GLANCE]
            for mark in ",[{":
                self._may_have += glance.count(mark) if isinstance(glance, str) else glance.count(mark.encode())
        self._parts.append(part)
        if self._may_have <= self._most and self._levels is None:
            return  # not even if no string had any of these characters
        parts, self._parts = self._parts, []
        for one in parts:
            for at in range(0, len(one), _PIECE):
                if self.has_too_many:
                    yield True
                    return
                piece = one[at : at + _PIECE]
                self._count_piece(piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogatepass"))
                yield self.has_too_many

    def _count_piece(self, piece: bytes) -> None:
        # Without escapes a quote begins or ends a string, and deleting them is faster than matching strings with them.
        piece = self._backslash + piece
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            self._backslash, piece = b"\\", piece[:-1]
        else:
            self._backslash = b""
        if b"\\" in piece:
            piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        marks = piece.translate(None, _NO_MARKS)
        bare = _PLAIN_STRINGS.sub(b"", b'"' + marks if self._in_string else marks)
        begins = bare.find(b'"')
        self._in_string = begins >= 0
        if self._in_string:
            bare = bare[:begins]
        opened = bare.count(b"[") + bare.count(b"{")
        self._count += bare.count(b",") + opened
        if self._level + opened > self._deepest:
            steps = memoryview(bare.translate(_LEVELS, b",")).cast("b")
            self._deepest = max(self._deepest, max(itertools.accumulate(steps, initial=self._level)))
        self._level += opened - bare.count(b"]") - bare.count(b"}")


def depth(text: bytes) -> int:
    """Return the number of nested levels of objects and arrays in valid JSON text."""
    counter = ValueCounter()
    for at in range(0, len(text), _PIECE):
        counter._count_piece(text[at : at + _PIECE])
    return counter._deepest


def elements(text: bytes) -> list[bytes]:
    """Return the text of each element of an array, also of elements that a decoder refuses.

    Only brackets and strings are looked at: neither time nor memory grows with the depth.

    Raises:
        ValueError: It is no array, its brackets or strings do not fit, or it has more than `MAX_TOKENS`.
    """
    places = [at for at, token in _outermost(text, b"[]") if token != b":"]
    found = [text[start + 1 : end] for start, end in itertools.pairwise(places)]
    return [] if len(found) == 1 and not found[0].strip(_SPACE) else found


def cut_out(text: bytes, name: bytes) -> tuple[bytes, bytes | None]:
    """Return an object's text with ``0`` as the value of the last key ``name``, and the text of that value.

    Read as by `elements`. The value is None where the object has no such key.

    Raises:
        ValueError: It is no object, its brackets or strings do not fit, or it has more than `MAX_TOKENS`.
    """
    member, colon, span = 0, 0, None
    for at, token in _outermost(text, b"{}"):
        if token == b":":
            colon = at
            continue
        if colon > member and text[member:colon].strip(_SPACE) == b'"%s"' % name:
            span = (colon + 1, at)
        member = at + 1
    if span is None:
        return text, None
    return text[: span[0]] + b"0" + text[span[1] :], text[span[0] : span[1]].strip(_SPACE)


def _outermost(text: bytes, brackets: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the place of each bracket, comma and colon that belongs to the outermost object or array."""
    at = level = 0
    for _ in range(MAX_TOKENS):
        found = (_TOKEN if level < 2 else _BRACKET).match(text, at)
        if found is None or (level == 0 and found[1] != brackets[:1]):
            break
        at, token = found.end(), found[1]
        closes = token in b"]}"
        if level == (1 if token in b",:" or closes else 0):
            yield at - 1, token
        level += -1 if closes else token in b"[{"
        if level == 0:
            if token != brackets[1:] or text[at:].strip(_SPACE):
                break
            return
    raise ValueError("its brackets and strings do not fit, or are too many")
