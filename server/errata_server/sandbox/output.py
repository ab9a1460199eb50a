"""Bounded capture of a command's output: keeps head and tail, decodes them by one rule."""

from __future__ import annotations

from collections import deque

_CUT_MARK = "\n[... {count} bytes not kept ...]\n"


def decode(data: bytes) -> str:
    """Return ``data`` as text that is valid JSON and loses nothing: undecodable bytes and NUL become ``\\xNN``.

    Args:
        data: Output bytes.
    """
    return data.decode("utf-8", "backslashreplace").replace("\0", "\\x00")


class BoundedOutput:
    """One output stream: the first and last bytes of it and the count of all.

    Args:
        keep_bytes: How much is kept: half of it head, half tail.
    """

    __slots__ = ("_head", "_head_room", "_tail", "_tail_bytes", "_tail_room", "total")

    def __init__(self, keep_bytes: int) -> None:
        self._head = bytearray()
        self._head_room = keep_bytes - keep_bytes // 2
        self._tail: deque[bytes] = deque()
        self._tail_room = keep_bytes // 2
        self._tail_bytes = 0
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        room = self._head_room - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        data = data[-self._tail_room :] if self._tail_room else b""
        # Chunks are joined before a small one is appended, so that a million one-byte writes do not become a
        # million objects.
        if self._tail and len(self._tail[-1]) + len(data) <= 4096:
            self._tail_bytes -= len(self._tail[-1])
            data = self._tail.pop() + data
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail and self._tail_bytes - len(self._tail[0]) >= self._tail_room:
            self._tail_bytes -= len(self._tail.popleft())

    @property
    def truncated(self) -> bool:
        """Something of the stream was not kept."""
        return self.total > self._head_room + self._tail_room

    def text(self) -> str:
        """Return the kept output; where bytes are missing, a line says how many."""
        tail = b"".join(self._tail)
        if not self.truncated:
            return decode(bytes(self._head) + tail)
        head = _without_partial_end(bytes(self._head))
        tail = _without_partial_start(tail[len(tail) - self._tail_room :])
        return decode(head) + _CUT_MARK.format(count=self.total - len(head) - len(tail)) + decode(tail)


def _without_partial_end(data: bytes) -> bytes:
    """Drop the first bytes of a UTF-8 sequence that the cut broke; bytes that are no such sequence stay."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        needed = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 1
        return data[:-back] if needed > back else data
    return data


def _without_partial_start(data: bytes) -> bytes:
    """Drop the last bytes of a UTF-8 sequence that the cut broke: at most three continuation bytes."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]
