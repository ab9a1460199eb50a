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
from typing import Protocol

import msgspec
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import WebSocketException

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.errors import JournalUnavailable
from errata_protocol.json_text import elements

from ..doors.session_socket import GONE
from .origin import passed_on

log = logging.getLogger("errata.fleet")

LINK_S = 30.0
"""How long a worker has to accept a connection, seconds: it may be starting again."""

LINK_BYTES = 64 * 1024**2
"""Largest frame between workers, bytes: as large as clients may send."""

SERVICE_RESTART = 1012
"""WebSocket close code of a client's socket where a worker that has some of its sessions has ended."""


class Head(msgspec.Struct, gc=False):
    """What of an envelope says whose it is.

    Args:
        type: Type of the message.
        sid: Session that the message addresses; None where it addresses no single one.
    """

    type: str = ""
    sid: str | None = None


class _Entry(msgspec.Struct, gc=False):
    sid: str = ""


class _Resume(msgspec.Struct, gc=False):
    data: list[msgspec.Raw]


_HEADS = msgspec.json.Decoder(list[Head])
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_HEAD = msgspec.json.Decoder(Head)
_RESUME = msgspec.json.Decoder(_Resume)
_ENTRY = msgspec.json.Decoder(_Entry)

Element = tuple[Head, bytes]


def split(frame: bytes) -> list[Element] | None:
    """Return the envelopes of a frame, each with its text; None for a frame that its reader refuses."""
    try:
        if frame.lstrip(b" \t\r\n")[:1] != b"[":
            return [(_HEAD.decode(frame), frame)]
        return [(head, bytes(raw)) for head, raw in zip(_HEADS.decode(frame), _RAWS.decode(frame), strict=True)]
    except (msgspec.DecodeError, RecursionError):
        return _split_slowly(frame)


def _split_slowly(frame: bytes) -> list[Element] | None:
    """Split a frame that msgspec refuses: one with half of a surrogate pair is JSON all the same."""
    try:
        texts = elements(frame) if frame.lstrip(b" \t\r\n")[:1] == b"[" else [frame]
        return [(msgspec.convert(json.loads(text), Head), text) for text in texts]
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None


def resumed(text: bytes) -> list[Element]:
    """Return the sessions of a resume, each with the text of its entry; none for one that its reader refuses."""
    try:
        return [(Head("resume", _ENTRY.decode(raw).sid), bytes(raw)) for raw in _RESUME.decode(text).data]
    except (msgspec.DecodeError, RecursionError):
        return []


def resume_of(entries: Sequence[bytes]) -> bytes:
    """Return a resume with these entries."""
    return b'{"type":"resume","data":[' + b",".join(entries) + b"]}"


class Owners(Protocol):
    """Knows whose sessions are; `errata_server.fleet.member.Member` is one."""

    worker: int
    """This worker."""

    async def all_started(self) -> None:
        """Wait until each worker has started once."""

    def owner_of(self, sid: str) -> int | None:
        """Return the worker of a session that is new or known; None for others."""

    async def owners_of(self, sids: Sequence[str]) -> dict[str, int]:
        """Return the workers of sessions; raise JournalUnavailable where one that may have them does not answer."""

    def path_of(self, worker: int) -> Path:
        """Return where a worker's Unix socket is."""


class Relay:
    """The relay of one socket.

    Args:
        member: This worker.
        socket: The client's socket.
        handshake: The same socket, with the headers of its handshake.
    """

    def __init__(self, member: Owners, socket: WebSocket, handshake: HTTPConnection) -> None:
        self._member = member
        self._socket = socket
        self._handshake = handshake
        self._elsewhere: dict[str, int] = {}
        self._links: dict[int, ClientConnection] = {}
        self._pumps: set[asyncio.Task[None]] = set()

    async def take(self, frame: bytes | str) -> bytes | str | None:
        """Pass on what is of other workers; return what is left for this one, None where nothing is.

        Raises:
            JournalUnavailable: Another worker does not answer.
        """
        text = frame.encode() if isinstance(frame, str) else frame
        found = split(text)
        if found is None:
            return frame
        attached = [head.sid for head, _ in found if head.type == "open" and head.sid]
        resumes = [
            sid for head, raw in found if head.type == "resume" for entry, _ in resumed(raw) if (sid := entry.sid)
        ]
        if attached or resumes:
            await self._find(attached, resumes)
        if not self._elsewhere:
            return frame
        here: list[bytes] = []
        there: dict[int, list[bytes]] = {}
        for head, raw in found:
            if head.type == "resume" and (entries := resumed(raw)):
                self._share(entries, here, there)
                continue
            owner = self._elsewhere.get(head.sid) if head.sid is not None else None
            (here if owner is None else there.setdefault(owner, [])).append(raw)
        for owner, envelopes in there.items():
            await self._send(owner, envelopes)
        if not there:
            return frame
        return b"[" + b",".join(here) + b"]" if here else None

    async def _find(self, opened: Sequence[str], resumed: Sequence[str]) -> None:
        """Find out who has the sessions that are opened or resumed.

        One that is opened is new, unless the board has its sid: an open is only sent again while its client waits for
        the answer. One that is resumed may be older than what the board has.
        """
        member = self._member
        owners = await member.owners_of(resumed)
        await member.all_started()
        owners |= {sid: owner for sid in opened if (owner := member.owner_of(sid)) is not None}
        for sid in (*opened, *resumed):
            if owners.get(sid, member.worker) == member.worker:
                self._elsewhere.pop(sid, None)
            else:
                self._elsewhere[sid] = owners[sid]

    def _share(self, entries: Sequence[Element], here: list[bytes], there: dict[int, list[bytes]]) -> None:
        parts: dict[int | None, list[bytes]] = {}
        for entry, raw in entries:
            parts.setdefault(self._elsewhere.get(entry.sid or ""), []).append(raw)
        for owner, own in parts.items():
            (here if owner is None else there.setdefault(owner, [])).append(resume_of(own))

    async def _send(self, owner: int, envelopes: Sequence[bytes]) -> None:
        try:
            link = self._links.get(owner) or await self._connect(owner)
            await link.send((b"[" + b",".join(envelopes) + b"]").decode())
        except (OSError, TimeoutError, WebSocketException) as error:
            raise JournalUnavailable(
                f"worker {owner} of this server, which has the session, does not answer: try again", retry_after=1.0
            ) from error

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
