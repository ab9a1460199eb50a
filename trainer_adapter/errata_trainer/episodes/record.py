"""`EpisodeRecord`: what a student did in an episode and what it read, apart from the session in which it was played.

It does no I/O: a runner asks it what to do, asks the environment, and tells it the outcome. A mistake of the student is
text that the student reads. An infrastructure failure is neither text nor a reward: the episode is marked as lost, its
reward is None, and the trainer leaves the rollout out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from errata_protocol.errors import CapacityReached, ErrataError, InvalidRequest
from errata_protocol.exception_text import named_text_of
from errata_protocol.rollouts import ErrorMarker, marker_of

from ..rollouts.deliveries import Delivery
from ..rollouts.json_values import float_of, number_of, of_type, plain_of
from .tools import PlayedEnvironment

OVER = "[the episode is over]"
LOST = "[the environment was lost: this episode does not count]"

FAILURES = (ErrataError, OSError, TimeoutError)
"""Exceptions of a session that are an infrastructure failure, or (`InvalidRequest`) a refusal."""

SCHEMA_VERSION = 1
"""A field may be added in version 1; a reader ignores what it does not know, and refuses another version."""

log = logging.getLogger("errata.trainer")


class DeadlinePassed(TimeoutError):
    """A deadline of the recipe passed, not one of the server or of the client.

    Args:
        code: Code of the deadline, e.g. ``CALL_DEADLINE``.
        text: Sentence that says what took how long, and which limit it had.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


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
        marker: Error marker of the delivery, or of the record if the arguments were refused; None if nothing went
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


