"""`Relay`: passes the frames of one multiplexed socket to the workers that have its sessions.

A client picks the sids of multiplexed sessions, so that they name no shard, and its socket arrives at any worker. What
opens or resumes a session decides: the board knows the recent sids, also of a worker that is dead or stopped, and
otherwise the other workers are asked for those in their journals. So a session is opened at most once, whichever worker
its client's next socket reaches. A connection to another worker that ends closes the client's socket: the client then
resumes everything on its next one, as after any lost socket.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import WebSocketException

from errata_protocol.capabilities import PROTOCOL_NAME, ServerLimits
from errata_protocol.errors import FrameTooLarge, InvalidEnvelope, JournalUnavailable, Misdirected, Overloaded
from errata_protocol.json_text import elements
from errata_protocol.mux.envelope import MAX_DEPTH, write_envelope
from errata_protocol.mux.parts import Assembly

from ..doors.session_socket import GONE
from .board import RECENT_SIDS
from .origin import passed_on

log = logging.getLogger("errata.fleet")

LINK_S = 30.0
"""How long a worker has to accept a connection, seconds: it may be starting again."""

LINK_BYTES = 64 * 1024**2
"""Largest frame between workers, bytes: as large as clients may send."""

SERVICE_RESTART = 1012
"""WebSocket close code of a client's socket where a worker that has some of its sessions has ended."""

SPLIT_BYTES = 64 * 1024
"""Size of a frame up to which it is split on the event loop, bytes; a longer one is split on a thread."""


class Head(msgspec.Struct, gc=False):
    """What of an envelope says whose it is.

    Args:
        type: Type of the message.
        sid: Session that the message addresses; None where it addresses no single one.
    """

    type: str = ""
    sid: str | None = None


class _Piece(msgspec.Struct, gc=False):
    n: int
    of: int
    text: str


class _Address(msgspec.Struct, gc=False):
    id: Any = None
    q: Any = None


class Part(msgspec.Struct, gc=False):
    """A part of an envelope.

    Args:
        data: Number of the part from 1, number of parts, and text of the part.
        id: Request that the part addresses; None where it addresses none.
        q: Read that the part addresses; None where it addresses none.
    """

    data: _Piece
    id: int | None = None
    q: int | None = None


class Element(NamedTuple):
    """An envelope of a frame.

    Args:
        head: What says whose the envelope is.
        text: Text of the envelope.
        entries: Sid and text of each session that a resume names; empty for a resume that its reader refuses, and for
            other messages.
        part: The envelope as a part that names no session; None for other messages.
    """

    head: Head
    text: bytes
    entries: Sequence[tuple[str, bytes]] = ()
    part: Part | None = None


class _Entry(msgspec.Struct, gc=False):
    sid: str = ""


class _Resume(msgspec.Struct, gc=False):
    data: list[msgspec.Raw]


_HEADS = msgspec.json.Decoder(list[Head])
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_HEAD = msgspec.json.Decoder(Head)
_RESUME = msgspec.json.Decoder(_Resume)
_ENTRY = msgspec.json.Decoder(_Entry)
_PART = msgspec.json.Decoder(Part)
_ADDRESS = msgspec.json.Decoder(_Address)


def split(frame: bytes) -> list[Element] | None:
    """Return the envelopes of a frame; None for a frame that its reader refuses."""
    try:
        if frame.lstrip(b" \t\r\n")[:1] != b"[":
            return [_element(_HEAD.decode(frame), frame)]
        return [_element(head, bytes(raw)) for head, raw in zip(_HEADS.decode(frame), _RAWS.decode(frame), strict=True)]
    except (msgspec.DecodeError, RecursionError):
        return _split_slowly(frame)


def _split_slowly(frame: bytes) -> list[Element] | None:
    """Split a frame that msgspec refuses: one with half of a surrogate pair is JSON all the same."""
    try:
        texts = elements(frame) if frame.lstrip(b" \t\r\n")[:1] == b"[" else [frame]
        return [_element(msgspec.convert(json.loads(text), Head), text) for text in texts]
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None


def _element(head: Head, text: bytes) -> Element:
    try:
        if head.type == "resume":
            return Element(head, text, [(_ENTRY.decode(raw).sid, bytes(raw)) for raw in _RESUME.decode(text).data])
        if head.type == "part" and head.sid is None:
            return Element(head, text, part=_PART.decode(text))
    except (msgspec.DecodeError, RecursionError):
        pass  # its reader answers with an error
    return Element(head, text)


