"""`Session`, and the `Request` and `Reply` that pass between a door and it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from openenv.core.env_server.types import Action

from errata_protocol.environment import Recovery

from ..concurrency.fair_lock import Turnstile
from ..environments.host import EnvHost
from ..journal.base import RecordKind, SessionRow
from ..runtime.capacity import Room

McpCall = Callable[[EnvHost], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Address:
    """Of a multiplexed session, as its client chose it.

    Args:
        sid: As journaled: no plain session can have it (PROTOCOL D13).
        key_hash: All that is kept of its key, 32 bytes.
        group: Sessions that end together.
    """

    sid: str
    key_hash: bytes
    group: str | None


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Request(Struct, frozen=True):
    """A mutating request as a door hands it over.

    Args:
        kind: reset, step or mcp.
        data: Request bytes as journaled.
        reset: Arguments of a reset.
        action: Validated action of a step.
        call: What a tools/call does with the environment; returns the JSON-RPC response.
        id: Request id, None on plain sockets. Who gave one records the outcome of a failure under it.
        sha: sha256 of the request as received, where it is known.
        timeout_s: Deadline of its own, below the server's.
    """

    kind: RecordKind
    data: bytes
    reset: Mapping[str, Any] = _NOTHING
    action: Action | None = None
    call: McpCall | None = None
    id: int | None = None
    sha: bytes | None = None
    timeout_s: float | None = None


class Reply(Struct, frozen=True, gc=False):
    """A committed delivery: the exact payload and where it stands."""

    eid: str
    t: int
    payload: bytes
    digest: str


_NOT_RECOVERABLE = Recovery.NONE.value  # comparing with a member of an enumeration costs ten times as much


class Session:
    """One environment instance over time. Position and host change only while `turn` is held.

    Args:
        row: As journaled, or to be.
        committed: The journal has it.
        room: Where its instance is counted.
    """

    def __init__(self, row: SessionRow, *, committed: bool, room: Room) -> None:
        self.row = row
        self.committed = committed
        self.room = room
        self.turn = Turnstile()
        self._host: EnvHost | None = None
        self._opening = False
        self.eid: str | None = None
        self.t: int | None = None
        self.given_out = row.given_out
        self.last_used = row.created
        self.attached: object | None = None
        self.was_attached = False
        self.detached_at: object | None = None
        self.timers: list[asyncio.TimerHandle] = []
        self.lost: str | None = None
        self.closing = False
        self.closed = False

    @property
    def host(self) -> EnvHost | None:
        """Its environment instance; None while it sleeps."""
        return self._host

    @host.setter
    def host(self, host: EnvHost | None) -> None:
        held = self._holds
        self._host = host
        self.room.used += self._holds - held

    @property
    def opening(self) -> bool:
        """Its instance is being made; the place is taken already."""
        return self._opening

    @opening.setter
    def opening(self, opening: bool) -> None:
        held = self._holds
        self._opening = opening
        self.room.used += self._holds - held

    @property
    def _holds(self) -> bool:
        return self._opening or self._host is not None

    @property
    def sid(self) -> str:
        """The session id: a capability, never logged."""
        return self.row.sid

    def lost_message(self, why: str) -> str:
        """Say that this session is lost, why, and what of it can still be read."""
        if self.eid is None:
            return f"this session is lost: {why}, before any delivery; open another"
        return f"this session is lost: {why}; its last delivery is t={self.t} of episode {self.eid}, still readable"

    def is_of(self, row: SessionRow) -> bool:
        """Whether a journal row is this session's own, and not of another one that was opened under the same sid."""
        mine = self.row
        return self.committed or (mine.seed, mine.created, mine.key_hash) == (row.seed, row.created, row.key_hash)

    @property
    def multiplexed(self) -> bool:
        """A client addresses it by sid and key on a multiplexed socket, and nothing else does."""
        return self.row.key_hash is not None

    @property
    def recoverable(self) -> bool:
        """It can be closed and continued later from its last commit."""
        return self.row.recovery != _NOT_RECOVERABLE
