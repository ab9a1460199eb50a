"""A trajectory of ROLL's history as rows of tokens. No tensors, and nothing of ROLL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...packing import SampledTurn, discounted, pack


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch: as many turns of a trajectory as share their tokens.

    Attributes:
        ids: Tokens of the row, without padding.
        segments: Index of the turn that sampled a token, for each of ``ids``; -1 elsewhere.
        logprobs: Log-probability of each of ``ids`` when it was sampled, 0.0 elsewhere; None if unknown.
        turns: Indices of the row's turns in the trajectory.
        rewards: Reward of each of ``turns``.
        returns: Discounted return of the turn, at each of its tokens; 0.0 elsewhere.
        score: Reward of the whole trajectory, discounted by the turns behind the row; at the row's last token.
    """

    ids: tuple[int, ...]
    segments: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    turns: tuple[int, ...]
    rewards: tuple[float, ...]
    returns: tuple[float, ...]
    score: float

    @property
    def first(self) -> int:
        """Place of the first sampled token."""
        return next(place for place, one in enumerate(self.segments) if one >= 0)


def settled(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns of ROLL's history that were sampled, and give the last one the rewards of what follows.

    Behind it an entry without ``response_ids`` may follow, where the episode ended because the context was full. ROLL
    makes no sample of that, and would drop its reward.

    Args:
        history: ROLL's history of a trajectory; its rewards are changed.
    """
    count = next((at for at, one in enumerate(history) if "response_ids" not in one), len(history))
    for tail in history[count:] if count else ():
        history[count - 1]["reward"] += tail.get("reward", 0.0)
        if "reward" in tail:
            tail["reward"] = 0.0
    return list(history[:count])


def trajectory_rows(
    sampled: Sequence[Mapping[str, Any]],
    *,
    max_tokens: int,
    gamma: float = 1.0,
    step_gamma: float = 1.0,
) -> list[Row]:
    """Return the rows of a trajectory.

    ROLL gives a row one reward, at its last sampled token, and its estimator ``agentic_reinforce`` discounts that from
    the last turn back: ``G_k = gamma ** (K - k) * R`` for the k-th of K turns. Where a trajectory has several rows, or
    turns were left out behind a row, the row's score is discounted by the turns behind it (``gamma``), so that the k-th
    turn has the same return in any packing.

    Args:
        sampled: Turns of the trajectory, of `settled`: ``prompt_ids``, ``response_ids``, ``reward``, and
            ``infer_logprobs`` if they are known.
        max_tokens: Most tokens of a row. Turns with which it would be longer are left out whole.
        gamma: Discount of a turn behind the row, for ``score``. 1.0 where a mean of the group is subtracted from it: a
            discounted score of a good trajectory could fall below the mean.
        step_gamma: Discount of a turn for ``returns``, which are those of ROLL's ``compute_discounted_returns``.
    """
    rewards = [float(one["reward"]) for one in sampled]
    returns = discounted(rewards, step_gamma)
    turns = [_turn(one) for one in sampled]
    return [
        Row(
            sample.ids,
            sample.segments,
            sample.logprobs,
            sample.turns,
            tuple(rewards[turn] for turn in sample.turns),
            tuple(sample.spread(returns)),
            sum(rewards) * gamma ** (len(sampled) - 1 - sample.turns[-1]),
        )
        for sample in pack(turns, max_tokens=max_tokens, separate_runs=True).samples
    ]


def _turn(one: Mapping[str, Any]) -> SampledTurn:
    logprobs = one.get("infer_logprobs")
    return SampledTurn(
        tuple(one["prompt_ids"]), tuple(one["response_ids"]), None if logprobs is None else tuple(logprobs)
    )
