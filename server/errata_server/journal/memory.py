"""`MemoryJournal`: for tests, and for an app without a data directory; nothing survives the process.

Above a limit of bytes it forgets the closed sessions that are oldest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from errata_protocol.errors import ErrataError, JournalUnavailable

from .base import Record, SessionRow, Settled
from .claims import check
from .tables import ROW_BYTES, Tables, all_are_repeated


class MemoryJournal(Tables):
    """Keeps whole sessions up to a size, then forgets the oldest closed ones with their episodes. Open ones stay.

    Args:
        max_bytes: Bytes to keep: payload, request and state, and `errata_server.journal.tables.ROW_BYTES` a row.
        repeats_requests: As in `errata_server.journal.tables.Tables`.
    """

    durable = False

    def __init__(
        self, *, max_bytes: int = 256 * 1024**2, repeats_requests: Callable[[str], bool] = all_are_repeated
    ) -> None:
        super().__init__(repeats_requests)
        self._max_bytes = max_bytes
        self._forget_over = max_bytes  # grows where all that is kept is open: else each commit would look through it
        self._closed = False

    @property
    def failing(self) -> str | None:
        return None

    def submit(
        self,
        records: Sequence[Record],
        settled: Settled,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if self._closed:
            raise JournalUnavailable("the journal is closed: the server is shutting down")
        try:
            check(records, self, set())
        except ErrataError as error:
            settled(records, error)
            return
        for record in records:
            self._apply(record)
        if self._bytes > self._forget_over:
            self._forget()
            self._forget_over = max(self._max_bytes, self._bytes * 9 // 8)
        settled(records, None)

    def delete_episode(self, eid: str, *, unless_forked: bool = False) -> int:
        return 0 if unless_forked and self._children[eid] else self._delete(eid)

    def _forget(self) -> None:
        for session in list(self._sessions.values()):
            if self._bytes <= self._max_bytes * 3 // 4:
                return
            if session.status != "open":
                self._forget_session(session)

    def _forget_session(self, session: SessionRow) -> None:
        for eid in list(self._episodes_of.get(session.sid, ())):
            self._delete(eid)
        del self._sessions[session.sid]
        self._bytes -= ROW_BYTES * (1 + len(self._replies.pop(session.sid, ())))
        self._last_ids.pop(session.sid, None)
        self._last_seqs.pop(session.sid, None)
        if session.fork_request is not None:
            del self._forks[session.fork_of, session.fork_request]

    def close(self) -> None:
        self._closed = True
