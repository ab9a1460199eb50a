"""Reads a client's data frames (RFC 6455) into messages within bounds; leaves control frames to websockets' parser.

A message over a limit is read to its end but not kept, so that its sender gets an error and the socket stays open
(PROTOCOL A6). Protocol errors are left to websockets' parser as well, but without the payload, which that parser would
read into memory first.
"""

from __future__ import annotations

from typing import final

from msgspec import Struct

from errata_protocol.mux import Allowance, Pieces

from ..doors.asgi_extensions import Unread

try:  # as websockets chooses; it does not export its choice
    from websockets.speedups import apply_mask
except ImportError:
    from websockets.utils import apply_mask

CONTINUATION, TEXT, BINARY, CLOSE = 0x0, 0x1, 0x2, 0x8
FINAL, RESERVED, OPCODE = 0x80, 0x70, 0x0F
MASKED = 0x80
LONGEST_CONTROL = 125

FINAL_TEXT, FINAL_BINARY = FINAL | TEXT, FINAL | BINARY
"""First bytes of messages that consist of one frame."""

_NO_MASK = bytes(4)
_STARTED = bytes((TEXT, MASKED)) + _NO_MASK
"""An empty frame that starts a text message."""
_NOT_TEXT = bytes((FINAL_TEXT, MASKED | 1)) + _NO_MASK + b"\xff"
"""A text message that is not UTF-8."""


@final
class Other(Struct):
    """Bytes for websockets' parser, in order with the messages: control frames, or a frame that breaks the protocol."""

    data: bytes


class _Unfinished:
    """A message whose end has not arrived."""

    __slots__ = ("data", "final", "is_text", "left", "mask", "overloaded", "size", "too_large")

    def __init__(self, is_text: bool) -> None:
        self.is_text = is_text
        self.data = Pieces()
        self.size = 0  # of the payload that was read, kept or not
        self.left = 0  # payload bytes of the current frame that have not arrived
        self.final = False  # whether that frame is the last one
        self.mask = _NO_MASK  # from its next byte on
        self.too_large = self.overloaded = False


