"""Losses of channels 2 and 3 for Tinker's ``forward_backward_custom``, from the log-probabilities that it returns.

The service sends the student's log-probabilities of a Datum's targets; the loss is computed here, and its gradient with
respect to them is what the service back-propagates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...channels.dpo import LossType, chosen_nll, dpo_losses, dpo_metrics
from ...channels.sampled import PADDING
from ...channels.sdpo import Divergence, compare_lists
from ...rollouts.rollout import DpoPair, SdpoItem
from .datums import check_pairs

CustomLoss = Callable[[Sequence[Any], Sequence[Tensor]], tuple[Tensor, dict[str, float]]]
"""Function that ``forward_backward_custom`` takes."""


def preference_loss(
    pairs: Sequence[DpoPair],
    *,
    beta_dpo: float = 0.1,
    loss_type: LossType = "sigmoid",
    nll: float = 0.0,
    scale: float | None = None,
) -> CustomLoss:
    """Return channel 3 as a loss of `pair_datums`' log-probabilities.

    Args:
        pairs: The pairs, in the order of the Datums, with reference log-probabilities.
        beta_dpo: Strength of the pull towards the reference, > 0.
        loss_type: Kind of loss, ``sigmoid`` or ``sigmoid_norm``; see `dpo_loss`.
        nll: Weight of the chosen action's negative log-likelihood.
        scale: Factor of the sum over pairs, e.g. beta_replay over the number of pairs; None is one over their number.

    Raises:
        ValueError: A pair has no reference log-probabilities, or an empty context or action.
    """
    check_pairs(pairs)
    for number, pair in enumerate(pairs):
        if pair.ref_chosen is None or pair.ref_rejected is None:
            raise ValueError(f"pair {number} has no reference log-probabilities: see TinkerPolicy.referred")
    reference = torch.tensor([(pair.ref_chosen, pair.ref_rejected) for pair in pairs], dtype=torch.float64)
    weights = torch.tensor([pair.weight for pair in pairs], dtype=torch.float64)
    lengths = torch.tensor([(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in pairs])
    factor = 1 / max(1, len(pairs)) if scale is None else scale

    def loss(_: Sequence[Any], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        if len(logprobs) != 2 * len(pairs):
            raise ValueError(f"{len(logprobs)} Datums for {len(pairs)} pairs: give pair_datums of the same pairs")
        counts = lengths.flatten().tolist()
        sums = torch.stack([one[-count:].double().sum() for one, count in zip(logprobs, counts, strict=True)])
        chosen, rejected = sums[0::2], sums[1::2]
        both = (lengths[:, 0], lengths[:, 1])
        losses = dpo_losses(
            chosen, rejected, reference[:, 0], reference[:, 1], beta_dpo=beta_dpo, loss_type=loss_type, lengths=both
        )
        if nll:
            losses = losses + nll * chosen_nll(chosen, both)
        metrics = dpo_metrics(
            chosen.detach(),
            rejected.detach(),
            reference[:, 0],
            reference[:, 1],
            beta_dpo=beta_dpo,
            loss_type=loss_type,
            lengths=both,
        )
        means = {f"dpo/{name}": float(value) / max(1, len(pairs)) for name, value in metrics.items() if name != "pairs"}
        return factor * (losses * weights).sum(), {"dpo/pairs": float(len(pairs)), **means}

    return loss


def divergence_loss(
    items: Sequence[SdpoItem],
    teacher: Sequence[tuple[Tensor, Tensor]],
    *,
    divergence: Divergence | None = None,
    scale: float | None = None,
) -> CustomLoss:
    """Return channel 2's divergence over lists of ids as a loss of `divergence_datums`' log-probabilities.

    Args:
        items: Error sites, in the order of the Datums.
        teacher: ``[N, K]`` ids and ``[N, K]`` log-probabilities of each item, as `TinkerPolicy.teacher_lists` returns
            them.
        divergence: Divergence to compare by; default: the generalized JSD of the lists with their tail.
        scale: Factor of the sum over targets, e.g. alpha_sdpo over their number; None is one over their number.

    Raises:
        ValueError: The divergence has a temperature, or the support ``student``: a service returns the teacher's lists,
            at temperature 1.
    """
    compared = divergence or Divergence(top_k=max((ids.shape[-1] for ids, _ in teacher), default=1), tail=True)
    if compared.temperature != 1.0:
        raise ValueError(f"temperature is {compared.temperature}: a service's log-probabilities are at temperature 1")
    if compared.support != "teacher":
        raise ValueError(f"support is {compared.support!r}: the lists are the teacher's likeliest tokens")
    targets = sum(len(item.target_ids) for item in items)
    factor = 1 / max(1, targets) if scale is None else scale

    def loss(_: Sequence[Any], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        if len(logprobs) != len(items):
            raise ValueError(f"{len(logprobs)} Datums for {len(items)} items: give divergence_datums of the same items")
        total = torch.zeros((), dtype=torch.float64)
        plain = 0.0
        for item, (ids, known), found in zip(items, teacher, logprobs, strict=True):
            student = found[list(item.student_positions)].double()
            each = compare_lists(compared, student, known.double(), ids != PADDING)
            total = total + item.weight * each.sum()
            plain += float(each.detach().sum())
        return factor * total, {"sdpo/kl": plain / max(1, targets), "sdpo/tokens": float(targets)}

    return loss
