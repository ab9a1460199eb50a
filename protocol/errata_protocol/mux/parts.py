"""Large messages as parts between other sessions' messages (PROTOCOL D9).

`Outbox` orders what leaves: messages of one session in order, those of different sessions past each other. A message
over `PART_BYTES` leaves as parts, one a frame and session in turn, so a 16 MiB payload delays its own session only.

Decisions: a piece is text of the envelope, cut between code points every `PIECE_BYTES`, so that with the escapes a JSON
string needs it stays near `PART_BYTES`. A lost socket loses the pieces it carried, and the message is sent anew. Parts
of one message arrive in order, and one that does not is the peer's fault. The receiver holds what is unfinished, so a
sender has messages of `UNDER_WAY_BYTES` under way at a time. What the receiver refuses it refuses once and passes over
what still comes of it: each piece would be an error for an id that the sender may have given to another request.
"""

from __future__ import annotations

from collections import deque

import msgspec

from ..errors import FrameTooLarge, InvalidEnvelope, Overloaded
from .envelope import join_frame

PART_BYTES = 256 * 1024
"""Envelopes over this travel as parts; frames of several envelopes stay below it."""
PIECE_BYTES = PART_BYTES // 2
UNDER_WAY_BYTES = 16 * 1024 * 1024
"""Messages that one side sends in parts at a time, together; one alone may be of any size."""
MESSAGES_AT_ONCE = 1024
"""Messages of one socket that may be unfinished, and refused ones whose rest is awaited."""


