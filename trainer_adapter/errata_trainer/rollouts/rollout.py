"""The records that recipes produce and channels consume, independent of any trainer. No tensors.

Positions: ``ids = prompt_ids + completion_ids`` are a rollout's tokens without padding, counted from 0. The logits that
predict ``ids[i]`` are at position ``i - 1``. Offsets of turns count in ``completion_ids``, which is what is sampled and
masked; positions of an `SdpoItem` count in whole sequences, which is what is forwarded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from errata_protocol.rollouts import ErrorMarker


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of a turn, as the student made it.

    Attributes:
        name: Name of the tool, as written by the student; it need not exist.
        arguments: Arguments parsed from the student's text.
        t: The delivery that answered it; None where it never reached the environment (an unknown tool, arguments of
            other names) or was not kept in the transcript.
        marker: Error marker of the call, from its delivery's payload or, if it delivered nothing, from `build_rollout`;
            None if nothing went wrong or the reason is unknown.
    """

    name: str
    arguments: dict[str, Any]
    t: int | None = None
    marker: ErrorMarker | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant message: a maximal run of tokens that the student sampled.

    Attributes:
        index: Index of the turn in its rollout, from 0.
        start: Offset of the turn's first token in ``completion_ids``.
        stop: Offset of the token after the turn's last one; the end-of-turn token belongs to the turn.
        calls: Tool calls in the order in which the student made them.
    """

    index: int
    start: int
    stop: int
    calls: tuple[Call, ...] = ()

    @property
    def failed(self) -> Call | None:
        """The first call with an error. Warnings do not count: they never carry a hint into a loss (PROTOCOL B3)."""
        for call in self.calls:
            if call.marker is not None and call.marker.severity != "warning":
                return call
        return None


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode as the student saw and made it.

    Attributes:
        prompt_ids: Tokens of the prompt, the first generation prompt included, unpadded.
        completion_ids: Tokens after the prompt: the student's turns and, between them, tool results and generation
            prompts.
        mask: 1 for each of ``completion_ids`` that the student sampled, 0 for the others.
        turns: The student's turns, in order.
        eid: Key of the episode in the server's journal; None without one.
        environment: Name of the environment on its server.
        reward: Reward of the whole episode; None if it has none, e.g. because the machine failed.
        logprobs: Log-probability of each of ``completion_ids`` when it was sampled, 0.0 where ``mask`` is 0; None
            if unknown.
        truncated: Whether the completion was cut off at the longest length.
        lost: Reason of the infrastructure failure that ended the episode, which has no reward then and trains nothing;
            None otherwise.
        task: The task, as given to ``reset``.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    turns: tuple[Turn, ...] = ()
    eid: str | None = None
    environment: str | None = None
    reward: float | None = None
    logprobs: tuple[float, ...] | None = None
    truncated: bool = False
    lost: str | None = None
    task: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SdpoItem:
    """One error site to distil: the student's failing turn, and the teacher's row with a hint before that turn.

    ``student_positions[n]`` and ``teacher_positions[n]`` both predict ``target_ids[n]``: the token's position in the
    student's ``prompt_ids + completion_ids`` and in ``teacher_ids``, minus one.

    Attributes:
        turn: Index of the turn in its rollout.
        teacher_ids: Context with the hint, then the turn, unpadded; it ends where the turn ends.
        student_positions: ``[N]`` positions in the student's ``prompt_ids + completion_ids`` that predict the targets.
        teacher_positions: ``[N]`` positions in ``teacher_ids`` that predict the targets.
        target_ids: ``[N]`` tokens that are compared: the whole turn, or those of its tool calls.
        shared_prefix: Number of leading tokens of ``teacher_ids`` that are also the student's.
        weight: Weight of each target token in the loss.
        hint_template_key: Hint template key of the hint.
    """

    turn: int
    teacher_ids: tuple[int, ...]
    student_positions: tuple[int, ...]
    teacher_positions: tuple[int, ...]
    target_ids: tuple[int, ...]
    shared_prefix: int = 0
    weight: float = 1.0
    hint_template_key: str | None = None


@dataclass(frozen=True, slots=True)
class DpoPair:
    """A preferred and a rejected action at one state of an episode.

    Attributes:
        context_ids: The exact tokens the student saw there, the generation prompt included.
        chosen_ids: Action that the teachers agreed on, rendered in the student's own format.
        rejected_ids: Action that the student sampled, with its end-of-turn token exactly if ``chosen_ids`` has one.
        ref_chosen: Summed log-probability of ``chosen_ids`` under the frozen reference; None before it was computed.
        ref_rejected: Summed log-probability of ``rejected_ids`` under the frozen reference; None before it was
            computed.
        reference: Name of the weights and tokenizer that made the reference log-probabilities; a buffer refuses others.
        weight: Weight of the pair in the loss.
        eid: Key of the episode that the pair comes from.
        t: The delivery whose payload is the state.
        votes: Canonical key of each teacher's action, None for one that had no usable answer, by the teacher's name.
    """

    context_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    ref_chosen: float | None = None
    ref_rejected: float | None = None
    reference: str | None = None
    weight: float = 1.0
    eid: str | None = None
    t: int | None = None
    votes: dict[str, str | None] = field(default_factory=dict)


def state_of_turns(rollout: Rollout) -> dict[int, int | None]:
    """Return by turn index the delivery that the turn responded to; None without a journal.

    It is the one before the turn's first own delivery, and for a turn that delivered nothing the last one before it.
    """
    states: dict[int, int | None] = {}
    last = 0
    for turn in rollout.turns:
        delivered = [call.t for call in turn.calls if call.t is not None]
        before = delivered[0] - 1 if delivered else last
        states[turn.index] = before if rollout.eid is not None else None
        last = delivered[-1] if delivered else last
    return states
