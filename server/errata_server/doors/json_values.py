"""Bounds the number of JSON values in a message before it is parsed: these, not its bytes, are what costs time.

A decoder holds the interpreter's lock for as long as it runs. A message of 16 MiB with one long text takes it 30 ms,
one of empty lists four seconds. So the values are counted first, a piece at a time, and only in messages that look like
having many.
"""

from __future__ import annotations

import asyncio

from errata_protocol.errors import FrameTooLarge
from errata_protocol.json_text import MAX_VALUES, ValueCounter


async def excess(text: bytes | str) -> FrameTooLarge | None:
    """Return the error to answer if a message has more than `MAX_VALUES` values, else None."""
    return too_many() if await exceeds(ValueCounter(), text) else None


async def exceeds(counter: ValueCounter, part: bytes | str) -> bool:
    """Add a part of a message; return whether the parts so far have too many values."""
    for has_too_many in counter.add(part):
        if has_too_many:
            return True
        await asyncio.sleep(0)
    return False


def too_many() -> FrameTooLarge:
    """Return the error of a message with too many values."""
    return FrameTooLarge(f"a message has at most {MAX_VALUES} JSON values, this one has more: send less in one action")