class ClientFrames:
    """Reader of the frames that one client sends, starting at the boundary between two frames.

    Args:
        wire_bytes: Largest message that is read; a larger one is a protocol error (close code 1009).
        max_bytes: Largest message that is kept; None for ``wire_bytes``.
        unfinished: Limits the bytes of unfinished messages, which other sockets may share; None for no limit.
    """

    __slots__ = ("_decode", "_ended", "_in_place", "_max_bytes", "_partial", "_unfinished", "_wire_bytes", "allowance")

    def __init__(self, wire_bytes: int, max_bytes: int | None = None, unfinished: Allowance | None = None) -> None:
        self.allowance = unfinished
        self._wire_bytes = wire_bytes
        self._max_bytes = wire_bytes if max_bytes is None else min(max_bytes, wire_bytes)
        self._decode = False
        self._in_place = True
        self._partial = b""  # of a frame whose header has not arrived, or of a control frame that has not arrived whole
        self._unfinished: _Unfinished | None = None
        self._ended = False  # ignore everything that arrives from now on

    def settle(self, unfinished: Allowance | None, *, decode: bool, in_place: bool) -> None:
        """Choose how messages are returned, before the first `cut`.

        Args:
            unfinished: As above.
            decode: Return text messages as str; otherwise all messages are bytes.
            in_place: Report a message over a limit when it has ended; otherwise report it at once and ignore all
                further data.
        """
        self.allowance = unfinished
        self._decode = decode
        self._in_place = in_place

    def cut(self, data: bytes) -> list[bytes | str | Unread | Other]:
        """Return the messages that are complete now and, as `Other`, the bytes for websockets' parser, in order."""
        if self._ended:
            return []
        found: list[bytes | str | Unread | Other] = []
        at = 0
        message = self._unfinished
        if message is not None and message.left:
            at = self._read_payload(message, data, 0, found)
            message = self._unfinished
        elif self._partial:
            data, self._partial = self._partial + data, b""
        end = len(data)
        while at < end and not self._ended:
            if end - at < 2:
                self._partial = data[at:]
                break
            first, size = data[at], data[at + 1] - MASKED
            start = at + 6
            if size >= 126:
                start += 2 if size == 126 else 8
                if start - 4 > end:
                    self._partial = data[at:]
                    break
                size = int.from_bytes(data[at + 2 : start - 4])
            stop = start + size
            if stop <= end and first in (FINAL_TEXT, FINAL_BINARY) and message is None and 0 <= size <= self._max_bytes:
                payload = apply_mask(data[start:stop], data[start - 4 : start])  # the fast path
                found.append(self._message(payload, first == FINAL_TEXT))
                at = stop
                continue
            broken = self._broken(first, data[at + 1], size)
            if broken is not None:
                found.append(Other(broken))
                self._end()
            elif first & OPCODE >= CLOSE:
                if stop > end:
                    self._partial = data[at:]
                    break
                is_close = first & OPCODE == CLOSE
                found.append(Other((_STARTED if is_close and message is not None else b"") + data[at:stop]))
                at = stop
                if is_close:
                    self._end()
            elif start > end:
                self._partial = data[at:]
                break
            else:
                if message is None:
                    message = self._unfinished = _Unfinished(first & OPCODE == TEXT)
                message.left, message.final = size, first >= FINAL
                message.mask = data[start - 4 : start]
                if message.size + size > self._max_bytes:
                    message.too_large = True
                    self._drop(message)
                at = self._read_payload(message, data, start, found)
                message = self._unfinished
        return found

    def close(self) -> None:
        """Free the unfinished message and ignore all further data."""
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._partial = b""
        message, self._unfinished = self._unfinished, None
        if message is not None:
            self._drop(message)

    def _broken(self, first: int, second: int, size: int) -> bytes | None:
        """Return bytes that make websockets' parser find the protocol error of a frame; None for a valid frame."""
        opcode = first & OPCODE
        message = self._unfinished
        empty = bytes((first, second & MASKED)) + _NO_MASK
        if second < MASKED or opcode not in (CONTINUATION, TEXT, BINARY, 0x8, 0x9, 0xA):
            return empty
        if size + (0 if message is None else message.size) > self._wire_bytes:
            return bytes((FINAL_BINARY, MASKED | 127)) + (self._wire_bytes + 1).to_bytes(8)
        if opcode >= CLOSE:
            if size > LONGEST_CONTROL:
                return bytes((first, MASKED | 126)) + (126).to_bytes(2) + _NO_MASK + bytes(126)
            return empty if first < FINAL or first & RESERVED else None
        if first & RESERVED or (message is None) == (opcode == CONTINUATION):
            return empty if message is None else _STARTED + empty
        return None

    def _read_payload(
        self, message: _Unfinished, data: bytes, at: int, found: list[bytes | str | Unread | Other]
    ) -> int:
        """Read payload of the current frame from ``data[at:]``; return the index after it."""
        stop = min(len(data), at + message.left)
        count = stop - at
        message.left -= count
        message.size += count
        if not (message.too_large or message.overloaded):
            if self.allowance is None or self.allowance.take(count):
                mask = message.mask
                message.data.add(apply_mask(data[at:stop], mask))
                message.mask = mask[count % 4 :] + mask[: count % 4]
            else:
                message.overloaded = True
                self._drop(message)
        unread = self._unread(message)
        if unread is not None and not self._in_place:
            found.append(unread)
            self._end()
        elif not message.left and message.final:
            self._unfinished = None
            if unread is None:
                payload = message.data.join()
                self._drop(message)
                found.append(self._message(payload, message.is_text))
            else:
                found.append(unread)
        return stop

    def _unread(self, message: _Unfinished) -> Unread | None:
        """Return the report of a message that exceeded a limit; None if it exceeded none, so that it is kept.

        The limits are ``max_bytes`` for the message, and that of `allowance` for all unfinished messages that share it.
        A message over ``wire_bytes`` is a protocol error and does not get here.
        """
        if message.too_large:
            return Unread(message.size, self._max_bytes)
        if message.overloaded and self.allowance is not None:
            return Unread(message.size, self.allowance.max_bytes, overloaded=True)
        return None

    def _drop(self, message: _Unfinished) -> None:
        if self.allowance is not None:
            self.allowance.give(message.data.size_bytes)
        message.data = Pieces()

    def _message(self, payload: bytes, is_text: bool) -> bytes | str | Other:
        if not is_text:
            return payload
        try:
            if self._decode:
                return payload.decode()
            if not payload.isascii():
                payload.decode()
        except UnicodeDecodeError:
            return Other(_NOT_TEXT)
        return payload


__all__ = ["ClientFrames", "Other"]
