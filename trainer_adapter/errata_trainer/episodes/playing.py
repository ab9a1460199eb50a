"""Plays a student's episodes in an environment over one session, and records its calls.

A mistake of the student is text that the student reads. An infrastructure failure is neither text nor a reward: the
episode is marked as lost, its reward is None, and the trainer leaves the rollout out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from errata_protocol.errors import CapacityReached, ErrataError, InvalidRequest
from errata_protocol.exception_text import named_text_of
from errata_protocol.rollouts import ErrorMarker, marker_of

from ..rollouts.deliveries import Delivery
from .tools import PlayedEnvironment

OVER = "[the episode is over]"
LOST = "[the environment was lost: this episode does not count]"

log = logging.getLogger("errata.trainer")


class Session(Protocol):
    """The methods of a client that a runner uses; `errata_client.SyncErrataClient` has them."""

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


@dataclass(frozen=True, slots=True)
class Played:
    """A call that the student made, in order.

    Attributes:
        tool: Name of the tool.
        arguments: Arguments as the student gave them.
        text: Text for the student; if the arguments were refused, the message of the exception.
        t: Delivery that answered; None if there was none: the arguments were refused, or the episode was over or lost.
        reward: Reward of the step; None if there was none.
        done: Whether the episode was over after the call.
        marker: Error marker of the delivery, or of this runner if the arguments were refused; None if nothing went
            wrong.
        observation: Decoded observation of the delivery; empty if there was none.
    """

    tool: str
    arguments: dict[str, Any]
    text: str
    t: int | None = None
    reward: float | None = None
    done: bool = False
    marker: ErrorMarker | None = None
    observation: dict[str, Any] = field(default_factory=dict)


def worth_a_look(runners: Sequence[EpisodeRunner]) -> str | None:
    """Return the eid of the episode with the most failing calls, of several that with the lowest reward; None without
    an episode. They are finished."""

    def failures(runner: EpisodeRunner) -> tuple[int, float]:
        return -sum(call.marker is not None for call in runner.played), runner.finish() or 0.0

    begun = [runner for runner in runners if runner.eid is not None]
    return min(begun, key=failures).eid if begun else None


class EpisodeRunner:
    """Plays one episode after the other in a session.

    Args:
        environment: Environment to play.
        connect: Makes the client, at the first reset and again after a session was lost.

    Attributes:
        eid: Key of the episode in the server's journal; None before a reset.
        opening: Decoded observation of the reset.
        played: Calls of the running episode, in order.
        task: Arguments that ``reset`` was given.
        lost: Reason why the episode does not count; None while it does.
        done: Whether the environment reported the end of the episode.
    """

    def __init__(self, environment: PlayedEnvironment, connect: Callable[[], Session]) -> None:
        self.environment = environment
        self._connect = connect
        self._session: Session | None = None
        self._has_had_room = False
        self._finished = False
        self._begin({})

    def fork(self, t: int) -> EpisodeRunner:
        """Return a runner at a fork of the running episode after delivery ``t``. Close it after use.

        Raises:
            InvalidRequest: No episode is running.
            NotSupported: The environment cannot be forked.
            ErrataError: The server cannot fork it now.
        """
        if self._session is None or self.eid is None:
            raise InvalidRequest("no episode is running that could be forked: reset first")
        session: Session = self._session.fork(t, eid=self.eid)
        runner = EpisodeRunner(self.environment, lambda: session)
        runner._session, runner.eid, runner.task = session, session.eid, self.task
        return runner

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process needs: everything but the session.

        Raises:
            TypeError: An episode is running.
        """
        if self._session is not None and self.eid is not None and not (self._finished or self.done):
            raise TypeError(
                f"the episode {self.eid} of {self.environment.name} is running, and its session stays in this process: "
                "finish it first, or hand over the factory and play there"
            )
        return {**self.__dict__, "_session": None}

    def _begin(self, task: dict[str, Any]) -> None:
        self.eid: str | None = None
        self.opening: dict[str, Any] = {}
        self.played: list[Played] = []
        self.task = task
        self.lost: str | None = None
        self.done = False
        self._finished = False

    def reset(self, task: Mapping[str, Any]) -> str:
        """Start an episode and return the text that the student reads; `LOST` if an infrastructure failure prevents it.

        Raises:
            InvalidRequest: The environment does not take such a task: an error of the caller, not of the student.
            CapacityReached: The server has no room for this runner's first session, and would have none in the next
                batch.
        """
        self._begin(dict(task))
        try:
            if self._session is None:
                self._session = self._connect()
            self._has_had_room = True
            result = self._session.reset(**task)
        except InvalidRequest:
            raise
        except (ErrataError, OSError, TimeoutError) as error:
            if isinstance(error, CapacityReached) and not self._has_had_room:
                raise CapacityReached(
                    f"the server has no session left for another rollout of {self.environment.name}: a trainer keeps a "
                    "session for each rollout of a batch, on each of its processes, so start the server with "
                    f"--max-sessions N of at least so many ({error.message})",
                    **error.details,
                ) from error
            self._lose(error)
            return LOST
        self.eid, self.done = self._session.eid, bool(result.done)
        self.opening = dict(result.observation)
        return self.environment.agent_text(self.opening)

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the environment, and add the call to `played`.

        Returns:
            The text that the student reads: `OVER` if the episode is over, `LOST` if it is lost. An infrastructure
            failure loses it: that sets `lost` instead of raising.

        Raises:
            TypeError: The tool or the environment refuses the arguments; the message is for the student.
            KeyError: The environment has no such tool.
        """
        given = dict(arguments)
        if self.lost is not None or self._session is None:
            self.played.append(Played(tool, given, LOST))
            return LOST
        if self.done or self._finished:
            self.played.append(Played(tool, given, OVER))
            return OVER
        try:
            action = self.environment.tools[tool].action(given)
        except TypeError as error:
            self._refuse(tool, given, str(error))
            raise
        return self._step(self._session, tool, given, action)

    def _step(self, session: Session, tool: str, given: dict[str, Any], action: dict[str, Any]) -> str:
        try:
            result = session.step(action)
        except InvalidRequest as error:  # the environment's own validation of what the student wrote
            self._refuse(tool, given, error.message)
            raise TypeError(error.message) from error
        except (ErrataError, OSError, TimeoutError) as error:
            self._lose(error)
            self.played.append(Played(tool, given, LOST))
            return LOST
        observation = dict(result.observation)
        text = self.environment.agent_text(observation)
        self.done = bool(result.done)
        marker = marker_of({"observation": observation, "metadata": getattr(result, "metadata", None)})
        self.played.append(Played(tool, given, text, session.t, result.reward, self.done, marker, observation))
        return text

    def _refuse(self, tool: str, given: dict[str, Any], why: str) -> None:
        marker = ErrorMarker(error_kind="invalid_arguments", hint_template_key="args.invalid", severity="error")
        self.played.append(Played(tool, given, why, marker=marker))

    def _lose(self, error: Exception) -> None:
        self.lost = named_text_of(error)
        log.warning("an episode of %s is lost and will not be counted: %s", self.environment.name, self.lost)
        session, self._session = self._session, None
        if session is not None:
            try:
                session.close()
            except (ErrataError, OSError, TimeoutError) as also:  # of the same cause: it is gone already
                log.debug("closing the lost session failed: %s", also)

    def finish(self) -> float | None:
        """Finish the episode and return the sum of its steps' rewards, 0 without one. Idempotent.

        An episode that is not over is ended with the environment's closing tool, if it has one.

        Returns:
            None for an episode that was lost or never began.
        """
        if not self._finished:
            closing = self.environment.closing_tool
            if closing is not None and self.lost is None and not self.done and self._session is not None:
                self._step(self._session, closing, {}, self.environment.tools[closing].action({}))
            self._finished = True
        if self.lost is not None or self.eid is None:
            return None
        return float(sum(call.reward for call in self.played if call.reward is not None))

    def deliveries(self) -> list[Delivery]:
        """Return the calls of the episode for `build_rollout`."""
        return [Delivery(call.t, call.tool, call.arguments, call.text, call.marker, self.eid) for call in self.played]

    def close(self) -> None:
        """Close the session; a later `reset` opens a new one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
