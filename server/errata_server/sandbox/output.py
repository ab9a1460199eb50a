"""Bounded capture of a command's output: keeps head and tail, decodes them by one rule."""

from __future__ import annotations

import asyncio
import codecs
from collections import deque

_CUT_MARK = "\n[... {count} bytes not kept ...]\n"
_CHUNK_BYTES = 64 * 1024
"""The interpreter's lock is held while one chunk is decoded."""
INLINE_BYTES = 256 * 1024
"""Up to so many bytes are decoded on the event loop."""


def decode(data: bytes) -> str:
    """Return UTF-8 bytes as text in which undecodable bytes and NUL are written as ``\\xNN``."""
    if len(data) <= _CHUNK_BYTES:
        return data.decode("utf-8", "backslashreplace").replace("\0", "\\x00")
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    view = memoryview(data)
    parts = [
        decoder.decode(view[at : at + _CHUNK_BYTES], at + _CHUNK_BYTES >= len(data)).replace("\0", "\\x00")
        for at in range(0, len(data), _CHUNK_BYTES)
    ]
    return "".join(parts)


class BoundedOutput:
    """Keeps the beginning and the end of an output stream, and counts its bytes (``total``).

    Args:
        keep_bytes: Bytes to keep, half of them from the beginning.
    """

    __slots__ = ("_head", "_head_limit", "_tail", "_tail_bytes", "_tail_limit", "total")

    def __init__(self, keep_bytes: int) -> None:
        self._head = bytearray()
        self._head_limit = keep_bytes - keep_bytes // 2
        self._tail: deque[bytes] = deque()
        self._tail_limit = keep_bytes // 2
        self._tail_bytes = 0
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Add the next bytes of the stream."""
        self.total += len(data)
        missing = self._head_limit - len(self._head)
        if missing > 0:
            self._head += data[:missing]
            data = data[missing:]
        if not data:
            return
        data = data[-self._tail_limit :] if self._tail_limit else b""
        # Small chunks are joined, so that a million one-byte writes do not become a million objects.
        if self._tail and len(self._tail[-1]) + len(data) <= 4096:
            self._tail_bytes -= len(self._tail[-1])
            data = self._tail.pop() + data
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail and self._tail_bytes - len(self._tail[0]) >= self._tail_limit:
            self._tail_bytes -= len(self._tail.popleft())

    @property
    def kept_bytes(self) -> int:
        """Number of bytes that are kept, or a few more."""
        return len(self._head) + self._tail_bytes

    def holds(self, text: bytes) -> bool:
        """Return whether the kept beginning or the kept end has ``text`` in it."""
        return text in self._head or text in b"".join(self._tail)

    @property
    def truncated(self) -> bool:
        """Whether a part of the stream was not kept."""
        return self.total > self._head_limit + self._tail_limit

    def text(self) -> str:
        """Return the kept output as text (see `decode`); a line in place of missing bytes says how many there were."""
        tail = b"".join(self._tail)
        if not self.truncated:
            return decode(bytes(self._head) + tail)
        head = _without_partial_end(bytes(self._head))
        tail = _without_partial_start(tail[len(tail) - self._tail_limit :])
        return decode(head) + _CUT_MARK.format(count=self.total - len(head) - len(tail)) + decode(tail)


async def texts(*outputs: BoundedOutput) -> tuple[str, ...]:
    """Return `BoundedOutput.text` of each output; much output is decoded in a thread."""
    if sum(output.kept_bytes for output in outputs) <= INLINE_BYTES:
        return tuple(output.text() for output in outputs)
    return await asyncio.to_thread(lambda: tuple(output.text() for output in outputs))


def _without_partial_end(data: bytes) -> bytes:
    """Remove an incomplete UTF-8 sequence from the end; other undecodable bytes stay."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        needed = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 1
        return data[:-back] if needed > back else data
    return data


def _without_partial_start(data: bytes) -> bytes:
    """Remove up to three continuation bytes of an incomplete UTF-8 sequence from the beginning."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]
