"""`Session`, and the `Request` and `Reply` that pass between a door and it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from openenv.core.env_server.types import Action

from errata_protocol.errors import SessionLost, SessionUnknown

from ..concurrency.fair_lock import FairLock, Turn
from ..environments.host import EnvHost
from ..journal.base import DeliveryRow, RecordKind, SessionRow
from ..recovery import RecoveryClass, recovery_class
from ..runtime.capacity import Capacity
from ..runtime.rows import wire_digest

McpCall = Callable[[EnvHost], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Address:
    """The id and key of a multiplexed session, which its client chose.

    Args:
        sid: As journaled: no plain session can have it (PROTOCOL D13).
        key_hash: All that is kept of its key, 32 bytes.
        group: Sessions that end together.
    """

    sid: str
    key_hash: bytes
    group: str | None


_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


class Request(Struct, frozen=True):
    """A mutating request as a door hands it over.

    Args:
        kind: reset, step or mcp.
        data: Request bytes as journaled.
        reset: Arguments of a reset.
        action: Validated action of a step.
        call: What a tools/call does with the environment; returns the JSON-RPC response.
        id: Request id, None on plain sockets. A door that gives one records a failure under it.
        sha: sha256 of the request as received, where it is known.
        timeout_s: Deadline of its own, below the server's.
    """

    kind: RecordKind
    data: bytes
    reset: Mapping[str, Any] = _NO_ARGUMENTS
    action: Action | None = None
    call: McpCall | None = None
    id: int | None = None
    sha: bytes | None = None
    timeout_s: float | None = None


if TYPE_CHECKING:

    class Committed(DeliveryRow, frozen=True):
        """A delivery that the journal has. A session may stand at it, and a client may be answered with it."""

else:  # one class at run time; `commits` makes the difference, and mypy 2.4 fails on a NewType of a Struct
    Committed = DeliveryRow


class Reply(Struct, frozen=True, gc=False):
    """A committed delivery: the exact payload and where it stands."""

    eid: str
    t: int
    payload: bytes
    digest: str

    @classmethod
    def of(cls, row: Committed) -> Reply:
        """Return the reply that a committed delivery is."""
        if row.t is None:
            raise ValueError(f"a {row.kind} without t is no delivery")
        return cls(row.eid, row.t, row.payload, wire_digest(row.digest))


class Session:
    """One environment instance over time.

    Position (``eid``, ``t``) and instance change only while `lock` is held: what changes them takes its `Turn`.

    Args:
        row: As journaled, or to be.
        committed: The journal has it.
        room: Where its instance is counted.
    """

    def __init__(self, row: SessionRow, *, committed: bool, room: Capacity) -> None:
        self.row = row
        self.committed = committed
        self.room = room
        self.lock = FairLock()
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

    def advance(self, turn: Turn, row: Committed) -> None:
        """Let the session stand at a delivery that was committed."""
        self.committed = True
        self.eid, self.t = row.eid, row.t

    def take_host(self, turn: Turn) -> EnvHost | None:
        """Return the instance and have none any more; the caller closes it."""
        host, self.host = self._host, None
        return host

    @property
    def usable_host(self) -> EnvHost | None:
        """Its instance, if that can take a call at once."""
        host = self._host
        return None if host is None or host.gone or self.lost is not None or self.closed else host

    def check_alive(self) -> None:
        """Refuse what is asked of a session that is over.

        Raises:
            SessionLost: It is lost.
            SessionUnknown: It was closed.
        """
        if self.lost is not None:
            raise SessionLost(self.lost, eid=self.eid, t=self.t)
        if self.closed:
            raise SessionUnknown("this session was closed: open another")

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
        """Whether its instance is being made; its place is taken already."""
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
        own = self.row
        return self.committed or (own.seed, own.created, own.key_hash) == (row.seed, row.created, row.key_hash)

    @property
    def multiplexed(self) -> bool:
        """A client addresses it by sid and key on a multiplexed socket, and nothing else does."""
        return self.row.key_hash is not None

    @property
    def recovery(self) -> RecoveryClass:
        """The recovery class that its client was promised."""
        return recovery_class(self.row.recovery)

    @property
    def recoverable(self) -> bool:
        """Whether it can be closed and continued later from its last commit."""
        return self.recovery.survives_restart
