"""Channel 3 without pairs: the teachers' consensus as a score of each turn (a process reward).

`Ballot.margin` is a score from -1 to 1: how much the teachers agree with the student's action. It is added to the
advantages of the turn's tokens, or is the target of a model that scores turns (``compute_teacher_consensus_prm`` of the
project's source design). Votes come late; they are read from the pool, or from the journal as late rewards of source
``teachers``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..rollouts.rollout import Rollout, state_of_turns
from .arguments import not_negative, positive, shaped, upper_bound

Scores = Mapping[tuple[str, int], float] | Mapping[tuple[str, int, int], float]
"""Score of what the student did at a state, by episode and delivery; or of a turn, by its index in the rollout as well:
turns whose calls delivered nothing are at the same state as the next one."""

Centre = Literal["none", "batch", "group"]


class BallotLike(Protocol):
    """The attributes of a ballot that are used; `errata_trainer.teachers.Ballot` has them."""

    @property
    def ask(self) -> AskLike:
        """The state."""
        ...

    @property
    def actions(self) -> Mapping[str, object]:
        """Each teacher's answer."""
        ...

    @property
    def margin(self) -> float:
        """Share of the votes for the student's action, minus that of the most chosen other one: -1 to 1."""
        ...


class AskLike(Protocol):
    """The state of a vote."""

    @property
    def eid(self) -> str | None:
        """The episode."""
        ...

    @property
    def t(self) -> int | None:
        """The delivery whose payload is the state."""
        ...

    @property
    def turns(self) -> Sequence[object]:
        """The student's turns before it."""
        ...


class LateReward(Protocol):
    """A late reward, as `errata_client.Episodes.rewards` returns it."""

    @property
    def t(self) -> int:
        """The delivery that it is about."""
        ...

    @property
    def value(self) -> float:
        """Its value."""
        ...

    @property
    def source(self) -> str:
        """Who gave it."""
        ...


def scores_of_ballots(ballots: Iterable[BallotLike]) -> dict[tuple[str, int], float]:
    """Return the margin at each state with a vote, by episode and delivery."""
    return {(eid, t): ballot.margin for eid, t, ballot in _voted(ballots)}


def scores_of_voted_turns(ballots: Iterable[BallotLike]) -> dict[tuple[str, int, int], float]:
    """Return the margin of each turn with a vote, by episode, delivery and index of the turn in its rollout."""
    return {(eid, t, len(ballot.ask.turns)): ballot.margin for eid, t, ballot in _voted(ballots)}


def _voted(ballots: Iterable[BallotLike]) -> Iterator[tuple[str, int, BallotLike]]:
    """Yield episode, delivery and ballot of each state with a vote."""
    for ballot in ballots:
        if ballot.actions and ballot.ask.eid is not None and ballot.ask.t is not None:
            yield ballot.ask.eid, ballot.ask.t, ballot


def scores_of_rewards(
    eid: str, rewards: Iterable[LateReward], *, source: str = "teachers"
) -> dict[tuple[str, int], float]:
    """Return the score at each state of an episode from its late rewards; the last one of a state counts.

    Args:
        eid: The episode.
        rewards: All late rewards of the episode.
        source: Source whose rewards count; others are ignored.
    """
    return {(eid, reward.t): float(reward.value) for reward in rewards if reward.source == source}


def turn_scores(rollouts: Sequence[Rollout], scores: Scores) -> list[list[float | None]]:
    """Return the score of each turn of each rollout; None for turns without votes and for lost rollouts.

    A score of a state, without the index of a turn, is given to no turn where several are at that state.
    """
    known: Mapping[tuple[Any, ...], float] = dict(scores)
    found: list[list[float | None]] = []
    for rollout in rollouts:
        states = state_of_turns(rollout)
        at = Counter(states[turn.index] for turn in rollout.turns)
        of_turns: list[float | None] = [None] * len(rollout.turns)
        for place, turn in enumerate(rollout.turns):
            t = states[turn.index]
            if rollout.lost is None and rollout.eid is not None and t is not None:
                of_state = known.get((rollout.eid, t)) if at[t] == 1 else None
                of_turns[place] = known.get((rollout.eid, t, turn.index), of_state)
        found.append(of_turns)
    return found


