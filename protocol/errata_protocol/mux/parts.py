"""The send queue of a socket, and large messages in parts that are interleaved with other sessions' messages (PROTOCOL
D9).

`Outbox` keeps the messages of one session in order; those of different sessions may overtake each other. A message over
`PART_BYTES` is sent in parts, one part per frame, and sessions take turns. So a 16 MiB payload delays its own session
only.

Decisions: a piece is text of the envelope, cut between code points about every `PIECE_BYTES`, so that a part stays near
`PART_BYTES` with the escapes of a JSON string. When a socket is lost, the message is sent again from the start. Parts
that arrive out of order are the peer's fault. The receiver holds unfinished messages in memory, so a sender has at most
`UNDER_WAY_BYTES` of them under way. The receiver refuses a message once and ignores its remaining parts, because each
would be an error for an id that the sender may have given to another request by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from ..errors import FrameTooLarge, InvalidEnvelope, Overloaded
from ..json_text import ValueCounter
from .envelope import join_frame

PART_BYTES = 256 * 1024
"""Envelopes over this size are sent in parts; frames of several envelopes stay below it."""
PIECE_BYTES = PART_BYTES // 2
UNDER_WAY_BYTES = 16 * 1024 * 1024
"""Most bytes of messages that one side is sending in parts; a message alone may have any size."""
MESSAGES_AT_ONCE = 1024
"""Most unfinished messages of a socket, and most refused ones whose remaining parts are ignored."""


NO_ADDRESS: Mapping[str, int] = MappingProxyType({})
"""Of an envelope that names neither ``id`` nor ``q`` nor ``seq``."""


class _LargeMessage:
    """A message that is sent in parts.

    Args:
        message: The envelope.
        head: Address of each part.
    """

    __slots__ = ("head", "message", "next", "of")

    def __init__(self, message: bytes, head: dict[str, object]) -> None:
        self.message = message
        self.head = head
        self.next = 1
        self.of = -(-len(message) // PIECE_BYTES)

    def take(self) -> bytes:
        """Return the next part."""
        start, end = _cut(self.message, self.next - 1), _cut(self.message, self.next)
        text = self.message[start:end].decode()
        part = {**self.head, "type": "part", "data": {"n": self.next, "of": self.of, "text": text}}
        self.next += 1
        return msgspec.json.encode(part)

    @property
    def empty(self) -> bool:
        return self.next > self.of


def _cut(message: bytes, n: int) -> int:
    """Return the offset at which piece ``n``, counted from 0, begins; never inside a code point."""
    offset = n * PIECE_BYTES
    if offset >= len(message):
        return len(message)
    while message[offset] & 0xC0 == 0x80:
        offset -= 1
    return offset


class _Lane:
    """Queue of a session that is sending a large message: that message, and all later ones of the session."""

    __slots__ = ("after", "messages")

    def __init__(self, after: int) -> None:
        self.after = after  # it begins once this many small messages, of all sessions, were taken
        self.messages: deque[bytes | _LargeMessage] = deque()


class Outbox:
    """Messages that wait to be sent on one socket.

    Args:
        max_elements: Most envelopes in one frame.
        under_way_bytes: Most bytes of messages that are being sent in parts.
    """

    __slots__ = ("_lanes", "_put", "_small", "_taken", "_under_way", "buffered", "max_elements", "under_way_bytes")

    def __init__(self, max_elements: int, under_way_bytes: int = UNDER_WAY_BYTES) -> None:
        self.max_elements = max_elements
        self.under_way_bytes = under_way_bytes
        self.buffered = 0
        """Bytes of messages that are not taken completely."""
        self._small: deque[bytes] = deque()
        self._put = 0  # number of small messages ever put
        self._taken = 0  # number of small messages ever taken
        self._under_way = 0  # bytes of the messages of which some parts, but not the last one, were taken
        self._lanes: dict[str, _Lane] = {}

    def __bool__(self) -> bool:
        return bool(self._small or self._lanes)

    def put(self, sid: str, message: bytes, address: Mapping[str, int] = NO_ADDRESS) -> None:
        """Queue an envelope.

        Args:
            sid: Its session, empty for none; envelopes of one session are sent in order.
            message: The envelope.
            address: ``id``, ``q`` or ``seq``, repeated on parts.
        """
        self.buffered += len(message)
        large = len(message) > PART_BYTES
        if not large and (not self._lanes or sid not in self._lanes):
            self._small.append(message)
            self._put += 1
            return
        lane = self._lanes.get(sid)
        if lane is None:
            lane = self._lanes[sid] = _Lane(self._put)
        lane.messages.append(_LargeMessage(message, {"sid": sid or None, **address}) if large else message)

    def take(self, max_bytes: int | None = None) -> list[bytes]:
        """Return frames to send, at least one if there is anything to send.

        Args:
            max_bytes: Return no further frames once they have this many bytes; None for all.
        """
        frames: list[bytes] = []
        taken = 0
        while self and (max_bytes is None or taken < max_bytes):
            for frame in (self._small_frame(), *self._lane_frames()):
                if frame:
                    frames.append(frame)
                    taken += len(frame)
        return frames

    def _small_frame(self) -> bytes:
        """Return a frame of as many small messages as fit, empty if there is none."""
        small = self._small
        if not small:
            return b""
        if len(small) == 1:
            message = small.popleft()
            self._taken += 1
            self.buffered -= len(message)
            return message
        batch = [small.popleft()]
        size = len(batch[0])
        while small and len(batch) < self.max_elements and size + len(small[0]) <= PART_BYTES:
            batch.append(small.popleft())
            size += len(batch[-1])
        self._taken += len(batch)
        self.buffered -= size
        return join_frame(batch)

    def _lane_frames(self) -> list[bytes]:
        """Return one frame for each lane that may begin, i.e. whose preceding small messages are taken."""
        frames = []
        full = False
        for sid, lane in [lane for lane in self._lanes.items() if lane[1].after <= self._taken]:
            head = lane.messages[0]
            if isinstance(head, _LargeMessage):
                size = len(head.message)
                if head.next == 1:
                    full = full or bool(self._under_way and self._under_way + size > self.under_way_bytes)
                    if full:
                        continue  # and no later large message overtakes it
                    self._under_way += size
                frames.append(head.take())
                if head.empty:
                    lane.messages.popleft()
                    self.buffered -= size
                    self._under_way -= size
            else:
                frames.append(head)
                lane.messages.popleft()
                self.buffered -= len(head)
            if not lane.messages:
                del self._lanes[sid]
        return frames


class Allowance:
    """A budget for the bytes of unfinished messages on all sockets of one principal.

    Args:
        max_bytes: Upper bound of `held`.
    """

    __slots__ = ("held", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0

    def take(self, size_bytes: int) -> bool:
        """Add ``size_bytes`` to `held` and return True; return False if that would exceed the bound."""
        if self.held + size_bytes > self.max_bytes:
            return False
        self.held += size_bytes
        return True

    def give(self, size_bytes: int) -> None:
        """Subtract ``size_bytes`` from `held`."""
        self.held -= size_bytes


CHUNK_BYTES = 4 * 1024
"""`Pieces` collects smaller pieces up to this size."""


class Pieces:
    """Collects a message that arrives in pieces of any size, using hardly more memory than the message has bytes.

    One growing bytearray would be copied again and again and fragment the heap. A list of pieces would need an object
    for each piece, which may have one byte. So small pieces are merged into chunks.
    """

    __slots__ = ("_chunks", "_small", "size_bytes")

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._small = bytearray()
        self.size_bytes = 0

    def add(self, piece: bytes) -> None:
        """Append a piece."""
        self.size_bytes += len(piece)
        if len(piece) < CHUNK_BYTES:
            self._small += piece
            if len(self._small) < CHUNK_BYTES:
                return
            piece = b""
        if self._small:
            self._chunks.append(bytes(self._small))
            self._small = bytearray()
        if piece:
            self._chunks.append(piece)

    def join(self) -> bytes:
        """Return the bytes of all pieces."""
        return b"".join((*self._chunks, self._small))


class _Unfinished:
    """A message whose last part has not arrived."""

    __slots__ = ("of", "taken", "text", "values")

    def __init__(self, of: int, values: ValueCounter) -> None:
        self.of = of
        self.taken = 0
        self.text = Pieces()
        self.values = values


class Whole(NamedTuple):
    """A message that came in parts.

    Args:
        text: The envelope.
        values: Its values and levels, counted part by part; nothing is counted where the receiver did not ask for it.
    """

    text: bytes
    values: ValueCounter


class Assembly:
    """Assembles messages that arrive on one socket in parts.

    Args:
        max_bytes: Most bytes of one message, and of all unfinished ones.
        retry_after_s: ``retry_after`` of OVERLOADED.
        unfinished: Limits the bytes of unfinished messages, together with other sockets.
        levels: Levels up to which a message is not too deep, where values and levels are counted; None where not.
    """

    __slots__ = ("_arriving", "_levels", "_refused", "_unfinished", "held", "max_bytes", "retry_after_s")

    def __init__(
        self,
        max_bytes: int,
        retry_after_s: float = 0.1,
        unfinished: Allowance | None = None,
        *,
        levels: int | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self.retry_after_s = retry_after_s
        self._unfinished = unfinished
        self._levels = levels
        self.held = 0
        self._arriving: dict[tuple[object, ...], _Unfinished] = {}
        self._refused: dict[tuple[object, ...], None] = {}

    def add(self, address: tuple[object, ...], n: int, of: int, text: str) -> Whole | None:
        """Add a part.

        On any error the message is dropped, and its remaining parts are ignored: up to its last one, or to part 1 of
        a message with the same address.

        Args:
            address: sid, id, q and seq of the part.
            n: Number of the part, from 1.
            of: Number of parts.
            text: The piece.

        Returns:
            The message after its last part; None before, and for ignored parts.

        Raises:
            InvalidEnvelope: It is not the part that follows, or its text is not valid Unicode.
            FrameTooLarge: The message exceeds ``max_bytes``.
            Overloaded: Too much is unfinished; the message may be sent again.
        """
        if address in self._refused:
            if n == 1 or n >= of:
                del self._refused[address]
            if n > 1:
                return None
        message = self._arriving.pop(address, None) or _Unfinished(of, ValueCounter(levels=self._levels))
        self._give(message)
        try:
            piece = self._checked(message, n, of, text)
            if (
                n < of
                and self._unfinished is not None
                and not self._unfinished.take(message.text.size_bytes + len(piece))
            ):
                raise Overloaded(
                    f"unfinished messages of your sockets hold {self._unfinished.held} bytes, at most "
                    f"{self._unfinished.max_bytes} may be: finish some, then send the message again",
                    retry_after=self.retry_after_s,
                )
            message.text.add(piece)
            if self._levels is not None:
                any(message.values.add(piece))
        except (InvalidEnvelope, FrameTooLarge, Overloaded):
            if n < of:
                if len(self._refused) >= MESSAGES_AT_ONCE:
                    del self._refused[next(iter(self._refused))]
                self._refused[address] = None
            raise
        if n == of:
            return Whole(message.text.join(), message.values)
        message.taken = n
        self.held += message.text.size_bytes
        self._arriving[address] = message
        return None

    def clear(self) -> None:
        """Drop all unfinished messages, because the socket is closed."""
        for message in self._arriving.values():
            self._give(message)
        self._arriving.clear()

    def _give(self, message: _Unfinished) -> None:
        self.held -= message.text.size_bytes
        if self._unfinished is not None:
            self._unfinished.give(message.text.size_bytes)

    def _checked(self, message: _Unfinished, n: int, of: int, text: str) -> bytes:
        """Return the bytes of a part's text, after the checks of `add`."""
        try:
            piece = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidEnvelope("a part holds half of a surrogate pair: send the message again") from error
        if of != message.of or n != message.taken + 1 or n > of:
            raise InvalidEnvelope(
                f"part {n} of {of} does not follow part {message.taken} of {message.of}: send the message again from "
                "part 1"
            )
        size = message.text.size_bytes + len(piece)
        if size > self.max_bytes:
            raise FrameTooLarge(f"a message in parts has more than {self.max_bytes} bytes: send less in one")
        if self.held + size > self.max_bytes or len(self._arriving) >= MESSAGES_AT_ONCE:
            raise Overloaded(
                f"parts of {len(self._arriving)} messages with {self.held} bytes are held, at most {MESSAGES_AT_ONCE} "
                f"and {self.max_bytes} may be: send the message again later, with less under way",
                retry_after=self.retry_after_s,
            )
        return piece
