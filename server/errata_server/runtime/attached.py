"""`Attached`: the sessions that have a connection now, for lists of episodes and those who follow them (PROTOCOL G)."""

from __future__ import annotations

from .changes import Changes


class Attached:
    """Sessions that have a connection. Their event loop changes it; any thread may read it.

    Args:
        changes: Where it is noted that a session lost its connection, or has one again.

    Attributes:
        known: Whether this process serves the sessions of the data directory; if not, nobody knows their connections.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self.known = False
        self._sids: set[str] = set()
        self._changed = self._copied = 0
        self._copy: frozenset[str] = frozenset()

    def add(self, sid: str, *, tell: bool) -> None:
        """Note that a session has a connection.

        Args:
            sid: The session's id as the journal has it.
            tell: Whether it has an episode whose status is now another one.
        """
        self._change(sid, True, tell)

    def discard(self, sid: str, *, tell: bool) -> None:
        """Note that a session has no connection any more; ``tell`` as in `add`. Idempotent."""
        self._change(sid, False, tell)

    def __len__(self) -> int:
        """Return how many sessions have a connection."""
        return len(self._sids)

    def now(self) -> frozenset[str] | None:
        """Return the ids of all sessions that have a connection, as the journal has them; None where nobody knows.

        The copy is made on the reader's thread, and kept until something changes. It needs no lock: copying a set of
        texts runs no Python code, so the event loop cannot change it meanwhile.
        """
        if not self.known:
            return None
        changed = self._changed
        if changed != self._copied:
            self._copy, self._copied = frozenset(self._sids), changed
        return self._copy

    def _change(self, sid: str, attached: bool, tell: bool) -> None:
        if (sid in self._sids) == attached:
            return
        (self._sids.add if attached else self._sids.discard)(sid)
        self._changed += 1
        if tell:
            self._changes.attached(sid, attached)
