"""`RecordedEpisode`: an episode that another process played, read from its record and forked by its key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from errata_protocol.errors import InvalidRequest
from errata_protocol.labels import Labels

from .playing import EpisodeRunner, Session
from .record import EpisodeRecord, RecordHolder


class RecordedEpisode(RecordHolder):
    """An episode whose session is not here.

    Args:
        record: Record that the other process made.
        connect: Makes a client of the same environment, for each fork: it takes a session beside the fork's.
    """

    def __init__(self, record: EpisodeRecord, connect: Callable[[], Session]) -> None:
        super().__init__(record)
        self._connect = connect

    def finish(self) -> float | None:
        """Return the recorded reward; None for an episode that was lost or never began."""
        return self.record.reward()

    def fork(self, t: int) -> EpisodeRunner:
        """Return a runner at a fork of the episode after delivery ``t``. Close it after use.

        Raises:
            InvalidRequest: The episode never began.
            NotSupported: The environment cannot be forked.
            ErrataError: The server cannot fork it now.
            ConnectionError: The server cannot be reached.
        """
        if self.eid is None:
            raise InvalidRequest("the episode never began, so it cannot be forked")
        parent = self._connect()
        try:
            session = _ForkedSession(parent.fork(t, eid=self.eid), parent)
        except BaseException:
            parent.close()
            raise
        return EpisodeRunner.at(self.environment, session, self.task)


class _ForkedSession:
    """A fork's session, with the one that asked for the fork: a client closes its forks when it is closed.

    Args:
        session: Session of the fork.
        parent: Session that is closed with it.
    """

    def __init__(self, session: Session, parent: Session) -> None:
        self._session, self._parent = session, parent

    @property
    def eid(self) -> str | None:
        """See `Session.eid`."""
        return self._session.eid

    @property
    def t(self) -> int | None:
        """See `Session.t`."""
        return self._session.t

    @property
    def labels(self) -> Labels:
        """See `Session.labels`."""
        return self._session.labels

    @labels.setter
    def labels(self, labels: Labels) -> None:
        self._session.labels = labels

    def fork(self, t: int, *, eid: str | None = None) -> Any:
        """See `Session.fork`."""
        return self._session.fork(t, eid=eid)

    def reset(self, **kwargs: Any) -> Any:
        """See `Session.reset`."""
        return self._session.reset(**kwargs)

    def step(self, action: Any) -> Any:
        """See `Session.step`."""
        return self._session.step(action)

    def close(self) -> None:
        """Close both."""
        try:
            self._session.close()
        finally:
            self._parent.close()
