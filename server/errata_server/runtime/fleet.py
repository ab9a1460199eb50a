"""`Fleet`: what a runtime needs of the other workers, where several processes are behind one address.

`errata_server.fleet` implements it. A runtime of one process has none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, NamedTuple, Protocol

from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket

from errata_protocol.capabilities import ServerLimits
from errata_protocol.fleet import FleetMember

from ..journal.base import DeliveryRow, RewardRow
from .capacity import Capacity
from .lineage import Lineage
from .ownership import ForkParent

PASSED_ON = "errata_fleet"
"""Key of the scope of a request or a socket that another worker has passed on: it is answered here."""


class DeliveredState(NamedTuple):
    """A delivery of another worker's episode.

    Args:
        eid: Episode of the delivery.
        t: Index of the delivery.
        kind: Kind of the delivery, as on the wire.
        digest: Digest of the payload, as on the wire.
        payload: P_t.
    """

    eid: str
    t: int
    kind: Literal["reset", "step", "mcp"]
    digest: str
    payload: bytes


class SocketRelay(Protocol):
    """Passes the frames of one multiplexed socket to the workers that have its sessions."""

    async def take(self, frame: bytes | str) -> bytes | str | None:
        """Pass on what is of other workers; return what is left for this one, None where nothing is.

        Raises:
            ErrataError: Another worker does not answer. The socket has to be closed, so that its client resumes.
        """

    async def close(self) -> None:
        """Close the connections to other workers."""


class EpisodesElsewhere(Protocol):
    """Episodes of other workers that sessions of this one continue or ask about, and their forks at other workers.

    Each method but `has` raises JournalUnavailable where another worker does not answer.
    """

    def has(self, eid: str) -> bool:
        """Return whether an episode is another worker's, by its id alone."""

    def parent(
        self, eid: str, t: int, principal: str | None, key: str | None
    ) -> AbstractAsyncContextManager[ForkParent]:
        """Return the parent of a fork. It is kept while the context is entered, and then for the fork, if it is there.

        Args:
            eid: Episode of another worker.
            t: Index of the delivery.
            principal: Owner of the episode.
            key: Read key that has to open the episode; None for a reader that reads all of its principal's.

        Raises:
            UnknownEpisode: There is no such episode of this principal, or the key does not open it.
            StateOutOfRange: The episode has no delivery ``t``.
            NoReset: ``t`` is 0 and the episode began without a reset.
            Misdirected: The delivery's snapshot has layers of a sandbox, which are that worker's.
        """

    async def lineage(self, eid: str, t: int, whole_session: bool) -> Lineage:
        """Return what `errata_server.runtime.lineage.lineage` returns of another worker's journal."""

    async def recorded(self, eid: str, t: int) -> list[DeliveryRow]:
        """Return a delivery of another worker's episode, and the errors that followed it."""

    async def rewards(self, eid: str, principal: str | None, key: str | None) -> list[RewardRow]:
        """Return the late rewards of another worker's episode.

        Args:
            eid: The episode.
            principal: Owner of the episode.
            key: Read key that has to open the episode; None for a reader that reads all of its principal's.

        Raises:
            UnknownEpisode: There is no such episode of this principal, or the key does not open it.
        """

    def deleting(self, eid: str) -> AbstractAsyncContextManager[bool]:
        """Return whether an episode of this worker has a fork at another one; while entered, none can be made there."""


class Fleet(Protocol):
    """The other workers, as one worker sees them."""

    @property
    def elsewhere(self) -> EpisodesElsewhere:
        """Episodes of other workers."""

    def members(self) -> Sequence[FleetMember]:
        """Return all workers as they are now, this one among them."""

    def took(self, sid: str) -> None:
        """Note that a multiplexed session is this worker's; called before its row is committed."""

    def capacity(self, environment: str, limit: int | None) -> Capacity:
        """Return the capacity of an environment, which counts the instances of all workers."""

    def principal_capacity(self, principal: str | None, limit: int | None) -> Capacity:
        """Return the capacity of a principal, which counts the instances of all workers."""

    def relay(self, socket: WebSocket, handshake: WebSocket, limits: ServerLimits) -> SocketRelay:
        """Return the relay of a multiplexed socket.

        Args:
            socket: The accepted socket.
            handshake: The same socket, with the headers of its handshake.
            limits: Bounds of the socket's frames.
        """

    async def state_at(self, eid: str, t: int, asked_on: HTTPConnection) -> DeliveredState | None:
        """Read a delivery of another worker's episode; return None if the episode is this worker's, or none's.

        Args:
            eid: The episode.
            t: Index of the delivery.
            asked_on: The handshake of the socket that it is asked for on: the worker checks its reader.

        Raises:
            ErrataError: The worker refuses it, or does not answer.
        """

    def closes_groups(self, environment: str, close: Callable[[str, str | None], Awaitable[int]]) -> None:
        """Add what closes an environment's open sessions of a group and principal here, and returns how many."""

    async def close_group(self, environment: str, group: str, principal: str | None) -> int:
        """Close a group's open sessions at the other workers; return how many they were.

        Raises:
            JournalUnavailable: Another worker does not answer.
        """
