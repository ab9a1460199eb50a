"""`SessionTable`: the sessions that this process holds, by id."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from .session import Session


@dataclass(eq=False, slots=True)
class _Search:
    outdated: set[str] = field(default_factory=set)


class SessionTable:
    """The sessions of one environment that are in memory.

    Attributes:
        live: Sessions that have an instance or a socket, or are about to.
        asleep: Sessions without an instance that a request still refers to, by weak references: while one is in use,
            every lookup finds the same object.
        detached: Sessions whose socket is gone, longest detached first.
    """

    def __init__(self) -> None:
        self.live: dict[str, Session] = {}
        self.asleep: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
        self.detached: dict[str, Session] = {}
        self._searches: dict[str, list[_Search]] = {}

    def get(self, sid: str) -> Session | None:
        """Return the session in memory with this id, of any owner; None if there is none."""
        return self.live.get(sid) or self.asleep.get(sid)

    def hold(self, session: Session) -> None:
        """Keep a session in memory, because it has a socket or an instance, or is about to."""
        if not session.closed:
            self.live[session.sid] = session

    def let_sleep(self, session: Session) -> None:
        """Keep only a weak reference to a session, because its row describes it fully."""
        self.forget(session)
        self.asleep[session.sid] = session

    def forget(self, session: Session) -> None:
        """Remove a session that is over, dormant, or failed to open."""
        for timer in session.timers:
            timer.cancel()
        session.timers.clear()  # they refer to the session
        if self.live.get(session.sid) is session:
            del self.live[session.sid]
        if self.asleep.get(session.sid) is session:
            del self.asleep[session.sid]
        self.detached.pop(session.sid, None)
        for search in self._searches.get(session.sid, ()):
            search.outdated.add(session.sid)

    @contextlib.contextmanager
    def search(self, sids: Collection[str]) -> Iterator[set[str]]:
        """Yield a set that collects those of ``sids`` that are removed from the table during the block.

        Their rows have to be read again: a row with status "open", read before a session ended and used afterwards,
        would continue the session.
        """
        search = _Search()
        for sid in sids:
            self._searches.setdefault(sid, []).append(search)
        try:
            yield search.outdated
        finally:
            for sid in sids:
                self._searches[sid].remove(search)
                if not self._searches[sid]:
                    del self._searches[sid]
