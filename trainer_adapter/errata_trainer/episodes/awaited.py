"""`AwaitedRunner`: an `EpisodeRunner` for asyncio. Many of them wait side by side on one event loop, and clients of one
loop share a multiplexed connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from errata_protocol.errors import Cancelled, CapacityReached, InvalidRequest
from errata_protocol.labels import Labels

from .record import FAILURES, LOST, DeadlinePassed, EpisodeRecord, RecordHolder, without_room
from .tools import PlayedEnvironment

CALL_DEADLINE = "CALL_DEADLINE"
"""Code of an episode that was lost because a reset or a call took longer than ``call_s``."""

EPISODE_DEADLINE = "EPISODE_DEADLINE"
"""Code of an episode that was lost because it spent ``episode_s`` in the environment."""

log = logging.getLogger("errata.trainer")


class AwaitedSession(Protocol):
    """The methods of a client that a runner awaits; `errata_client.ErrataClient` has them."""

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

    def reset(self, **kwargs: Any) -> Awaitable[Any]:
        """Start an episode; return a result with ``observation``, ``reward`` and ``done``."""
        ...

    def step(self, action: Any) -> Awaitable[Any]:
        """Take a step; return a result like that of `reset`."""
        ...

    def close(self) -> Awaitable[None]:
        """End the session."""
        ...


class AwaitedRunner(RecordHolder):
    """Plays one episode after the other in a session, as `EpisodeRunner` does, and awaits what that waits for.

    It has deadlines of its own, because a trainer waits for the slowest episode of a batch: an episode that passes one
    is lost. What the student takes to generate its turns does not count. A call that is cancelled loses its episode
    too, because its outcome is not known.

    Args:
        environment: Environment to play.
        connect: Makes a client that is connected, at the first reset and again after a session was lost;
            `errata_trainer.episodes.served.Connect.connected` for one.
        call_s: Longest time of a reset, with the connect, or of a call, in seconds; None for no limit.
        episode_s: Longest time that an episode spends in the environment in all, in seconds; None for no limit.

    Attributes:
        record: Record of the running episode.
        labels: Labels of the episodes that the next resets begin; None leaves them to the client.
        spent_s: Time that the running episode has spent in the environment, in seconds.
    """

    def __init__(
        self,
        environment: PlayedEnvironment,
        connect: Callable[[], Awaitable[AwaitedSession]],
        *,
        call_s: float | None = None,
        episode_s: float | None = None,
    ) -> None:
        for name, seconds in (("call_s", call_s), ("episode_s", episode_s)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name} is {seconds}: give a positive number of seconds, or None for no limit")
        super().__init__(EpisodeRecord(environment))
        self.call_s, self.episode_s, self.spent_s = call_s, episode_s, 0.0
        self.labels: Labels | None = None
        self._connect = connect
        self._session: AwaitedSession | None = None
        self._has_had_room = False

    async def reset(self, task: Mapping[str, Any]) -> str:
        """Start an episode and return the text that the student reads; `LOST` if an infrastructure failure or a
        deadline prevents it.

        Raises:
            InvalidRequest: The environment does not take such a task: an error of the caller, not of the student.
            CapacityReached: The server has no room for this runner's first session.
        """
        self.record.begin(task)
        self.spent_s = 0.0
        try:
            async with self._within("reset"):
                session = self._session
                if session is None:
                    session = self._session = await self._connect()
                self._has_had_room = True
                if self.labels is not None:
                    session.labels = self.labels
                result = await session.reset(**task)
        except InvalidRequest:
            raise
        except FAILURES as error:
            if isinstance(error, CapacityReached) and not self._has_had_room:
                raise without_room(error, self.environment) from error
            self.record.lose(error)
            await self._drop()
            return LOST
        return self.record.opened(session.eid, result)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the environment, and add the call to `played`.

        Returns:
            The text that the student reads: `OVER` if the episode is over, `LOST` if it is lost. An infrastructure
            failure or a deadline loses it: that sets `lost` instead of raising.

        Raises:
            TypeError: The tool or the environment refuses the arguments; the message is for the student.
            KeyError: The environment has no such tool.
        """
        given, session = dict(arguments), self._session
        text = self.record.unanswered(tool, given, connected=session is not None)
        if text is not None or session is None:
            return text or LOST
        return await self._step(session, tool, given, self.record.action(tool, given))

    async def finish(self) -> float | None:
        """Finish the episode and return the sum of its steps' rewards, 0 without one. Idempotent.

        An episode that is not over is ended with the environment's closing tool, if it has one.

        Returns:
            None for an episode that was lost or never began.
        """
        session = self._session
        closing = self.record.closing(connected=session is not None)
        if closing is not None and session is not None:
            await self._step(session, closing, {}, self.environment.tools[closing].action({}))
        self.record.finished = True
        return self.record.reward()

    async def close(self) -> None:
        """Close the session; a later `reset` opens a new one."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _step(self, session: AwaitedSession, tool: str, given: dict[str, Any], action: dict[str, Any]) -> str:
        try:
            async with self._within(tool):
                result = await session.step(action)
        except FAILURES as error:
            text = self.record.failed(tool, given, error)
            await self._drop()
            return text
        return self.record.received(tool, given, result, session.t)

    async def _drop(self) -> None:
        """Close the session of a lost episode; the next reset opens another."""
        session, self._session = self._session, None
        if session is not None:
            try:
                await session.close()
            except FAILURES as also:  # of the same cause: it is gone already
                log.debug("closing the lost session failed: %s", also)

    @asynccontextmanager
    async def _within(self, what: str) -> AsyncIterator[None]:
        """Count the time in the block as spent in the environment.

        Args:
            what: Name of the request, for the reason.

        Raises:
            DeadlinePassed: The block took longer than the call or the episode may.
        """
        clock = asyncio.get_running_loop().time
        left_s = None if self.episode_s is None else max(0.0, self.episode_s - self.spent_s)
        is_last = left_s is not None and (self.call_s is None or left_s <= self.call_s)
        begun = clock()
        try:
            async with asyncio.timeout(left_s if is_last else self.call_s) as deadline:
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise  # of the client
            if is_last:
                text = f"the episode of {self.environment.name} spent episode_s={self.episode_s:g} s there, at {what}"
                raise DeadlinePassed(EPISODE_DEADLINE, text) from error
            text = f"{what} of {self.environment.name} took longer than call_s={self.call_s:g} s"
            raise DeadlinePassed(CALL_DEADLINE, text) from error
        except asyncio.CancelledError:
            self.record.lose(Cancelled(f"the task that played the episode was cancelled in {what}"))
            raise
        finally:
            self.spent_s += clock() - begun