def shaped_advantages(
    rollouts: Sequence[Rollout],
    scores: Sequence[Sequence[float | None]],
    *,
    weight: float = 1.0,
    centre: Centre = "none",
    groups: Sequence[Hashable] | None = None,
    clip: float | None = None,
    length: int | None = None,
) -> Tensor:
    """Return what to add to the advantages: the score of each turn at each of its tokens, times a weight.

    Args:
        rollouts: The batch's B rollouts.
        scores: Score of each turn of each rollout, as `turn_scores` returns them.
        weight: Factor of the scores, >= 0: beta_replay.
        centre: Subtract the mean score of the batch, or of each group, so that turns like the others move nothing. A
            single voted turn is its own mean: nothing is left of it.
        groups: Task of each rollout, as any key: rollouts with equal keys have the same task. Needed for ``group``.
        clip: Upper bound of the absolute score after centring; None for no bound.
        length: Width T of the result in tokens; None is the length of the longest completion.

    Returns:
        ``[B, T]`` float32 over the completions, padded on the right: 0 where nobody voted and at tokens that the
        environment wrote.

    Raises:
        ValueError: Other than one score for each turn; an option out of its range; ``group`` without groups.
    """
    not_negative("weight", weight)
    upper_bound("clip", clip)
    if centre not in ("none", "batch", "group"):
        raise ValueError(f"centre is {centre!r}: 'none', 'batch' or 'group'")
    if centre == "group" and groups is None:
        raise ValueError("centre='group' needs groups: which rollouts have the same task")
    if centre == "group" and groups is not None and len(groups) != len(rollouts):
        raise ValueError(f"{len(groups)} groups for {len(rollouts)} rollouts")
    keys: Sequence[Hashable] = groups if centre == "group" and groups is not None else [None] * len(rollouts)
    longest = max((len(rollout.completion_ids) for rollout in rollouts), default=0)
    out = torch.zeros(len(rollouts), longest if length is None else length)
    if out.shape[1] < longest:
        raise ValueError(f"length is {length}: the longest completion has {longest} tokens")
    means = dict.fromkeys(keys, 0.0)
    if centre != "none":
        for key in means:
            own = [one for of_row, k in zip(scores, keys, strict=True) if k == key for one in of_row if one is not None]
            means[key] = sum(own) / len(own) if own else 0.0
    for row, (rollout, of_turns, key) in enumerate(zip(rollouts, scores, keys, strict=True)):
        if len(of_turns) != len(rollout.turns):
            raise ValueError(f"rollout {row} has {len(rollout.turns)} turns and {len(of_turns)} scores")
        for turn, score in zip(rollout.turns, of_turns, strict=True):
            if score is not None:
                value = score - means[key]
                out[row, turn.start : turn.stop] = weight * (value if clip is None else max(-clip, min(clip, value)))
    return out


def score_regression_loss(
    predicted: Tensor, targets: Tensor, weights: Tensor | None = None, *, delta: float = 1.0
) -> Tensor:
    """Return the mean Huber loss between predicted and given scores, for a model that scores turns.

    Args:
        predicted: ``[N]`` predicted scores of the voted turns, attached.
        targets: ``[N]`` scores to predict, the teachers' consensus; no gradient flows into it.
        weights: ``[N]`` weight of each turn, >= 0; None weighs each 1.
        delta: Absolute error at which the loss goes from squared to linear, > 0; with infinity it is half the squared
            error.

    Returns:
        Scalar; 0 for N = 0 or weights of 0, attached.

    Raises:
        ValueError: Shapes that differ; ``delta`` out of its range.
    """
    shaped("targets", targets, tuple(predicted.shape), "as predicted")
    shaped("weights", weights, tuple(predicted.shape), "as predicted")
    upper_bound("delta", delta)
    error = predicted.to(torch.promote_types(predicted.dtype, torch.float32)) - targets.detach()
    size = error.abs()
    losses = torch.where(size <= delta, 0.5 * error.square(), torch.zeros_like(size))
    if delta != float("inf"):
        positive("delta", delta)
        losses = torch.where(size <= delta, losses, delta * (size - 0.5 * delta))
    kept = torch.ones_like(losses) if weights is None else weights.detach().to(losses)
    total = kept.sum()
    return (losses * kept).sum() / (total + (total == 0))