@dataclass(slots=True)
class EpisodeRecord:
    """The record of one episode.

    Args:
        environment: Environment that is played.
        eid: Key of the episode in the server's journal; None before a reset.
        opening: Decoded observation of the reset.
        played: Calls of the episode, in order.
        task: Arguments that ``reset`` was given.
        lost: Reason why the episode does not count; None while it does.
        lost_code: Code of that reason, to count it by: that of the error (`errata_protocol.errors.CODES`), of the
            deadline that passed, or the name of the exception's class.
        done: Whether the environment reported the end of the episode.
        finished: Whether the student stopped, and the closing tool was called where it was needed.
    """

    environment: PlayedEnvironment
    eid: str | None = None
    opening: dict[str, Any] = field(default_factory=dict)
    played: list[Played] = field(default_factory=list)
    task: dict[str, Any] = field(default_factory=dict)
    lost: str | None = None
    lost_code: str | None = None
    done: bool = False
    finished: bool = False

    def begin(self, task: Mapping[str, Any]) -> None:
        """Forget the episode and begin another, of this task."""
        self.eid, self.opening, self.played, self.task = None, {}, [], dict(task)
        self.lost = self.lost_code = None
        self.done = self.finished = False

    def opened(self, eid: str | None, result: Any) -> str:
        """Record the result of the reset and return the text that the student reads.

        Args:
            eid: Key of the episode.
            result: Result of the session's ``reset``.
        """
        self.eid, self.done, self.opening = eid, bool(result.done), dict(result.observation)
        return self.environment.agent_text(self.opening)

    def unanswered(self, tool: str, given: dict[str, Any], *, connected: bool) -> str | None:
        """Return the text of a call that does not reach the environment, because the episode is lost or over, and add
        the call; None for a call that is to be made.

        Args:
            tool: Name of the tool.
            given: Arguments as the student gave them.
            connected: Whether there is a session.
        """
        if self.lost is not None or not connected:
            return self._noted(tool, given, LOST)
        return self._noted(tool, given, OVER) if self.done or self.finished else None

    def action(self, tool: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the environment's action for a call; refused arguments are added as a call.

        Raises:
            TypeError: The tool refuses the arguments; the message is for the student.
            KeyError: The environment has no such tool.
        """
        try:
            return self.environment.tools[tool].action(given)
        except TypeError as error:
            self.refuse(tool, given, str(error))
            raise

    def refuse(self, tool: str, given: dict[str, Any], why: str) -> None:
        """Add a call whose arguments were refused.

        Args:
            tool: Name of the tool.
            given: Arguments as the student gave them.
            why: Text for the student.
        """
        marker = ErrorMarker(error_kind="invalid_arguments", hint_template_key="args.invalid", severity="error")
        self.played.append(Played(tool, given, why, marker=marker))

    def received(self, tool: str, given: dict[str, Any], result: Any, t: int | None) -> str:
        """Add a call that was answered, and return the text that the student reads.

        Args:
            tool: Name of the tool.
            given: Arguments as the student gave them.
            result: Result of the session's ``step``.
            t: Delivery that answered.
        """
        observation = dict(result.observation)
        text = self.environment.agent_text(observation)
        self.done = bool(result.done)
        marker = marker_of({"observation": observation, "metadata": getattr(result, "metadata", None)})
        self.played.append(Played(tool, given, text, t, result.reward, self.done, marker, observation))
        return text

    def failed(self, tool: str, given: dict[str, Any], error: Exception) -> str:
        """Add a call that ended with one of `FAILURES`, and return the text that the student reads: the episode is
        lost.

        Args:
            tool: Name of the tool.
            given: Arguments as the student gave them.
            error: Exception of the session.

        Raises:
            TypeError: The environment's own validation refused the arguments; the message is for the student.
        """
        if isinstance(error, InvalidRequest):
            self.refuse(tool, given, error.message)
            raise TypeError(error.message) from error
        self.lose(error)
        return self._noted(tool, given, LOST)

    def lose(self, error: BaseException) -> None:
        """Mark the episode as lost by an infrastructure failure."""
        self.lost_code = error.code if isinstance(error, ErrataError | DeadlinePassed) else type(error).__name__
        self.lost = str(error) if isinstance(error, DeadlinePassed) else named_text_of(error)
        log.warning("an episode of %s is lost and will not be counted: %s", self.environment.name, self.lost)

    def closing(self, *, connected: bool) -> str | None:
        """Return the closing tool if it has still to be called to finish the episode.

        Args:
            connected: Whether there is a session.
        """
        if self.finished or self.lost is not None or self.done or not connected:
            return None
        return self.environment.closing_tool

    def reward(self) -> float | None:
        """Return the sum of the steps' rewards, 0 without one; None for an episode that was lost or never began."""
        if self.lost is not None or self.eid is None:
            return None
        return float(sum(call.reward for call in self.played if call.reward is not None))

    def deliveries(self) -> list[Delivery]:
        """Return the calls of the episode for `build_rollout`."""
        return [Delivery(call.t, call.tool, call.arguments, call.text, call.marker, self.eid) for call in self.played]

    def _noted(self, tool: str, given: dict[str, Any], text: str) -> str:
        self.played.append(Played(tool, given, text))
        return text

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values, with ``schema_version``, for another process.

        Observations are kept of t=0 and of calls with a marker only: hints and teachers read no others, and a step's
        may be large. A float that is not finite is a text, as in `errata_trainer.rollouts.record_files.to_json`.

        Raises:
            TypeError: An observation, the task or an argument is no JSON value.
        """
        return {
            "schema_version": SCHEMA_VERSION,
            "environment": self.environment.name,
            "eid": self.eid,
            "opening": plain_of(self.opening, "opening"),
            "played": [_played_to_json(call, f"played[{number}]") for number, call in enumerate(self.played)],
            "task": plain_of(self.task, "task"),
            "lost": self.lost,
            "lost_code": self.lost_code,
            "done": self.done,
            "finished": self.finished,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any], environment: PlayedEnvironment) -> Self:
        """Return the record of `to_json`'s values.

        Args:
            row: Values that `to_json` returned.
            environment: Environment that was played.

        Raises:
            ValueError: Another schema version or environment, or a field that is missing or of another type.
        """
        version = row.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(f"schema version {version!r} of an episode's record, this reader knows {SCHEMA_VERSION}")
        if row.get("environment") != environment.name:
            raise ValueError(f"the record is of the environment {row.get('environment')!r}, not {environment.name!r}")
        try:
            return cls(
                environment,
                _text_or_none(row, "eid"),
                of_type(row["opening"], dict, "opening", "an object"),
                [_played_from_json(call) for call in of_type(row["played"], list, "played", "a list")],
                of_type(row["task"], dict, "task", "an object"),
                _text_or_none(row, "lost"),
                _text_or_none(row, "lost_code"),
                of_type(row["done"], bool, "done", "true or false"),
                of_type(row["finished"], bool, "finished", "true or false"),
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"an episode's record cannot be made of this row: {error}") from error


class RecordHolder:
    """What has the record of an episode, and shows its fields.

    Args:
        record: The record.
    """

    def __init__(self, record: EpisodeRecord) -> None:
        self.record = record

    @property
    def environment(self) -> PlayedEnvironment:
        """Environment that is played."""
        return self.record.environment

    @property
    def eid(self) -> str | None:
        """Key of the episode in the server's journal; None before a reset."""
        return self.record.eid

    @property
    def opening(self) -> dict[str, Any]:
        """Decoded observation of the reset."""
        return self.record.opening

    @property
    def played(self) -> list[Played]:
        """Calls of the running episode, in order."""
        return self.record.played

    @property
    def task(self) -> dict[str, Any]:
        """Arguments that ``reset`` was given."""
        return self.record.task

    @property
    def lost(self) -> str | None:
        """Reason why the episode does not count; None while it does."""
        return self.record.lost

    @property
    def done(self) -> bool:
        """Whether the environment reported the end of the episode."""
        return self.record.done

    def deliveries(self) -> list[Delivery]:
        """Return the calls of the episode for `build_rollout`."""
        return self.record.deliveries()


def without_room(error: CapacityReached, environment: PlayedEnvironment) -> CapacityReached:
    """Return the error of a server that has no room for a runner's first session, with what to do."""
    return CapacityReached(
        f"the server has no session left for another rollout of {environment.name}: a trainer keeps a "
        "session for each rollout of a batch, on each of its processes, so start the server with "
        f"--max-sessions N of at least so many ({error.message})",
        **error.details,
    )


def _played_to_json(call: Played, where: str) -> dict[str, Any]:
    return {
        "tool": call.tool,
        "arguments": plain_of(call.arguments, f"{where}.arguments"),
        "text": call.text,
        "t": call.t,
        "reward": None if call.reward is None else number_of(call.reward),
        "done": call.done,
        "marker": None if call.marker is None else call.marker.model_dump(exclude_none=True),
        "observation": {} if call.marker is None else plain_of(call.observation, f"{where}.observation"),
    }


def _played_from_json(call: Any) -> Played:
    call = of_type(call, dict, "a call", "an object")
    return Played(
        of_type(call["tool"], str, "a call's tool", "a text"),
        of_type(call["arguments"], dict, "a call's arguments", "an object"),
        of_type(call["text"], str, "a call's text", "a text"),
        None if call.get("t") is None else of_type(call["t"], int, "a call's t", "an integer or null"),
        None if call.get("reward") is None else float_of(call["reward"], "a call's reward"),
        of_type(call["done"], bool, "a call's done", "true or false"),
        None if call.get("marker") is None else ErrorMarker.model_validate(call["marker"]),
        of_type(call["observation"], dict, "a call's observation", "an object"),
    )


def _text_or_none(row: Mapping[str, Any], name: str) -> str | None:
    return None if row.get(name) is None else str(of_type(row[name], str, name, "a text or null"))
