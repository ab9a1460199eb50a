"""Channel 3 in TRL's loss: at replayed states, what teachers agreed on against what the student did."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...channels.distil import action_logprobs
from ...channels.dpo import LossType, dpo_losses, dpo_metrics, segment_sums
from ...channels.forward import frozen_states, trained_states
from ...channels.heads import output_head
from ...rollout import DpoPair

PAIRS, PAIR_COUNT = "dpo_pairs", "dpo_pair_count"
"""Keys of a batch: for each row a tuple of `DpoPair`, and how many all ranks' generation batch has."""


class Preferences:
    """Computes the channel's loss of a micro-batch, and the reference's log-probabilities of new pairs.

    Args:
        beta_dpo: How strongly the reference holds.
        loss_type: ``sigmoid`` or ``sigmoid_norm``.
    """

    def __init__(self, beta_dpo: float, loss_type: LossType = "sigmoid") -> None:
        self.beta_dpo = beta_dpo
        self.loss_type = loss_type

    def loss(self, model: Any, pairs: Sequence[DpoPair], *, pad_id: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum over pairs, 0-d and attached, and the sums of `dpo_metrics`.

        Args:
            model: As the trainer calls it.
            pairs: At least one, each with the reference's log-probabilities.
            pad_id: Of the tokenizer.
        """
        rows, positions, lengths = _rows(pairs)
        states = trained_states(model, rows, positions, pad_id=pad_id)
        chosen, rejected = self._summed(model, states, pairs, lengths)
        device = chosen.device
        ref_chosen = torch.tensor([pair.ref_chosen for pair in pairs], dtype=chosen.dtype, device=device)
        ref_rejected = torch.tensor([pair.ref_rejected for pair in pairs], dtype=chosen.dtype, device=device)
        each = {
            "beta_dpo": self.beta_dpo,
            "loss_type": self.loss_type,
            "lengths": tuple(t.to(chosen.dtype) for t in lengths.to(device).view(2, -1)),
        }
        losses = dpo_losses(chosen, rejected, ref_chosen, ref_rejected, **each)  # type: ignore[arg-type]
        weights = torch.tensor([pair.weight for pair in pairs], dtype=losses.dtype, device=device)
        metrics = dpo_metrics(chosen, rejected, ref_chosen, ref_rejected, **each)  # type: ignore[arg-type]
        return (losses * weights).sum(), metrics

    def referred(self, model: Any, pairs: Sequence[DpoPair], reference: str, *, adapter: bool) -> list[DpoPair]:
        """Return pairs with the log-probabilities of a frozen reference.

        Args:
            model: The reference; with ``adapter``, the student, whose adapter is switched off for it.
            pairs: New ones.
            reference: What it is called.
            adapter: See ``model``.
        """
        if not pairs:
            return []
        with model.disable_adapter() if adapter else nullcontext(), torch.no_grad():
            rows, positions, lengths = _rows(pairs)
            states = frozen_states(model, rows, positions)
            chosen, rejected = self._summed(model, states, pairs, lengths)
        return [
            replace(pair, ref_chosen=float(c), ref_rejected=float(r), reference=reference)
            for pair, c, r in zip(pairs, chosen, rejected, strict=True)
        ]

    @staticmethod
    def _summed(model: Any, states: Tensor, pairs: Sequence[DpoPair], lengths: Tensor) -> tuple[Tensor, Tensor]:
        ids = [*(pair.chosen_ids for pair in pairs), *(pair.rejected_ids for pair in pairs)]
        targets = torch.tensor([id for action in ids for id in action], device=states.device)
        head = output_head(model)
        logprobs = action_logprobs(states, targets, head.weight, head.bias, transform=head.transform)
        chosen, rejected = segment_sums(logprobs, lengths.to(states.device)).view(2, -1)
        return chosen, rejected


def _rows(pairs: Sequence[DpoPair]) -> tuple[list[tuple[int, ...]], list[list[int]], Tensor]:
    """Return rows of all chosen, then all rejected actions, where their tokens are predicted, and their lengths."""
    rows, positions, lengths = [], [], []
    for side in ("chosen_ids", "rejected_ids"):
        for pair in pairs:
            action: tuple[int, ...] = getattr(pair, side)
            rows.append(pair.context_ids + action)
            positions.append(list(range(len(pair.context_ids) - 1, len(pair.context_ids) + len(action) - 1)))
            lengths.append(len(action))
    return rows, positions, torch.tensor(lengths)
