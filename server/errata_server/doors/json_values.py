"""Bounds the number of JSON values in a message before it is parsed: these, not its bytes, are what costs time.

A decoder holds the interpreter's lock for as long as it runs. A message of 16 MiB with one long text takes it 30 ms,
one of empty lists four seconds. So the values are counted first, a piece at a time, and only in messages that look like
having many.
"""

from __future__ import annotations

import asyncio

from errata_protocol.errors import FrameTooLarge
from errata_protocol.json_text import MAX_VALUES, ValueCount

_GLANCE = 1024**2
"""Characters in which commas and brackets are counted before others get a turn."""
_PIECE = 64 * 1024
"""Characters in which those outside of strings are counted before others get a turn."""


async def excess(text: bytes | str) -> FrameTooLarge | None:
    """Return the error to answer if a message has more than `MAX_VALUES` values, else None."""
    counter = ValueCounter()
    return too_many() if await counter.exceeds(text) else None


def too_many() -> FrameTooLarge:
    """Return the error of a message with too many values."""
    return FrameTooLarge(f"a message has at most {MAX_VALUES} JSON values, this one has more: send less in one action")


class ValueCounter:
    """Counts the values of one JSON text, which may come in parts. What is not JSON has some number too."""

    def __init__(self) -> None:
        self._may_have = 0
        self._counted = ValueCount()
        self._parts: list[bytes | str] = []

    async def exceeds(self, text: bytes | str) -> bool:
        """Add a part; return whether the parts so far have more than `MAX_VALUES` values."""
        for at in range(0, len(text), _GLANCE):
            if at:
                await asyncio.sleep(0)
            piece = text[at : at + _GLANCE]
            if isinstance(piece, str):
                self._may_have += piece.count(",") + piece.count("[") + piece.count("{")
            else:
                self._may_have += piece.count(b",") + piece.count(b"[") + piece.count(b"{")
        self._parts.append(text)
        if self._may_have <= MAX_VALUES:
            return False  # not even if no string had any of these characters
        parts, self._parts = self._parts, []
        for part in parts:
            for at in range(0, len(part), _PIECE):
                piece = part[at : at + _PIECE]
                self._counted.add(piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogatepass"))
                if self._counted.count > MAX_VALUES:
                    return True
                await asyncio.sleep(0)
        return False