async def _split(frame: bytes) -> list[Element] | None:
    """Return what `split` returns; a long frame is split on a thread."""
    return split(frame) if len(frame) <= SPLIT_BYTES else await asyncio.to_thread(split, frame)


def names_sessions(frame: bytes) -> bool:
    """Return whether a frame may open or resume a session: it has such a word, or an escape that may hide one."""
    return any(word in frame for word in (b"open", b"resume", b"part", b"\\u00"))


def _address(text: bytes) -> dict[str, int]:
    """Return the id and the q of an envelope, without those that are no numbers; none of a long one."""
    try:
        found = _ADDRESS.decode(text) if len(text) <= SPLIT_BYTES else _Address()
    except (msgspec.DecodeError, RecursionError):
        return {}
    return {name: value for name, value in (("id", found.id), ("q", found.q)) if type(value) is int}


def resume_of(entries: Sequence[bytes]) -> bytes:
    """Return a resume with these entries."""
    return b'{"type":"resume","data":[' + b",".join(entries) + b"]}"


class Owners(Protocol):
    """Knows whose sessions are; `errata_server.fleet.member.Member` is one."""

    worker: int
    """This worker."""

    relayed: int
    """Frames that were sent to other workers."""

    async def all_started(self) -> None:
        """Wait until each worker has started once."""

    def owner_of(self, sid: str) -> int | None:
        """Return the worker of a session that is new or known; None for others."""

    async def owners_of(self, sids: Sequence[str]) -> dict[str, int]:
        """Return the workers of sessions; raise JournalUnavailable where one that may have them does not answer."""

    def path_of(self, worker: int) -> Path:
        """Return where a worker's Unix socket is."""

    def for_new(self, path: str) -> int:
        """Return the worker that new sessions of a socket are opened at.

        Args:
            path: Path of the socket's handshake.
        """

    def absent(self, worker: int) -> str | None:
        """Return the shard of a worker that has been drained; None for one that has not."""


