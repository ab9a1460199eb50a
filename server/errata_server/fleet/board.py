"""`Board`: memory that the workers of a fleet share: heartbeats, connections, counts, who drains, and whose recent sids
are.

It belongs to the supervisor, so it outlives each worker. A worker writes to its own part only, so there are no locks,
and a worker that is killed or stopped blocks no other. Connections that are on their way from one worker to another are
numbers that each worker writes for itself: plus one by who sends, minus one by who takes.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from enum import IntEnum

from errata_protocol.errors import CapacityReached

BEAT_S = 0.1
"""Time between two heartbeats of an event loop, seconds."""

STALE_S = 1.0
"""Age of a heartbeat above which a worker gets no new connections, seconds."""

RECENT_SIDS = 65_536
"""Sids of each worker that the board knows: those that were opened last."""

COUNTS = 1024
"""Most counts of a worker: one for each environment and each principal."""


class Phase(IntEnum):
    """What a worker is asked to do: it serves, until it is drained (``errata fleet drain``)."""

    SERVES = 0
    """It gets new sessions."""

    DRAINS = 1
    """It gets no new sessions, and serves those that it has."""

    ENDS = 2
    """It has no sessions left, and stops: nothing is sent to it any more."""

    ENDED = 3
    """Its process has ended, and is not started again."""

    RETURNS = 4
    """Its process has ended, and the supervisor is to start it again (``errata fleet undrain``)."""


_NAME_BYTES = 8
_HEAD = struct.Struct("=dqqq")  # heartbeat, connections, whether it has started once, number of sids written
_DRAIN = struct.Struct("=qq")  # phase, sessions left
_COUNT = struct.Struct("=q")
_CONNECTIONS_AT = 8
_DRAIN_AT = _HEAD.size
_COUNTS_AT = _DRAIN_AT + _DRAIN.size
_COUNT_BYTES = _NAME_BYTES + _COUNT.size  # the name's hash, and the count
_SIDS_AT = _COUNTS_AT + COUNTS * _COUNT_BYTES
_PART = _SIDS_AT + RECENT_SIDS * _NAME_BYTES


class Board:
    """The shared memory. Make it before the workers are forked.

    Args:
        workers: Number of workers.
        now: Clock that is the same in all processes, seconds.
    """

    def __init__(self, workers: int, now: Callable[[], float] = time.monotonic) -> None:
        self.workers = workers
        self._now = now
        self._memory = mmap.mmap(-1, workers * (_PART + workers * _COUNT.size))
        self._key = secrets.token_bytes(16)  # a client cannot choose sids that look like another's

    # -- what a worker says of itself ---------------------------------------------------------------------------------

    def beat(self, worker: int, connections: int) -> None:
        """Write a worker's heartbeat and how many connections it has."""
        _, _, started, written = self._head(worker)
        _HEAD.pack_into(self._memory, worker * _PART, self._now(), connections, started, written)

    def tell(self, worker: int, connections: int) -> None:
        """Write how many connections a worker has."""
        _COUNT.pack_into(self._memory, worker * _PART + _CONNECTIONS_AT, connections)

    def pass_on(self, worker: int, to: int, connections: int) -> None:
        """Note that a worker has sent connections to another, or, less than none, has taken some that were sent there.

        Args:
            worker: Number of the worker that notes it.
            to: Number of the worker that they were sent to.
            connections: Number of connections.
        """
        at = self._passed_at(worker, to)
        _COUNT.pack_into(self._memory, at, _COUNT.unpack_from(self._memory, at)[0] + connections)

    def start(self, worker: int) -> None:
        """Note that a worker has started, and that its sids of earlier fleets are written."""
        beat, connections, _, written = self._head(worker)
        _HEAD.pack_into(self._memory, worker * _PART, beat, connections, 1, written)

    def drain(self, worker: int, phase: Phase, left: int) -> None:
        """Write a worker's phase; a worker that is started again goes on with it.

        `Phase.ENDED` is the supervisor's. `Phase.RETURNS` is another worker's, after that, and the supervisor's next.

        Args:
            worker: Number of the worker.
            phase: The worker's phase.
            left: Number of sessions that the worker waits for.
        """
        _DRAIN.pack_into(self._memory, worker * _PART + _DRAIN_AT, phase, left)

    def take_sid(self, worker: int, sid: str) -> None:
        """Note that a multiplexed session is a worker's. Called before the session's row is committed."""
        beat, connections, started, written = self._head(worker)
        at = worker * _PART + _SIDS_AT + written % RECENT_SIDS * _NAME_BYTES
        self._memory[at : at + _NAME_BYTES] = self._hash(sid)
        _HEAD.pack_into(self._memory, worker * _PART, beat, connections, started, written + 1)

    def count(self, worker: int, name: str, count: int) -> None:
        """Write a worker's part of a count that all workers have.

        Args:
            worker: Number of the worker.
            name: Name of the count.
            count: The worker's part.

        Raises:
            CapacityReached: The worker has `COUNTS` others.
        """
        sought, begin = self._hash(name), worker * _PART + _COUNTS_AT
        at = self._find(sought, begin, COUNTS, _COUNT_BYTES)
        if at is None:
            at = self._find(bytes(_NAME_BYTES), begin, COUNTS, _COUNT_BYTES)
            if at is None:
                raise CapacityReached(f"a worker counts at most {COUNTS} environments and principals together")
            self._memory[at : at + _NAME_BYTES] = sought
        _COUNT.pack_into(self._memory, at + _NAME_BYTES, count)

    def clear(self, worker: int) -> None:
        """Called by the supervisor when a worker has ended: it has no connections and counts. Its sids stay."""
        _, _, started, written = self._head(worker)
        _HEAD.pack_into(self._memory, worker * _PART, 0.0, 0, started, written)
        at = worker * _PART + _COUNTS_AT
        self._memory[at : at + COUNTS * _COUNT_BYTES] = bytes(COUNTS * _COUNT_BYTES)

    # -- what all read ------------------------------------------------------------------------------------------------

    def connections(self, worker: int) -> int:
        """Return how many connections a worker has, those on their way to it among them."""
        passed: int = sum(
            _COUNT.unpack_from(self._memory, self._passed_at(one, worker))[0] for one in range(self.workers)
        )
        return self._head(worker)[1] + passed

    def is_alive(self, worker: int) -> bool:
        """Return whether a worker's event loop has run within `STALE_S`."""
        return self.silent_s(worker) <= STALE_S

    def phase(self, worker: int) -> Phase:
        """Return the phase of a worker."""
        return Phase(self._drain(worker)[0])

    def left(self, worker: int) -> int:
        """Return how many sessions a worker that drains waits for."""
        return self._drain(worker)[1]

    def is_drained(self, worker: int) -> bool:
        """Return whether a worker has been drained: nothing may be sent to it any more."""
        return self._drain(worker)[0] >= Phase.ENDS

    def forgets_sids(self, worker: int) -> bool:
        """Return whether a worker has opened more sessions than the board knows."""
        return self._head(worker)[3] > RECENT_SIDS

    def silent_s(self, worker: int) -> float:
        """Return how long a worker's event loop has not run, seconds; a worker that does not run has no last time."""
        return self._now() - self._head(worker)[0]

    def stuck(self, longer_s: float) -> list[int]:
        """Return the workers that run, and whose event loop has not for longer than some seconds."""
        return [worker for worker in range(self.workers) if self._head(worker)[0] and self.silent_s(worker) > longer_s]

    @property
    def all_started(self) -> bool:
        """Whether each worker has started once, so that the sids of all are written."""
        return all(self._head(worker)[2] for worker in range(self.workers))

    def has_started(self, worker: int) -> bool:
        """Return whether a worker has started at least once."""
        return bool(self._head(worker)[2])

    def total(self, name: str) -> int:
        """Return a count of the whole fleet."""
        sought, total = self._hash(name), 0
        for worker in range(self.workers):
            at = self._find(sought, worker * _PART + _COUNTS_AT, COUNTS, _COUNT_BYTES)
            if at is not None:
                total += _COUNT.unpack_from(self._memory, at + _NAME_BYTES)[0]
        return total

    def owner_of(self, sid: str) -> int | None:
        """Return the worker that opened a multiplexed session; None where no worker has opened it recently."""
        sought = self._hash(sid)
        for worker in range(self.workers):
            written = min(self._head(worker)[3], RECENT_SIDS)
            if self._find(sought, worker * _PART + _SIDS_AT, written, _NAME_BYTES) is not None:
                return worker
        return None

    def place(self, me: int, choose: Callable[[Sequence[int], int], Sequence[int]] = random.sample) -> int:
        """Return the worker for a new connection: of two at random that are alive, the one with fewer connections.

        A worker that drains gets none.

        Args:
            me: The worker that has accepted it, which gets it where no other is alive.
            choose: Draws from a sequence.
        """
        serving = [worker for worker in range(self.workers) if self._drain(worker)[0] == Phase.SERVES]
        alive = [worker for worker in serving if worker == me or self.is_alive(worker)] or [me]
        return min(choose(alive, min(2, len(alive))), key=self.connections)

    def _passed_at(self, worker: int, to: int) -> int:
        return self.workers * _PART + (worker * self.workers + to) * _COUNT.size

    def _find(self, sought: bytes, begin: int, entries: int, entry_bytes: int) -> int | None:
        """Return the offset of an entry that begins with a hash; None where there is none."""
        end = begin + entries * entry_bytes
        at = self._memory.find(sought, begin, end)
        while at >= 0 and (at - begin) % entry_bytes:  # bytes of something else
            at = self._memory.find(sought, at + 1, end)
        return at if at >= 0 else None

    def _head(self, worker: int) -> tuple[float, int, int, int]:
        return _HEAD.unpack_from(self._memory, worker * _PART)

    def _drain(self, worker: int) -> tuple[int, int]:
        return _DRAIN.unpack_from(self._memory, worker * _PART + _DRAIN_AT)

    def _hash(self, name: str) -> bytes:
        return hashlib.blake2b(name.encode(), key=self._key, digest_size=_NAME_BYTES).digest()
