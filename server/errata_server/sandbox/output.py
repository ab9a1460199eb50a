"""Bounded capture of a command's output: keeps head and tail, decodes them by one rule."""

from __future__ import annotations

from collections import deque

_CUT_MARK = "\n[... {count} bytes not kept ...]\n"


def decode(data: bytes) -> str:
    """Return UTF-8 bytes as text in which undecodable bytes and NUL are written as ``\\xNN``."""
    return data.decode("utf-8", "backslashreplace").replace("\0", "\\x00")


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
