"""Fast parser for complete, unfragmented client data frames; leaves all other bytes to websockets' parser (RFC 6455).

Only what nearly every frame is: a masked, final text or binary frame that came whole. Everything else (a frame that
came in part, control frames, fragments, whatever is wrong) is left to the reader that the socket has anyway, whole or
from its first byte on, so that this one needs no rule of its own for it.
"""

from __future__ import annotations

from msgspec import Struct
from websockets.frames import apply_mask

TEXT, BINARY, PING, PONG = 0x81, 0x82, 0x89, 0x8A
"""First bytes of final frames."""

MASKED = 0x80
LONGEST_CONTROL = 125


class Other(Struct):
    """Bytes for the other reader, in their place between the messages."""

    data: bytes


class ClientFrames:
    """What one client sends, from the boundary between two frames on.

    Args:
        max_bytes: Largest message; the other reader says what is wrong with a larger one.
    """

    __slots__ = ("_head", "_left", "_max_bytes", "_over")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._head = b""  # of a frame whose length is not known yet
        self._left = 0  # bytes of a frame that the other reader has the beginning of
        self._over = False  # the other reader has all from here on

    def cut(self, data: bytes) -> list[bytes | Other]:
        """Return messages, and between them what the other reader has to take, in order."""
        if self._over:
            return [Other(data)]
        found: list[bytes | Other] = []
        at = 0
        if self._left:
            at = min(self._left, len(data))
            self._left -= at
            found.append(Other(data[:at]))
        elif self._head:
            data, self._head = self._head + data, b""
        end = len(data)
        while at < end:
            if end - at < 2:
                self._head = data[at:]
                break
            first, size = data[at], data[at + 1] - MASKED
            start = at + 6
            if size >= 126:
                start += 2 if size == 126 else 8
                size = int.from_bytes(data[at + 2 : start - 4])
            is_message = first in (TEXT, BINARY)
            if (
                data[at + 1] < MASKED
                or not (is_message or first in (PING, PONG))
                or size > (self._max_bytes if is_message else LONGEST_CONTROL)
            ):
                self._over = True
                found.append(Other(data[at:]))
                break
            if start > end:
                self._head = data[at:]
                break
            stop = start + size
            if stop > end:
                self._left = stop - end
                found.append(Other(data[at:]))
                break
            if is_message:
                message = apply_mask(data[start:stop], data[start - 4 : start])
                found.append(message if first == BINARY or _is_text(message) else Other(data[at:stop]))
            else:
                found.append(Other(data[at:stop]))
            at = stop
        return found


def _is_text(message: bytes) -> bool:
    if not message.isascii():
        try:
            message.decode()
        except UnicodeDecodeError:
            return False
    return True


__all__ = ["ClientFrames", "Other"]
