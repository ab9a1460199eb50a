"""Hints, the failing turns that they are written for, the interface of hinters, and `write_hints`, which calls one in
threads."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from errata_protocol.rollouts import ErrorMarker

from ..rollouts.rollout import Call, Rollout, Turn

Source = Literal["template", "model", "demonstration", "feedback"]


@dataclass(frozen=True, slots=True)
class Hint:
    """A text that a teacher reads directly before a failing turn.

    Attributes:
        text: Text that the teacher reads, neutral and within the budget of the hinter that made it.
        key: Hint template key of the marker, or that of its error kind if it has none; ``source`` if nothing failed.
            Acceptance is counted by it.
        version: Version of the templates or of the prompt that made the hint.
        source: Kind of hinter that made the text.
    """

    text: str
    key: str
    version: str
    source: Source


@dataclass(frozen=True, slots=True)
class FailedTurn:
    """A turn to write a hint for.

    Attributes:
        rollout: Rollout that has the turn.
        turn: The failing turn.
        call: The call of the turn that failed, usually ``turn.failed``.
        observation: Decoded observation delivered to that call; empty if there is none. Only what the agent reads of
            it, and fields such as ``cwd`` that say where and how the command ran, are ever used.
        tools: Descriptions of the tools the student has, as for `build_rollout`.
    """

    rollout: Rollout
    turn: Turn
    call: Call
    observation: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def marker(self) -> ErrorMarker | None:
        """The error marker of the turn; None for a warning, which never leads to a hint (PROTOCOL B3)."""
        marker = self.call.marker
        return None if marker is None or marker.severity == "warning" else marker


@dataclass(frozen=True, slots=True)
class Attempt:
    """A rollout of a group with the text of its turns.

    Attributes:
        rollout: The rollout.
        group: Task of the rollout, as any key, e.g. the index of the prompt: rollouts with equal keys have the same
            task.
        texts: Decoded text of each turn, calls and thinking included, without special tokens.
    """

    rollout: Rollout
    group: Hashable
    texts: tuple[str, ...]


@runtime_checkable
class Hinter(Protocol):
    """Writes hints. A true attribute ``concurrent`` allows calls from several threads."""

    def hint(self, failed: FailedTurn) -> Hint | None:
        """Return a hint; None if there is none, in which case the hinter counts the reason."""
        ...


@runtime_checkable
class BatchHinter(Hinter, Protocol):
    """A hinter that also reads the other rollouts of a batch."""

    def begin_batch(self, attempts: Sequence[Attempt]) -> None:
        """Receive all rollouts of a batch, before hints for its turns are requested."""
        ...


def write_hints(hinter: Hinter, failed: Sequence[FailedTurn], *, threads: int = 1) -> list[Hint | None]:
    """Return the hint of each turn, in order.

    Args:
        hinter: Hinter that writes the hints.
        failed: Failing turns to write hints for.
        threads: Most hints written at the same time; more than 1 only for a hinter that is ``concurrent``.
    """
    if threads <= 1 or len(failed) <= 1:
        return [hinter.hint(one) for one in failed]
    with ThreadPoolExecutor(min(threads, len(failed)), "errata-hints") as pool:
        return list(pool.map(hinter.hint, failed))
