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
        live: Those that have an instance or a socket, or are about to.
        asleep: Those without an instance that some request still holds. The table does not keep them, their rows are
            enough; as long as one is held, every lookup finds the same object.
        detached: Those whose socket is gone, in the order of their detaching.
    """

    def __init__(self) -> None:
        self.live: dict[str, Session] = {}
        self.asleep: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
        self.detached: dict[str, Session] = {}
        self._searches: dict[str, list[_Search]] = {}

    def get(self, sid: str) -> Session | None:
        """Return the session of an id, of any principal; None where only its row may exist."""
        return self.live.get(sid) or self.asleep.get(sid)

    def hold(self, session: Session) -> None:
        """Keep a session in memory: it has a socket or an instance, or is about to."""
        if not session.closed:
            self.live[session.sid] = session

    def let_sleep(self, session: Session) -> None:
        """Keep a session only as long as others hold it: its row holds all that is to be known."""
        self.forget(session)
        self.asleep[session.sid] = session

    def forget(self, session: Session) -> None:
        """Remove a session that is over, sleeps, or never began."""
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
        """Watch sessions while their rows are read; those in the yielded set were forgotten meanwhile.

        The rows of these have to be read again. A row that says "open" may be read before a session ends and be used
        after it: the session would go on.
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
