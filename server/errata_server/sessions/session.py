"""`Session`, and the `Request` and `Reply` that a door exchanges with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace
from openenv.core.env_server.types import Action

from errata_protocol.errors import SessionLost, SessionUnknown
from errata_protocol.labels import NO_LABELS, Labels

from ..concurrency.fair_lock import FairLock, Held
from ..environments.host import EnvHost
from ..journal.base import DeliveryRow, RecordKind, SessionRow
from ..recovery import RecoveryClass, recovery_class
from ..runtime.capacity import Capacity
from ..runtime.rows import Admitted, wire_digest

McpCall = Callable[[EnvHost], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Address:
    """The id and key of a multiplexed session, which its client chose.

    Args:
        sid: Session id as journaled; never equal to that of a plain session (PROTOCOL D13).
        key_hash: Hash of the key, 32 bytes; the key itself is not kept.
        group: Group of sessions that are closed together.
    """

    sid: str
    key_hash: bytes
    group: str | None


_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


class Request(Struct, frozen=True, gc=False):
    """A mutating request as a door passes it on.

    Args:
        kind: reset, step or mcp.
        data: Request bytes as journaled.
        reset: Arguments of a reset.
        action: Validated action of a step.
        call: Function that runs a tools/call on the environment and returns the JSON-RPC response.
        id: Request id, None on plain sockets. A door that sets it journals failures under this id.
        sha: sha256 of the request as received; None to compute it from ``data``.
        timeout_s: Deadline of the request in seconds; applies if shorter than the server's.
        labels: Labels of the episode that a reset begins, in place of the session's.
    """

    kind: RecordKind
    data: bytes
    reset: Mapping[str, Any] = _NO_ARGUMENTS
    action: Action | None = None
    call: McpCall | None = None
    id: int | None = None
    sha: bytes | None = None
    timeout_s: float | None = None
    labels: Labels = NO_LABELS


if TYPE_CHECKING:

    class Committed(DeliveryRow, frozen=True):
        """A committed delivery: may become a session's position, and may be sent to a client."""

else:  # one class at run time; `commits` makes the difference, and mypy 2.4 fails on a NewType of a Struct
    Committed = DeliveryRow


class Reply(Struct, frozen=True, gc=False):
    """A committed delivery as a door sends it: the exact payload and its position."""

    eid: str
    t: int
    payload: bytes
    digest: str

    @classmethod
    def of(cls, row: Committed) -> Reply:
        """Create the reply from a committed delivery."""
        if row.t is None:
            raise ValueError(f"a {row.kind} without t is no delivery")
        return cls(row.eid, row.t, row.payload, wire_digest(row.digest))


class Session:
    """A client's session, with an environment instance while it is awake.

    Position (``eid``, ``t``) and instance change only while `lock` is held: methods that change them take its `Held`.

    Args:
        row: Its journal row.
        committed: Whether the row is committed.
        capacity: Capacity that counts its instance.

    Attributes:
        naming: Held by a request with a ``request_id`` from the lookup of the id until its reply is in the journal. An
            error is committed after `lock` was released.
        resumable: Whether the session outlives its socket and a client can attach to it again, because its id was
            given out (PROTOCOL A3). Any other session ends with its socket.
        failed_reset: The last reset that failed, with the seed and episode id that it ran with; a door that journals
            failures itself needs them.
        failed_once: Id and digest of the last request that a defect of the server ended; it is run again only once.
    """

    def __init__(self, row: SessionRow, *, committed: bool, capacity: Capacity) -> None:
        self.row = row
        self.committed = committed
        self.capacity = capacity
        self.lock = FairLock()
        self.naming = FairLock()
        self._host: EnvHost | None = None
        self._opening = False
        self.eid: str | None = None
        self.t: int | None = None
        self.resumable = row.given_out
        self.last_used = row.created
        self.attached: object | None = None
        self.was_attached = False
        self.detached_at: object | None = None
        self.timers: list[asyncio.TimerHandle] = []
        self.lost: str | None = None
        self.failed_reset: Admitted | None = None
        self.failed_once: tuple[int, bytes] | None = None
        self.closing = False
        self.closed = False

    def as_run(self, admitted: Admitted) -> Admitted:
        """Return a request that failed as the journal is to hold it.

        A reset has what the server drew for it, because re-execution runs it again. Its digest stays that of the
        request as received.
        """
        failed = self.failed_reset
        if failed is None or (failed.id, failed.request_sha) != (admitted.id, admitted.request_sha):
            return admitted
        return replace(admitted, request=failed.request)

    def advance(self, held: Held, row: Committed) -> None:
        """Set the session's position to a committed delivery."""
        self.committed = True
        self.eid, self.t = row.eid, row.t

    def take_host(self, held: Held) -> EnvHost | None:
        """Remove the instance from the session and return it; the caller closes it."""
        host, self.host = self._host, None
        return host

    @property
    def usable_host(self) -> EnvHost | None:
        """The instance, if it can run a call now; otherwise None."""
        host = self._host
        return None if host is None or host.gone or self.lost is not None or self.closed else host

    def check_alive(self) -> None:
        """Raise if the session is over.

        Raises:
            SessionLost: The session is lost.
            SessionUnknown: The session was closed.
        """
        if self.lost is not None:
            raise SessionLost(self.lost, eid=self.eid, t=self.t)
        if self.closed:
            raise SessionUnknown("this session was closed: open another")

    @property
    def host(self) -> EnvHost | None:
        """The environment instance; None while the session is dormant."""
        return self._host

    @host.setter
    def host(self, host: EnvHost | None) -> None:
        held = self._holds
        self._host = host
        self.capacity.used += self._holds - held

    @property
    def opening(self) -> bool:
        """Whether the instance is being created; it already counts in the capacity."""
        return self._opening

    @opening.setter
    def opening(self, opening: bool) -> None:
        held = self._holds
        self._opening = opening
        self.capacity.used += self._holds - held

    @property
    def _holds(self) -> bool:
        return self._opening or self._host is not None

    @property
    def sid(self) -> str:
        """The session id: a capability, never logged."""
        return self.row.sid

    def lost_message(self, why: str) -> str:
        """Return a message that this session is lost, why, and what can still be read."""
        if self.eid is None:
            return f"this session is lost: {why}, before any delivery; open another"
        return f"this session is lost: {why}; its last delivery is t={self.t} of episode {self.eid}, still readable"

    def is_of(self, row: SessionRow) -> bool:
        """Return whether a journal row belongs to this session, and not to another one opened under the same sid."""
        own = self.row
        return self.committed or (own.seed, own.created, own.key_hash) == (row.seed, row.created, row.key_hash)

    @property
    def multiplexed(self) -> bool:
        """Whether it is a session of multiplexed sockets, addressed only by sid and key."""
        return self.row.key_hash is not None

    @property
    def recovery(self) -> RecoveryClass:
        """The recovery class that was announced to the client."""
        return recovery_class(self.row.recovery)

    @property
    def recoverable(self) -> bool:
        """Whether its instance can be closed and later restored to the last commit."""
        return recovery_class(self.row.recovery).survives_restart  # as `recovery`; this is on the path of every step