class _Parted:
    """A message that leaves in pieces."""

    __slots__ = ("head", "message", "next", "of")

    def __init__(self, message: bytes, head: dict[str, object]) -> None:
        self.message = message
        self.head = head
        self.next = 1
        self.of = -(-len(message) // PIECE_BYTES)

    def take(self) -> bytes:
        start, end = _cut(self.message, self.next - 1), _cut(self.message, self.next)
        text = self.message[start:end].decode()
        part = {**self.head, "type": "part", "data": {"n": self.next, "of": self.of, "text": text}}
        self.next += 1
        return msgspec.json.encode(part)

    @property
    def empty(self) -> bool:
        return self.next > self.of


def _cut(message: bytes, n: int) -> int:
    """Return where piece n begins, counted from 0: never inside a code point."""
    place = n * PIECE_BYTES
    if place >= len(message):
        return len(message)
    while message[place] & 0xC0 == 0x80:
        place -= 1
    return place


class _Lane:
    """A session that has a large message under way, and what it sends behind it."""

    __slots__ = ("behind", "messages")

    def __init__(self, behind: int) -> None:
        self.behind = behind  # small messages, of all sessions, that were there first
        self.messages: deque[bytes | _Parted] = deque()


class Outbox:
    """What one socket has to send.

    Args:
        max_elements: Envelopes in one frame.
        under_way_bytes: Messages that are sent in parts at a time, together.
    """

    __slots__ = ("_lanes", "_put", "_small", "_taken", "_under_way", "buffered", "max_elements", "under_way_bytes")

    def __init__(self, max_elements: int, under_way_bytes: int = UNDER_WAY_BYTES) -> None:
        self.max_elements = max_elements
        self.under_way_bytes = under_way_bytes
        self.buffered = 0
        """Bytes that were put and not taken."""
        self._small: deque[bytes] = deque()
        self._put = 0  # small messages, ever
        self._taken = 0
        self._under_way = 0  # bytes of the messages of which a part, but not the last one, was taken
        self._lanes: dict[str, _Lane] = {}

    def __bool__(self) -> bool:
        return bool(self._small or self._lanes)

    def put(self, sid: str, message: bytes, **address: int) -> None:
        """Queue an envelope.

        Args:
            sid: Its session, empty for none: envelopes of one session leave in order.
            message: The whole envelope.
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
        lane.messages.append(_Parted(message, {"sid": sid or None, **address}) if large else message)

    def take(self, max_bytes: int | None = None) -> list[bytes]:
        """Return frames to send, at least one if there is anything.

        Args:
            max_bytes: Stop after about so many; None for all.
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
        """Return one frame of each session that has a large message under way and nothing before it."""
        frames = []
        full = False
        for sid, lane in [lane for lane in self._lanes.items() if lane[1].behind <= self._taken]:
            head = lane.messages[0]
            if isinstance(head, _Parted):
                size = len(head.message)
                if head.next == 1:
                    full = full or bool(self._under_way and self._under_way + size > self.under_way_bytes)
                    if full:
                        continue  # and none behind it passes it
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
    """Bytes of unfinished messages that may be held together, by several sockets: those of one principal.

    Args:
        max_bytes: Upper bound of `held`.
    """

    __slots__ = ("held", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0

    def take(self, size_bytes: int) -> bool:
        """Count more bytes as held; False, and nothing is counted, where that would be too many."""
        if self.held + size_bytes > self.max_bytes:
            return False
        self.held += size_bytes
        return True

    def give(self, size_bytes: int) -> None:
        """Count so many as held no longer."""
        self.held -= size_bytes


CHUNK_BYTES = 4 * 1024


class Pieces:
    """Bytes of a message that arrive one after another, of any size, and take hardly more memory than their sum.

    One growing bytearray would be moved again and again, and leave holes of its former sizes; a list of pieces has an
    object for each, and they may be one byte long. So small ones are collected.
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
        """Return all of it."""
        return b"".join((*self._chunks, self._small))


class _Arriving:
    """A message of which the last part has not come."""

    __slots__ = ("of", "taken", "text")

    def __init__(self, of: int) -> None:
        self.of = of
        self.taken = 0
        self.text = Pieces()


class Assembly:
    """Messages of one socket that arrive in parts.

    Args:
        max_bytes: Text of one message, and of all that are unfinished.
        retry_after_s: What a refusal for want of room tells.
        unfinished: Bounds what is held together with other sockets.
    """

    __slots__ = ("_arriving", "_refused", "_unfinished", "held", "max_bytes", "retry_after_s")

    def __init__(self, max_bytes: int, retry_after_s: float = 0.1, unfinished: Allowance | None = None) -> None:
        self.max_bytes = max_bytes
        self.retry_after_s = retry_after_s
        self._unfinished = unfinished
        self.held = 0
        self._arriving: dict[tuple[object, ...], _Arriving] = {}
        self._refused: dict[tuple[object, ...], None] = {}

    def add(self, address: tuple[object, ...], n: int, of: int, text: str) -> bytes | None:
        """Take a part.

        Args:
            address: sid, id, q and seq as the part names them.
            n: Which part, from 1.
            of: How many there are.
            text: Its piece.

        Returns:
            The whole envelope once its last part came; None before, and for what is left of a message that was refused.

        Raises:
            InvalidEnvelope: It does not follow on the part before. In this and the other cases what was held of the
                message is dropped, and what still comes of it is passed over until its last part, or a first one.
            FrameTooLarge: The message is larger than any may be.
            Overloaded: Too much is held; the message can be sent again.
        """
        if address in self._refused:
            if n == 1 or n >= of:
                del self._refused[address]
            if n > 1:
                return None
        message = self._arriving.pop(address, None) or _Arriving(of)
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
        except (InvalidEnvelope, FrameTooLarge, Overloaded):
            if n < of:
                if len(self._refused) >= MESSAGES_AT_ONCE:
                    del self._refused[next(iter(self._refused))]
                self._refused[address] = None
            raise
        if n == of:
            return message.text.join()
        message.taken = n
        self.held += message.text.size_bytes
        self._arriving[address] = message
        return None

    def clear(self) -> None:
        """Drop what is unfinished: its socket is gone."""
        for message in self._arriving.values():
            self._give(message)
        self._arriving.clear()

    def _give(self, message: _Arriving) -> None:
        self.held -= message.text.size_bytes
        if self._unfinished is not None:
            self._unfinished.give(message.text.size_bytes)

    def _checked(self, message: _Arriving, n: int, of: int, text: str) -> bytes:
        """Return a part's piece if it can be taken."""
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
