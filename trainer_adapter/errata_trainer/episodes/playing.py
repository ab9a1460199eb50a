"""Plays a student's episodes in an environment over one session, and records its calls (`EpisodeRecord`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

from errata_protocol.errors import CapacityReached, InvalidRequest
from errata_protocol.labels import Labels

from ..rollouts.deliveries import Delivery
from .record import FAILURES, LOST, EpisodeRecord, Played, RecordHolder, without_room
from .tools import PlayedEnvironment

log = logging.getLogger("errata.trainer")


class Session(Protocol):
    """The methods of a client that a runner uses; `errata_client.SyncErrataClient` has them."""

    labels: Labels
    """Labels of the episodes that the next resets begin."""

    @property
    def eid(self) -> str | None:
        """Key of the running episode."""
        ...

    @property
    def t(self) -> int | None:
        """Last delivery of the running episode."""
        ...

    def fork(self, t: int, *, eid: str | None = None) -> Any:
        """Return a new session that starts at delivery ``t`` of an episode."""
        ...

    def reset(self, **kwargs: Any) -> Any:
        """Start an episode; return a result with ``observation``, ``reward`` and ``done``."""
        ...

    def step(self, action: Any) -> Any:
        """Take a step; return a result like that of `reset`."""
        ...

    def close(self) -> None:
        """End the session."""
        ...


class Episode(Protocol):
    """An episode of a batch, as sites, pairs and checks read it: `EpisodeRunner`, or the record of one that was played
    in another process."""

    @property
    def environment(self) -> PlayedEnvironment:
        """Environment that was played."""
        ...

    @property
    def eid(self) -> str | None:
        """Key of the episode in the server's journal; None if it never began."""
        ...

    @property
    def opening(self) -> dict[str, Any]:
        """Decoded observation of the reset."""
        ...

    @property
    def played(self) -> list[Played]:
        """Calls of the episode, in order."""
        ...

    @property
    def task(self) -> dict[str, Any]:
        """Arguments that ``reset`` was given."""
        ...

    @property
    def lost(self) -> str | None:
        """Reason why the episode does not count; None if it does."""
        ...

    def finish(self) -> float | None:
        """Finish the episode if it is open, and return its reward; None for one that was lost or never began."""
        ...

    def deliveries(self) -> list[Delivery]:
        """Return the calls of the episode for `build_rollout`."""
        ...

    def fork(self, t: int) -> EpisodeRunner:
        """Return a runner at a fork of the episode after delivery ``t``. Close it after use."""
        ...


def worth_a_look(runners: Sequence[Episode]) -> str | None:
    """Return the eid of the episode with the most failing calls, of several that with the lowest reward; None without
    an episode. They are finished."""

    def failures(runner: Episode) -> tuple[int, float]:
        return -sum(call.marker is not None for call in runner.played), runner.finish() or 0.0

    begun = [runner for runner in runners if runner.eid is not None]
    return min(begun, key=failures).eid if begun else None


class EpisodeRunner(RecordHolder):
    """Plays one episode after the other in a session.

    Args:
        environment: Environment to play.
        connect: Makes the client, at the first reset and again after a session was lost.

    Attributes:
        record: Record of the running episode.
        labels: Labels of the episodes that the next resets begin; None leaves them to the client.
    """

    def __init__(self, environment: PlayedEnvironment, connect: Callable[[], Session]) -> None:
        super().__init__(EpisodeRecord(environment))
        self.labels: Labels | None = None
        self._connect = connect
        self._session: Session | None = None
        self._has_had_room = False

    @classmethod
    def at(cls, environment: PlayedEnvironment, session: Session, task: Mapping[str, Any]) -> Self:
        """Return a runner of the episode that a session is in already.

        Args:
            environment: Environment that is played.
            session: The session, which the runner closes.
            task: Task of the episode.
        """
        runner = cls(environment, lambda: session)
        runner._session = session
        runner.record.begin(task)
        runner.record.eid = session.eid
        return runner

    def fork(self, t: int) -> EpisodeRunner:
        """Return a runner at a fork of the running episode after delivery ``t``. Close it after use.

        Raises:
            InvalidRequest: No episode is running.
            NotSupported: The environment cannot be forked.
            ErrataError: The server cannot fork it now.
        """
        if self._session is None or self.eid is None:
            raise InvalidRequest("no episode is running that could be forked: reset first")
        return EpisodeRunner.at(self.environment, self._session.fork(t, eid=self.eid), self.task)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process needs: everything but the session.

        Raises:
            TypeError: An episode is running.
        """
        if self._session is not None and self.eid is not None and not (self.record.finished or self.done):
            raise TypeError(
                f"the episode {self.eid} of {self.environment.name} is running, and its session stays in this process: "
                "finish it first, or hand over the factory and play there"
            )
        return {**self.__dict__, "_session": None}

    def reset(self, task: Mapping[str, Any]) -> str:
        """Start an episode and return the text that the student reads; `LOST` if an infrastructure failure prevents it.

        Raises:
            InvalidRequest: The environment does not take such a task: an error of the caller, not of the student.
            CapacityReached: The server has no room for this runner's first session, and would have none in the next
                batch.
        """
        self.record.begin(task)
        try:
            if self._session is None:
                self._session = self._connect()
            self._has_had_room = True
            if self.labels is not None:
                self._session.labels = self.labels
            result = self._session.reset(**task)
        except InvalidRequest:
            raise
        except FAILURES as error:
            if isinstance(error, CapacityReached) and not self._has_had_room:
                raise without_room(error, self.environment) from error
            self.record.lose(error)
            self._drop()
            return LOST
        return self.record.opened(self._session.eid, result)

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the environment, and add the call to `played`.

        Returns:
            The text that the student reads: `OVER` if the episode is over, `LOST` if it is lost. An infrastructure
            failure loses it: that sets `lost` instead of raising.

        Raises:
            TypeError: The tool or the environment refuses the arguments; the message is for the student.
            KeyError: The environment has no such tool.
        """
        given, session = dict(arguments), self._session
        text = self.record.unanswered(tool, given, connected=session is not None)
        if text is not None or session is None:
            return text or LOST
        return self._step(session, tool, given, self.record.action(tool, given))

    def _step(self, session: Session, tool: str, given: dict[str, Any], action: dict[str, Any]) -> str:
        try:
            result = session.step(action)
        except FAILURES as error:
            text = self.record.failed(tool, given, error)
            self._drop()
            return text
        return self.record.received(tool, given, result, session.t)

    def _drop(self) -> None:
        """Close the session of a lost episode; the next reset opens another."""
        session, self._session = self._session, None
        if session is not None:
            try:
                session.close()
            except FAILURES as also:  # of the same cause: it is gone already
                log.debug("closing the lost session failed: %s", also)

    def finish(self) -> float | None:
        """Finish the episode and return the sum of its steps' rewards, 0 without one. Idempotent.

        An episode that is not over is ended with the environment's closing tool, if it has one.

        Returns:
            None for an episode that was lost or never began.
        """
        session = self._session
        closing = self.record.closing(connected=session is not None)
        if closing is not None and session is not None:
            self._step(session, closing, {}, self.environment.tools[closing].action({}))
        self.record.finished = True
        return self.record.reward()

    def close(self) -> None:
        """Close the session; a later `reset` opens a new one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
