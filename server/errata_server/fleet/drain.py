"""`Drain`: lets one worker of a fleet end once its sessions have; its data directory is free then (``errata fleet``).
It undoes that, too: a worker that still drains serves on, and one that has ended is started again.

A worker that drains gets no new sessions and serves those that it has. It stops when none has a connection or an
instance, so detached ones are waited for as long as they keep their instance; hibernated ones stay in the directory,
and go on when that is served again. Nothing of it is kept on disk: the next ``errata serve`` serves the directory.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errata_protocol.errors import InvalidRequest, JournalUnavailable

from ..runtime.data_lock import lock
from ..runtime.shard_name import shard_name
from ..serve.last_sessions import LastSessions
from .board import Phase
from .member import Member

log = logging.getLogger("errata.fleet")

DRAIN, UNDRAIN = "/fleet/drain", "/fleet/undrain"
"""Paths on which a worker is asked to drain one, or not to."""


def workers_of(member: Member) -> list[dict[str, Any]]:
    """Return what ``errata fleet`` shows of each worker."""
    board, plan = member.plan.board, member.plan
    return [
        {
            "shard": name,
            "directory": str(plan.directories[worker]),
            "state": member.state(worker),
            "sessions_left": board.left(worker) if board.phase(worker) is Phase.DRAINS else None,
            "drained": board.phase(worker) is Phase.ENDED,
        }
        for worker, name in enumerate(plan.names)
    ]


class Drain:
    """Drains the worker that it belongs to, and passes on what is asked of another one.

    Args:
        member: The worker.
        left: Returns how many sessions of the worker have a connection or an instance.
        stop: Stops the worker's process, after what still runs.
        now: Clock, seconds.
    """

    def __init__(
        self, member: Member, left: Callable[[], int], stop: Callable[[], None], now: Callable[[], float]
    ) -> None:
        self._member = member
        self._left = left
        self._stop = stop
        self._last = LastSessions(left, now)

    def _worker_of(self, shard: str) -> int:
        """Return the number of the worker of a shard.

        Raises:
            InvalidRequest: There is no such worker.
        """
        names = self._member.plan.names
        if shard not in names:
            raise InvalidRequest(f"no worker of this server has the shard {shard[:40]!r}: they are {', '.join(names)}")
        return names.index(shard)

    async def ask(self, shard: str) -> dict[str, Any]:
        """Begin to drain the worker of a shard, and return an empty answer.

        Raises:
            InvalidRequest: There is no such worker, it drains already, or no other one would serve.
            JournalUnavailable: It does not answer.
        """
        member, worker, board = self._member, self._worker_of(shard), self._member.plan.board
        match board.phase(worker):
            case Phase.DRAINS:
                raise InvalidRequest(f"{shard} drains already: {board.left(worker)} of its sessions are left")
            case Phase.ENDS | Phase.ENDED | Phase.RETURNS:
                raise InvalidRequest(
                    f"{shard} has been drained already, and is not served until the next start, or `errata fleet "
                    f"undrain {shard}`"
                )
        if worker != member.worker:
            return await member.ask(worker, DRAIN, {"shard": shard})
        self._begin()
        return {}

    def _begin(self) -> None:
        """Take no new sessions.

        Raises:
            InvalidRequest: No other worker would serve. Of two that are asked at once, each sees the other.
        """
        board, worker = self._member.plan.board, self._member.worker
        board.drain(worker, Phase.DRAINS, self._left())
        others = (other for other in range(board.workers) if other != worker)
        if not any(board.phase(other) is Phase.SERVES for other in others):
            board.drain(worker, Phase.SERVES, 0)
            raise InvalidRequest(
                f"{self._member.plan.names[worker]} is the last shard that takes new sessions: stop the server instead"
            )
        log.info("drains: this worker takes no new sessions, and ends after the %d that it has", board.left(worker))

    async def undo(self, shard: str) -> dict[str, Any]:
        """Let the worker of a shard serve again, and return an empty answer; one that has ended is then started.

        Raises:
            InvalidRequest: There is no such worker, it is not drained, it is ending, or its directory is another's.
            JournalUnavailable: It does not answer.
        """
        member, worker, board = self._member, self._worker_of(shard), self._member.plan.board
        match board.phase(worker):
            case Phase.SERVES:
                raise InvalidRequest(f"{shard} is not drained: it serves, and there is nothing to undo")
            case Phase.DRAINS if worker == member.worker:
                board.drain(worker, Phase.SERVES, 0)
                self._last.forget()
                log.info("does not drain any more: this worker takes new sessions again")
            case Phase.DRAINS:
                return await member.ask(worker, UNDRAIN, {"shard": shard})
            case Phase.ENDS:
                raise InvalidRequest(f"{shard} is ending: ask again once `errata fleet workers` shows it as drained")
            case Phase.ENDED if member.worker != (first := member.served[0]):
                return await member.ask(first, UNDRAIN, {"shard": shard})  # one at a time changes what nobody else does
            case Phase.ENDED:
                await asyncio.to_thread(_check_kept, member.plan.directories[worker], shard)
                if board.phase(worker) is Phase.ENDED:
                    board.drain(worker, Phase.RETURNS, 0)
        return {}

    def beaten(self) -> None:
        """Called after each heartbeat: note how many sessions are left, and stop where none has been for `QUIET_S`."""
        board, worker = self._member.plan.board, self._member.worker
        if board.phase(worker) is not Phase.DRAINS or (left := self._last.count()) is None:
            return
        board.drain(worker, Phase.DRAINS, left)
        if self._last.are_over:
            board.drain(worker, Phase.ENDS, 0)
            log.info("drained: no session is left, and this worker ends")
            self._stop()

    def trouble(self) -> str | None:
        """Return why the worker is to be given no new work; None while it serves."""
        phase = self._member.plan.board.phase(self._member.worker)
        return None if phase is Phase.SERVES else "it is drained, and takes no new sessions"


def _check_kept(directory: Path, shard: str) -> None:
    """Refuse to serve a directory again that has been moved, or that somebody else uses.

    Raises:
        InvalidRequest: The directory has another name, or none, or is in use.
    """
    try:
        if shard_name(directory) != shard:
            raise InvalidRequest(
                f"{directory} does not have the shard {shard} any more: move it back there, or start the server again"
            )
        os.close(lock(directory))
    except JournalUnavailable as error:
        raise InvalidRequest(f"{shard} cannot be served again: {error.message}") from error
