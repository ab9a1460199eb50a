"""total = grpo + alpha_sdpo * sdpo_kl + beta_replay * trace_replay_dpo

A channel has few tokens or pairs, unevenly distributed over ranks and micro-batches. Means over each micro-batch would
give a token more weight the fewer there are. So each channel is a sum here, divided by the number of tokens or pairs of
the whole optimizer step; its gradient is that of one mean over the step, however the step is split. Trainers average
gradients over ranks, and some over micro-batches; the result is scaled up by that factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import not_negative, positive

SDPO, DPO = "sdpo_kl", "trace_replay_dpo"


@dataclass(frozen=True, slots=True)
class Term:
    """One channel's summed loss in one micro-batch of one rank.

    Attributes:
        total: Sum of the loss over the channel's tokens or pairs, weighted or not: 0-d, attached.
        count: Number of tokens or pairs (or sum of their weights) that the optimizer step has in all micro-batches of
            all ranks: 0-d.
    """

    total: Tensor
    count: Tensor

    def mean_part(self) -> Tensor:
        """Return ``total / count`` (0-d). Over the micro-batches and ranks of a step these parts add up to the mean. 0
        if the count is 0."""
        count = self.count.to(self.total.device, self.total.dtype)
        return self.total / (count + (count == 0))


def compose(
    grpo: Tensor,
    *,
    sdpo: Term | None = None,
    dpo: Term | None = None,
    alpha_sdpo: float = 0.1,
    beta_replay: float = 0.05,
    averaged_over: int = 1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the total loss of a micro-batch.

    Args:
        grpo: The trainer's own loss, scaled as the trainer wants it: 0-d.
        sdpo: Term of channel 2; None if it has nothing to train on.
        dpo: Term of channel 3; None if it has nothing to train on.
        alpha_sdpo: Weight of channel 2, >= 0. With 0 the channel is left out, whatever its term holds.
        beta_replay: Weight of channel 3, >= 0. With 0 the channel is left out, whatever its term holds.
        averaged_over: Number of losses that the trainer averages, > 0: the ranks, times the micro-batches where it
            divides by them (TRL does not: its GRPO loss is scaled when it is computed).

    Returns:
        The loss, 0-d; without channels ``grpo`` itself, the same tensor. And without gradient ``loss/grpo``, and of
        each channel with work ``loss/sdpo_kl`` and ``loss/trace_replay_dpo``, its part of the step's mean before its
        weight (`Term.mean_part`).

    Raises:
        ValueError: A weight or ``averaged_over`` out of its range.
    """
    not_negative("alpha_sdpo", alpha_sdpo)
    not_negative("beta_replay", beta_replay)
    positive("averaged_over", averaged_over)
    loss, metrics = grpo, {"loss/grpo": grpo.detach()}
    for name, term, weight in ((SDPO, sdpo, alpha_sdpo), (DPO, dpo, beta_replay)):
        if term is None or weight == 0.0:
            continue
        part = term.mean_part()
        loss = loss + (weight * averaged_over) * part
        metrics[f"loss/{name}"] = part.detach()
    return loss, metrics


def global_counts(counts: Mapping[str, float], *, device: torch.device | str, group: Any = None) -> dict[str, Tensor]:
    """Sum counts over ranks, in one message. All ranks have to call it.

    Args:
        counts: This rank's counts by name, over all its micro-batches of a step; every rank has to give the same names.
        device: Device for the tensors, one that the group's backend accepts.
        group: Process group of `torch.distributed`; None for all ranks.

    Returns:
        0-d float64 tensors by name; this rank's own counts where nothing is distributed.
    """
    names = sorted(counts)
    totals = torch.tensor([float(counts[name]) for name in names], dtype=torch.float64, device=device)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(totals, group=group)
    return dict(zip(names, totals.unbind(), strict=True))


def gradient_norms(losses: Mapping[str, Tensor], parameters: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the gradient norm of each loss. Each needs a backward pass of its own, so use it for occasional logging.

    The graphs are kept for the backward pass of the sum. Nothing is communicated and no ``grad`` is touched.
    Reentrant gradient checkpointing refuses it.

    Args:
        losses: Losses by name, weighted or not: 0-d.
        parameters: Parameters of the model.

    Returns:
        0-d by name: the norm over all parameters; 0 for a loss without a graph.
    """
    wanted = [p for p in parameters if p.requires_grad]
    norms = {}
    for name, loss in losses.items():
        squares = torch.zeros((), dtype=torch.promote_types(loss.dtype, torch.float32), device=loss.device)
        if loss.requires_grad:
            for gradient in torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True):
                if gradient is not None:
                    squares = squares + gradient.to(squares.dtype).square().sum().to(squares.device)
        norms[name] = squares.sqrt()
    return norms
