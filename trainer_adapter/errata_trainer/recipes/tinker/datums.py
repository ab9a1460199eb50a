"""Rollouts, error sites and pairs as Tinker's ``Datum``.

A Datum's arrays are shifted: entry ``n`` is about token ``n + 1`` of the row, as `SdpoItem.student_positions` are.
Tinker's losses are sums over all tokens of all Datums, without a mean: ``scale`` is the divisor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from tinker import types

from errata_protocol.errors import ServiceError

from ...channels.sampled import sampled_token_advantages
from ...packing import Sample, sample_of
from ...rollouts.rollout import DpoPair, Rollout, SdpoItem


def group_advantages(rollouts: Sequence[Rollout], groups: Sequence[Hashable]) -> list[float]:
    """Return the reward of each rollout minus the mean of its group's episodes.

    Args:
        rollouts: Rollouts of a batch. Those with the same ``eid`` are of one episode, which counts once.
        groups: Task of each rollout, as any key: rollouts with equal keys are a group.

    Returns:
        One number for each rollout. Rollouts that are lost or have no reward count for no mean and have 0, as has an
        episode that is alone in its group.
    """
    rewards: defaultdict[Hashable, dict[Hashable, float]] = defaultdict(dict)
    for row, (rollout, group) in enumerate(zip(rollouts, groups, strict=True)):
        if (reward := _reward(rollout)) is not None:
            rewards[group][row if rollout.eid is None else rollout.eid] = reward
    found = []
    for rollout, group in zip(rollouts, groups, strict=True):
        reward, of_group = _reward(rollout), rewards[group].values()
        found.append(0.0 if reward is None else reward - sum(of_group) / len(of_group))
    return found


def datums(
    rollouts: Sequence[Rollout],
    items: Sequence[Sequence[SdpoItem]] = (),
    *,
    advantages: Sequence[float | Sequence[float]],
    teacher_logprobs: Sequence[Sequence[Sequence[float]]] = (),
    alpha_sdpo: float = 0.1,
    clip: float | None = None,
    scale: float = 1.0,
) -> list[types.Datum]:
    """Return rollouts for ``forward_backward(data, "importance_sampling")``: channels 1 and 2 in one advantage.

    At each sampled token it is the rollout's advantage plus, at the targets of error sites, ``alpha_sdpo`` times the
    log-probability that the teacher gives the token with a hint minus that with which it was sampled. The gradient is
    that of `sampled_token_loss_from_logprobs`.

    Args:
        rollouts: Rollouts of a batch, B in all, with log-probabilities.
        items: Error sites of each rollout; empty for no channel 2.
        advantages: Advantage of each rollout, or of each of its turns.
        teacher_logprobs: Log-probabilities of each item's ``target_ids`` with the hint, as
            `TinkerPolicy.teacher_logprobs` returns them.
        alpha_sdpo: Weight of channel 2, >= 0.
        clip: Upper bound of the absolute log-ratio in channel 2, in nats; None for no bound.
        scale: Factor of all advantages, e.g. one over the number of rollouts or of sampled tokens.

    Returns:
        One Datum for each rollout that is not lost and has a sampled token, in order, with ``target_tokens``,
        ``logprobs`` and ``advantages``.

    Raises:
        ValueError: A rollout without log-probabilities; lists of different lengths; a number that is not finite.
    """
    sites = items if items else [()] * len(rollouts)
    scores = teacher_logprobs if teacher_logprobs else [()] * len(rollouts)
    for name, given in (("advantages", advantages), ("items", sites), ("teacher_logprobs", scores)):
        if len(given) != len(rollouts):
            raise ValueError(f"{len(rollouts)} rollouts, and {name} of {len(given)}")
    made = []
    for row, (rollout, advantage, of_row, found) in enumerate(zip(rollouts, advantages, sites, scores, strict=True)):
        if rollout.lost is not None or not any(rollout.mask):
            continue
        if len(of_row) != len(found):
            raise ValueError(f"rollout {row} has {len(of_row)} error sites, and teacher_logprobs of {len(found)}")
        sample = sample_of(rollout)
        if sample.logprobs is None:
            raise ValueError(f"rollout {row} has no log-probabilities, which importance sampling needs")
        if isinstance(advantage, Sequence) and len(advantage) != len(rollout.turns):
            raise ValueError(f"rollout {row} has {len(rollout.turns)} turns, and {len(advantage)} advantages")
        at_tokens = _at_tokens(sample, advantage)[1:]
        if not all(map(math.isfinite, (*sample.logprobs, *at_tokens))):
            raise ValueError(f"rollout {row} has a log-probability or an advantage that is not finite")
        for item, teacher in zip(of_row, found, strict=True):
            for place, added in zip(
                item.student_positions, _channel_2(sample, item, teacher, alpha_sdpo, clip), strict=True
            ):
                at_tokens[place] += added
        made.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(list(sample.ids[:-1])),
                loss_fn_inputs={
                    "target_tokens": list(sample.ids[1:]),
                    "logprobs": list(sample.logprobs[1:]),
                    "advantages": [scale * one for one in at_tokens],
                },
            )
        )
    return made


def pair_datums(pairs: Sequence[DpoPair]) -> list[types.Datum]:
    """Return pairs for ``forward_backward_custom`` with `preference_loss`: chosen and rejected of each in turn.

    Args:
        pairs: Pairs of channel 3.

    Returns:
        Two Datums for each pair, with ``target_tokens`` and, as ``weights``, 1 at the tokens of the action.

    Raises:
        ValueError: A pair has an empty context or action.
    """
    check_pairs(pairs)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints([*pair.context_ids, *action][:-1]),
            loss_fn_inputs={
                "target_tokens": [*pair.context_ids, *action][1:],
                "weights": [0.0] * (len(pair.context_ids) - 1) + [1.0] * len(action),
            },
        )
        for pair in pairs
        for action in (pair.chosen_ids, pair.rejected_ids)
    ]


def check_pairs(pairs: Sequence[DpoPair]) -> None:
    """Check that pairs have something to compare, and a state to compare it at.

    Raises:
        ValueError: A pair has an empty context or action.
    """
    for number, pair in enumerate(pairs):
        if not (pair.context_ids and pair.chosen_ids and pair.rejected_ids):
            raise ValueError(f"pair {number} has an empty context or action")


def divergence_datums(
    rollouts: Sequence[Rollout], items: Sequence[Sequence[SdpoItem]], ids: Sequence[Sequence[torch.Tensor]]
) -> list[types.Datum]:
    """Return error sites for ``forward_backward_custom`` with `divergence_loss`: the tokens to compare at each target.

    Args:
        rollouts: Rollouts of a batch.
        items: Error sites of each rollout.
        ids: ``[N, K]`` int64 ids of each item's N targets, as `TinkerPolicy.teacher_lists` returns them.

    Returns:
        One Datum for each item, its row cut behind the last target, with ``target_tokens`` [T, K], 0 at other places,
        and ``weights`` [T, K], the item's weight at the targets and 0 at other places.

    Raises:
        ValueError: A rollout with error sites is lost.
    """
    made = []
    for row_number, (rollout, of_row, lists) in enumerate(zip(rollouts, items, ids, strict=True)):
        if of_row and rollout.lost is not None:
            raise ValueError(f"rollout {row_number} is lost and has error sites: nothing of it is trained on")
        row = rollout.prompt_ids + rollout.completion_ids
        for item, listed in zip(of_row, lists, strict=True):
            length = max(item.student_positions) + 1
            targets = torch.zeros(length, listed.shape[1], dtype=torch.int64)
            weights = torch.zeros(length, listed.shape[1])
            targets[list(item.student_positions)] = listed.clamp(min=0)
            weights[list(item.student_positions)] = item.weight
            made.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(list(row[:length])),
                    # Dense: a tensor under this name would be sent as a sparse one, which custom losses cannot read.
                    loss_fn_inputs={
                        "target_tokens": types.TensorData.from_torch(targets),
                        "weights": types.TensorData.from_torch(weights),
                    },
                )
            )
    return made


def by_token(ids: Sequence[int], found: Sequence[float | None]) -> list[float | None]:
    """Return the log-probability of each token of a row from a service's list, the first one None.

    The official service has an entry for each token, SkyRL's none for the first: the ends fit in both.

    Args:
        ids: Tokens that were scored.
        found: List that ``compute_logprobs`` returned.

    Raises:
        ServiceError: The list has another number of entries.
    """
    missing = len(ids) - len(found)
    if missing not in (0, 1):
        raise ServiceError(f"the service returned {len(found)} log-probabilities for a row of {len(ids)} tokens")
    return [None, *found[1 - missing :]]


def of_tokens(ids: Sequence[int], found: Sequence[float | None], positions: Sequence[int]) -> list[float]:
    """Return the log-probabilities of the tokens behind positions of a row, from a service's list.

    Args:
        ids: Tokens that were scored.
        found: List that ``compute_logprobs`` returned.
        positions: Position before each token.

    Raises:
        ServiceError: The list has another number of entries, or none for such a token.
    """
    known = by_token(ids, found)
    values = [known[position + 1] for position in positions]
    for position, value in zip(positions, values, strict=True):
        if value is None or not math.isfinite(value):
            raise ServiceError(f"the service returned {value} as the log-probability of token {position + 1} of a row")
    return [float(value) for value in values if value is not None]


def _reward(rollout: Rollout) -> float | None:
    return None if rollout.lost is not None else rollout.reward


def _at_tokens(sample: Sample, advantage: float | Sequence[float]) -> list[float]:
    """Return an advantage at each sampled token of a row, 0 elsewhere."""
    if isinstance(advantage, Sequence):
        return sample.spread(advantage)
    return sample.spread(dict.fromkeys(sample.turns, advantage))


def _channel_2(
    sample: Sample, item: SdpoItem, teacher: Sequence[float], alpha_sdpo: float, clip: float | None
) -> list[float]:
    """Return what an error site adds to the advantage of each of its targets."""
    if len(teacher) != len(item.target_ids):
        raise ValueError(f"turn {item.turn} has {len(item.target_ids)} targets and {len(teacher)} log-probabilities")
    own = sample.logprobs or ()
    student = torch.tensor([[own[place + 1] for place in item.student_positions]], dtype=torch.float64)
    mask = torch.ones_like(student, dtype=torch.bool)
    given = torch.tensor([list(teacher)], dtype=torch.float64)
    added: list[float] = sampled_token_advantages(student, given, mask, weight=alpha_sdpo * item.weight, clip=clip)[
        0
    ].tolist()
    return added
