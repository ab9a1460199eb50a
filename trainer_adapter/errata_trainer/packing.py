"""Turns of an episode as the samples of a trainer: as many turns in one sample as share their tokens. No tensors.

A trainer that makes a sample of each turn forwards a prompt again with every turn behind it. Where a turn's prompt
begins with all tokens before it, the turns fit in one sample::

    step     prompt 1 | TURN 1        prompt 1 | TURN 1 | result 1 | TURN 2        ...
    packed   prompt 1 | TURN 1 | result 1 | TURN 2 | ...

A causal model predicts each token from the same tokens in both, so the sums over a batch's sampled tokens, and their
gradients, are equal. Where the tokens differ (a history that was shortened or rendered again), another sample begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .rollouts.rollout import Rollout

NOT_SAMPLED = -1
"""Segment of a token that the student did not sample."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One turn as it was sampled.

    Attributes:
        prompt_ids: Tokens that the turn was sampled from: the whole context.
        response_ids: Tokens that were sampled; empty for an observation that was not answered any more.
        logprobs: Log-probability of each of ``response_ids`` when it was sampled; None if unknown.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.response_ids):
            raise ValueError(
                f"{len(self.logprobs)} log-probabilities for the {len(self.response_ids)} tokens of a turn"
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of tokens with the turns that were sampled in it.

    Attributes:
        ids: Tokens of the row, without padding.
        segments: Index in the episode of the turn that sampled a token, for each of ``ids``; `NOT_SAMPLED` elsewhere.
        logprobs: Log-probability of each of ``ids`` when it was sampled, 0.0 elsewhere; None if a turn has none.
    """

    ids: tuple[int, ...]
    segments: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None

    @property
    def mask(self) -> tuple[int, ...]:
        """1 for each of ``ids`` that the student sampled, 0 for the others."""
        return tuple(int(one != NOT_SAMPLED) for one in self.segments)

    @property
    def turns(self) -> tuple[int, ...]:
        """Indices in the episode of the turns in the sample, in order."""
        return tuple(dict.fromkeys(one for one in self.segments if one != NOT_SAMPLED))

    def spread(self, values: Sequence[float] | Mapping[int, float]) -> list[float]:
        """Return a value of each turn at each of its tokens, and 0.0 at the others.

        Args:
            values: Value of each turn of the whole episode, by the turn's index.

        Raises:
            IndexError: A turn of the sample has no value in a sequence.
            KeyError: A turn of the sample has no value in a mapping.
        """
        return [0.0 if one == NOT_SAMPLED else float(values[one]) for one in self.segments]


@dataclass(frozen=True, slots=True)
class Packing:
    """The samples of one episode.

    Attributes:
        samples: The samples, in the order of their turns.
        left_out: Indices of the turns with sampled tokens that are in no sample: they were too long, or the episode was
            lost.
    """

    samples: tuple[Sample, ...]
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenCount:
    """What a trainer's passes read.

    Attributes:
        samples: Number of rows.
        tokens: Number of tokens in the rows, without padding.
        padded: Number of tokens with the rows' padding.
    """

    samples: int
    tokens: int
    padded: int


def pack(
    turns: Sequence[SampledTurn],
    *,
    max_tokens: int | None = None,
    merge: bool = True,
    separate_runs: bool = False,
    lost: str | None = None,
) -> Packing:
    """Return the turns of one episode in as few samples as their tokens allow.

    A turn is added to the sample before it if its prompt begins with all of the sample's tokens; what the prompt has
    more stands between the two turns. Otherwise the turn begins another sample, with its whole prompt. A turn without
    sampled tokens is in no sample, and keeps its index.

    Args:
        turns: All turns of the episode, in order.
        max_tokens: Most tokens of a sample. A turn with which a sample would be longer is left out whole, and so are
            those that continue it. None is no limit.
        merge: Whether turns share samples; without, each turn is a sample with its whole prompt.
        separate_runs: Whether turns with no token between them go into two samples. Trainers that find turns as runs of
            1 in a mask (ROLL, VeRL) would take them for one.
        lost: Reason of the infrastructure failure that ended the episode; None if there was none. Of a lost episode all
            turns are left out.

    Raises:
        ValueError: ``max_tokens`` is below 1.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: give at least 1, or None for no limit")
    samples: list[_Growing] = []
    left_out: list[int] = []
    for index, turn in enumerate(turns):
        if not turn.response_ids:
            continue
        length = len(turn.prompt_ids) + len(turn.response_ids)
        if lost is not None or (max_tokens is not None and length > max_tokens):
            left_out.append(index)
            continue
        last = samples[-1] if samples else None
        if last is None or not merge or not last.is_continued_by(turn, separate_runs):
            last = _Growing()
            samples.append(last)
        last.add(index, turn)
    return Packing(tuple(one.made() for one in samples), tuple(left_out))


def discounted(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """Return the return of each turn of an episode, ``G_k = r_k + gamma * G_(k+1)``.

    With a reward at the last turn alone it is ``gamma ** (K - k) * R`` for the k-th of K turns, counted from 1. Give it
    the rewards of all turns, before any are left out.

    Args:
        rewards: Reward of each turn.
        gamma: Discount of a turn, in [0, 1].

    Raises:
        ValueError: ``gamma`` is out of its range.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}: it has to lie in [0, 1]")
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]


def turns_of(rollout: Rollout) -> list[SampledTurn]:
    """Return the turns of a rollout with the context that each was sampled from.

    Args:
        rollout: Rollout whose ``turns`` are the runs of 1 in its mask, as `build_rollout` makes them.

    Raises:
        ValueError: The turns are not all that the mask has.
    """
    if sum(turn.stop - turn.start for turn in rollout.turns) != sum(rollout.mask):
        raise ValueError(
            f"the turns of the rollout have {sum(turn.stop - turn.start for turn in rollout.turns)} tokens, its mask "
            f"{sum(rollout.mask)}: its turns could not be separated"
        )
    return [
        SampledTurn(
            rollout.prompt_ids + rollout.completion_ids[: turn.start],
            rollout.completion_ids[turn.start : turn.stop],
            None if rollout.logprobs is None else rollout.logprobs[turn.start : turn.stop],
        )
        for turn in rollout.turns
    ]


def sample_of(rollout: Rollout) -> Sample:
    """Return a rollout, whose tokens are one row already, as the sample that `pack` makes of its turns.

    Tokens behind the last turn are in it too.

    Args:
        rollout: Rollout whose ``turns`` are the runs of 1 in its mask, as `build_rollout` makes them. One without
            turns, or with some that could not be separated, has one segment for each run of its mask.
    """
    segments = [NOT_SAMPLED] * len(rollout.completion_ids)
    before, run = 0, NOT_SAMPLED
    for place, sampled in enumerate(rollout.mask):
        if sampled:
            run += not before
            segments[place] = run
        before = sampled
    for turn in rollout.turns:
        segments[turn.start : turn.stop] = [turn.index] * (turn.stop - turn.start)
    prompt = len(rollout.prompt_ids)
    return Sample(
        rollout.prompt_ids + rollout.completion_ids,
        (NOT_SAMPLED,) * prompt + tuple(segments),
        None if rollout.logprobs is None else (0.0,) * prompt + rollout.logprobs,
    )


def counted(samples: Sequence[Sample], *, length: int | None = None) -> TokenCount:
    """Return the number of rows and tokens that a trainer's pass over samples reads.

    Args:
        samples: The samples.
        length: Tokens to which each row is padded; None is the longest row's.

    Raises:
        ValueError: A sample is longer than ``length``.
    """
    longest = max((len(one.ids) for one in samples), default=0)
    if length is not None and longest > length:
        raise ValueError(f"a sample has {longest} tokens, and rows are padded to {length}")
    return TokenCount(
        len(samples), sum(len(one.ids) for one in samples), len(samples) * (longest if length is None else length)
    )


class _Growing:
    """A sample that turns are added to."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.segments: list[int] = []
        self.logprobs: list[float] | None = []

    def is_continued_by(self, turn: SampledTurn, separate_runs: bool) -> bool:
        """Return whether a turn's prompt begins with all tokens of the sample, and leaves the turns apart."""
        kept = len(self.ids)
        if separate_runs and len(turn.prompt_ids) == kept:
            return False
        return len(turn.prompt_ids) >= kept and list(turn.prompt_ids[:kept]) == self.ids

    def add(self, index: int, turn: SampledTurn) -> None:
        """Add what a turn's prompt has more than the sample, and the turn."""
        between = turn.prompt_ids[len(self.ids) :]
        self.ids += [*between, *turn.response_ids]
        self.segments += [NOT_SAMPLED] * len(between) + [index] * len(turn.response_ids)
        if self.logprobs is not None:
            known = turn.logprobs
            self.logprobs = None if known is None else [*self.logprobs, *[0.0] * len(between), *known]

    def made(self) -> Sample:
        """Return the sample."""
        return Sample(tuple(self.ids), tuple(self.segments), None if self.logprobs is None else tuple(self.logprobs))
