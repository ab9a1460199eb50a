"""Connects channel 3 to a trainer's batch: the action that teachers agreed on is preferred to the student's own at that
state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..channels.arguments import not_negative
from ..channels.distil import action_logprobs
from ..channels.dpo import LossType, chosen_nll, dpo_losses, dpo_metrics, segment_sums
from ..channels.forward import Captured, capture_hidden, collective, frozen_states, trained_states
from ..channels.heads import OutputHead, output_head
from ..channels.pairs import PairRows, action_rows
from ..rollouts.rollout import DpoPair, Rollout
from .layouts import layout_of

PAIRS, PAIR_COUNT = "dpo_pairs", "dpo_pair_count"
"""Keys of a batch: for each row a tuple of `DpoPair`, and how many all ranks' generation batch has."""

OWN = "dpo_own"
"""Key of a batch: for each row and pair, whether the row itself holds the rejected action."""


class Preferences:
    """Computes channel 3's loss of a micro-batch, and the reference log-probabilities of new pairs.

    Args:
        beta_dpo: DPO's beta: strength of the pull towards the reference, > 0.
        loss_type: ``sigmoid`` or ``sigmoid_norm``.
        nll: Weight of the chosen action's negative log-likelihood per token, added to DPO's loss, >= 0. It is counted
            from the reference's, which changes no gradient: where the policy is its reference the loss is ln 2, as
            DPO's.
        head_precision: Returns the context in which hidden states of policy and reference are multiplied with the
            output embedding, e.g. the trainer's ``autocast``. By default the caller's own context applies.

    Raises:
        ValueError: ``nll`` is negative.
    """

    def __init__(
        self,
        beta_dpo: float,
        loss_type: LossType = "sigmoid",
        nll: float = 0.0,
        *,
        head_precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        not_negative("nll", nll)
        self.head_precision = head_precision
        self.beta_dpo, self.nll = beta_dpo, nll
        self.loss_type = loss_type

    @contextmanager
    def capturing(self, model: Any, inputs: dict[str, Any]) -> Iterator[BatchPairs]:
        """Capture the hidden states of rejected actions in the micro-batch from the forward pass in the block."""
        own = own_actions(inputs)
        rows = [row for row, columns in own.places.values() for _ in columns]
        columns = [column for _, columns in own.places.values() for column in columns]
        if not rows:
            yield own
            return
        with capture_hidden(model, torch.tensor(rows), torch.tensor(columns)) as captured:
            yield replace(own, captured=captured)

    def loss(self, model: Any, own: BatchPairs, *, pad_id: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return channel 3's loss of a micro-batch, and its metrics.

        Actions whose hidden states are in ``own.captured`` are not forwarded again.

        Args:
            model: The policy, as the trainer calls it.
            own: The micro-batch's pairs, at least one, each with the reference's log-probabilities.
            pad_id: The tokenizer's pad token.

        Returns:
            The sum over pairs of the pair's weight times its loss, a 0-d tensor with gradient. The metrics are those of
            `dpo_metrics`; ``chosen_nll``, the sum of the chosen actions' negative log-likelihood per token; and
            ``reused``, the number of actions that were not forwarded again.
        """
        pairs, head = own.pairs, output_head(model)
        others = [n for n in range(len(pairs)) if n not in own.places]
        asked = action_rows(
            [(pair.context_ids, pair.chosen_ids) for pair in pairs]
            + [(pairs[n].context_ids, pairs[n].rejected_ids) for n in others]
        )
        summed = self._summed(head, trained_states(model, asked.rows, asked.positions, pad_id=pad_id), asked)
        chosen, rest = summed[: len(pairs)], summed[len(pairs) :]
        rejected = dict(zip(others, rest, strict=True))
        if own.captured is not None:
            placed = action_rows([(pairs[n].context_ids, pairs[n].rejected_ids) for n in own.places])
            rejected |= dict(zip(own.places, self._summed(head, own.captured.hidden(), placed), strict=True))
        refs = torch.tensor([(p.ref_chosen, p.ref_rejected) for p in pairs], dtype=chosen.dtype, device=chosen.device)
        lengths = torch.tensor([(len(p.chosen_ids), len(p.rejected_ids)) for p in pairs])
        sides = (chosen, torch.stack([rejected[n] for n in range(len(pairs))]), refs[:, 0], refs[:, 1])
        length_pair = (lengths[:, 0], lengths[:, 1])
        losses = dpo_losses(*sides, beta_dpo=self.beta_dpo, loss_type=self.loss_type, lengths=length_pair)
        metrics = dpo_metrics(*sides, beta_dpo=self.beta_dpo, loss_type=self.loss_type, lengths=length_pair)
        likelihood = chosen_nll(chosen, length_pair)
        if self.nll:
            losses = losses + self.nll * (likelihood - chosen_nll(refs[:, 0], length_pair))
        metrics["chosen_nll"] = likelihood.detach().sum()
        metrics["reused"] = torch.tensor(float(len(own.places)))
        return (losses * torch.tensor([pair.weight for pair in pairs]).to(losses)).sum(), metrics

    def idle(self, model: Any, *, pad_id: int) -> Tensor:
        """Return a zero loss (0-d) from a dummy pass, for a rank without pairs while other ranks have some.

        Args:
            model: The policy, as the trainer calls it.
            pad_id: The tokenizer's pad token.
        """
        head, rows = output_head(model), action_rows([((pad_id,), (pad_id,))])
        return self._summed(head, trained_states(model, rows.rows, rows.positions, pad_id=pad_id), rows).sum() * 0.0

    def referred(self, model: Any, pairs: Sequence[DpoPair], reference: str, *, adapter: bool) -> list[DpoPair]:
        """Return pairs with the log-probabilities of the frozen reference filled in.

        Where the reference's passes are collective, every rank has to call it, without pairs too.

        Args:
            model: The reference. With ``adapter``, the student: its adapter is switched off for the pass.
            pairs: Pairs without reference log-probabilities.
            reference: Name of the reference, kept in the pairs.
            adapter: Whether ``model`` is the student with an adapter to switch off.
        """
        if not pairs and not collective(model):
            return []
        asked = action_rows(
            [(pair.context_ids, pair.chosen_ids) for pair in pairs]
            + [(pair.context_ids, pair.rejected_ids) for pair in pairs]
        )
        with model.disable_adapter() if adapter else nullcontext(), torch.no_grad():
            states = frozen_states(model, asked.rows, asked.positions)
            chosen, rejected = self._summed(output_head(model), states, asked).view(2, -1).tolist()
        return [
            replace(pair, ref_chosen=c, ref_rejected=r, reference=reference)
            for pair, c, r in zip(pairs, chosen, rejected, strict=True)
        ]

    def _summed(self, head: OutputHead, states: Tensor, rows: PairRows) -> Tensor:
        """Return the summed log-probability of each action, from the states that predict their tokens."""
        targets = torch.tensor(rows.target_ids, dtype=torch.int64, device=states.device)
        with self.head_precision():
            logprobs = action_logprobs(states, targets, head.weight, head.bias, transform=head.transform)
        return segment_sums(logprobs, rows.lengths)


@dataclass(frozen=True, slots=True)
class BatchPairs:
    """Pairs of a micro-batch, and which rejected actions are the micro-batch's own turns.

    Attributes:
        pairs: All pairs, in the order of rows.
        places: Row and columns of the model's input whose states predict a rejected action, by the index of its pair.
            Pairs whose rejected action is not in the batch are left out.
        captured: Hidden states at ``places``; None if there are none.
    """

    pairs: Sequence[DpoPair]
    places: Mapping[int, tuple[int, Sequence[int]]]
    captured: Captured | None = None


def rejected_here(pairs: Sequence[DpoPair], rollout: Rollout, *, trained: bool) -> tuple[bool, ...]:
    """Return for each pair whether its rejected action is in this row, so that the trainer's pass has its hidden
    states.

    Args:
        pairs: Pairs of this row.
        rollout: Rollout of this row.
        trained: Whether the row is attended to at all; if not, no pair is here.
    """
    ids = rollout.prompt_ids + rollout.completion_ids
    sides = [pair.context_ids + pair.rejected_ids for pair in pairs]
    return tuple(trained and ids[: len(side)] == side for side in sides)


def own_actions(inputs: dict[str, Any]) -> BatchPairs:
    """Return the pairs of a micro-batch, and the positions of rejected actions that are in the micro-batch itself."""
    pairs: list[DpoPair] = []
    places: dict[int, tuple[int, Sequence[int]]] = {}
    for row, found in enumerate(inputs[PAIRS]):
        for pair, own in zip(found, inputs[OWN][row] if found else (), strict=True):
            if own:
                first = len(pair.context_ids) - 1
                places[len(pairs)] = layout_of(inputs).columns(row, range(first, first + len(pair.rejected_ids)))
            pairs.append(pair)
    return BatchPairs(pairs, places)