class Relay:
    """The relay of one socket.

    Args:
        member: This worker.
        socket: The client's socket.
        handshake: The same socket, with the headers of its handshake.
        limits: Bounds of the socket's frames.
    """

    def __init__(self, member: Owners, socket: WebSocket, handshake: HTTPConnection, limits: ServerLimits) -> None:
        self._member = member
        self._socket = socket
        self._handshake = handshake
        self._limits = limits
        self._elsewhere: dict[str, int] = {}
        self._here: set[str] = set()
        self._assembly = Assembly(limits.max_frame, levels=MAX_DEPTH)
        self._for_new: int | None = None  # one for all, so that the sessions of a group are at one worker
        self._links: dict[int, ClientConnection] = {}
        self._pumps: set[asyncio.Task[None]] = set()

    async def take(self, frame: bytes | str) -> bytes | str | None:
        """Pass on what is of other workers; return what is left for this one, None where nothing is.

        Raises:
            JournalUnavailable: Another worker does not answer.
        """
        text = frame.encode() if isinstance(frame, str) else frame
        if not self._elsewhere and not names_sessions(text):
            return frame
        found = await _split(text)
        if found is None or len(found) > self._limits.max_elements:
            return frame
        holds_parts = any(element.part is not None for element in found)
        if holds_parts:
            found = [whole for element in found if (whole := await self._assembled(element)) is not None]
        await self._find(found)
        here: list[bytes] = []
        there: dict[int, list[bytes]] = {}
        for element in found:
            if element.entries:
                self._share(element.entries, here, there)
                continue
            owner = self._elsewhere.get(element.head.sid) if element.head.sid is not None else None
            (here if owner is None else there.setdefault(owner, [])).append(element.text)
        for owner, envelopes in there.items():
            if (shard := self._member.absent(owner)) is None:
                await self._send(owner, envelopes)
                continue
            for envelope in envelopes:
                await self._refuse(shard, envelope)
        if not there and not holds_parts:
            return frame
        return b"[" + b",".join(here) + b"]" if here else None

    async def _assembled(self, element: Element) -> Element | None:
        """Return an envelope, or what a part that names no session makes with those before it; None until it is whole.

        A part that is wrong, or makes no envelope or one with too many values, is left to its reader, which answers
        with an error.
        """
        part = element.part
        if part is None:
            return element
        try:
            message = self._assembly.add((part.id, part.q), part.data.n, part.data.of, part.data.text)
        except (InvalidEnvelope, FrameTooLarge, Overloaded):
            return element
        if message is None:
            return None
        if message.values.has_too_many:
            return element
        whole = await _split(message.text)
        return whole[0] if whole is not None and len(whole) == 1 and whole[0].head.type != "part" else element

    async def _find(self, found: Sequence[Element]) -> None:
        """Find out who has the sessions that are opened or resumed.

        One that is opened is new, unless the board has its sid: an open is only sent again while its client waits for
        the answer. One that is resumed may be older than what the board has, and so may one whose open comes in parts.
        """
        opened = [head.sid for head, *_ in found if head.type == "open" and head.sid]
        resumed = [sid for element in found for sid, _ in element.entries if sid]
        for head, *_ in found:
            if head.type == "part" and head.sid and head.sid not in self._here and head.sid not in self._elsewhere:
                resumed.append(head.sid)
        if not opened and not resumed:
            return
        member = self._member
        owners = await member.owners_of(resumed)
        await member.all_started()
        for sid in opened:
            owner = member.owner_of(sid)
            owners[sid] = self._new_owner() if owner is None else owner
        if len(self._here) > RECENT_SIDS:
            self._here.clear()
        for sid in (*opened, *resumed):
            if owners.get(sid, member.worker) == member.worker:
                self._elsewhere.pop(sid, None)
                self._here.add(sid)
            else:
                self._elsewhere[sid] = owners[sid]

    def _new_owner(self) -> int:
        """Return the worker for a new session: while this one drains, the same other one for all of this socket."""
        if (chosen := self._member.for_new(self._handshake.scope["path"])) == self._member.worker:
            return chosen
        if self._for_new is None or self._member.absent(self._for_new) is not None:
            self._for_new = chosen
        return self._for_new

    def _share(self, entries: Sequence[tuple[str, bytes]], here: list[bytes], there: dict[int, list[bytes]]) -> None:
        parts: dict[int | None, list[bytes]] = {}
        for sid, raw in entries:
            parts.setdefault(self._elsewhere.get(sid), []).append(raw)
        for owner, own in parts.items():
            (here if owner is None else there.setdefault(owner, [])).append(resume_of(own))

    async def _send(self, owner: int, envelopes: Sequence[bytes]) -> None:
        try:
            link = self._links.get(owner) or await self._connect(owner)
            await link.send((b"[" + b",".join(envelopes) + b"]").decode())
            self._member.relayed += 1
        except (OSError, TimeoutError, WebSocketException) as error:
            raise JournalUnavailable(
                f"worker {owner} of this server, which has the session, does not answer: try again", retry_after=1.0
            ) from error

    async def _refuse(self, shard: str, text: bytes) -> None:
        """Answer an envelope for sessions of a worker that has been drained: their sids name no shard, so that the
        reader of this worker would say that they are lost."""
        refusal = msgspec.json.encode(Misdirected(shard).to_wire())
        with suppress(*GONE):
            for element in await _split(text) or ():
                head: dict[str, Any] = {"sid": element.head.sid, **_address(text)}
                for each in [{"sid": sid} for sid, _ in element.entries] or [head]:
                    await self._socket.send_text(write_envelope({**each, "type": "error"}, refusal).decode())

    async def _connect(self, owner: int) -> ClientConnection:
        path = self._handshake.scope["raw_path"].decode("latin-1")
        headers = [
            (name, value)
            for name, value in passed_on(self._handshake)
            if name.lower() != "host" and not name.lower().startswith("sec-websocket-")
        ]
        host = self._handshake.headers.get("host", "fleet")
        link = await unix_connect(
            str(self._member.path_of(owner)),
            f"ws://{host}{path}",
            additional_headers=headers,
            subprotocols=[PROTOCOL_NAME],
            compression=None,
            max_size=LINK_BYTES,
            open_timeout=LINK_S,
            ping_interval=None,  # the kernel tells when the process at the other end has ended
            user_agent_header=None,
        )
        self._links[owner] = link
        pump = asyncio.create_task(self._pump(link))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)
        return link

    async def _pump(self, link: ClientConnection) -> None:
        with suppress(*GONE, WebSocketException):
            async for frame in link:
                await self._socket.send_text(frame if isinstance(frame, str) else frame.decode())
        with suppress(*GONE):
            await self._socket.close(SERVICE_RESTART)

    async def close(self) -> None:
        """Close the connections to other workers."""
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for link in self._links.values():
            link.transport.abort()
