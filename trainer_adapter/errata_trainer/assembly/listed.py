"""Channel 2 with a teacher in another process, which sends its likeliest tokens at each error site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..channels.distil import DistilMetrics, distil_lists
from ..channels.forward import Captured
from ..channels.heads import output_head
from ..rollouts.rollout import SdpoItem
from .distillation import ITEMS, Distillation, SiteSums

LISTS = "sdpo_lists"
"""Key of a batch: for each row a tuple of `TokenLists`, one for each of its items."""


@dataclass(frozen=True, slots=True)
class TokenLists:
    """The teacher's likeliest tokens at the N positions that predict an item's target tokens.

    Attributes:
        ids: ``[N, K]`` int64 ids.
        logprobs: ``[N, K]`` log-probabilities of ``ids``, at the temperature of the divergence.
    """

    ids: Tensor
    logprobs: Tensor


class ListedDistillation(Distillation):
    """Computes channel 2's loss of a micro-batch that carries the teacher's lists, with the options of another.

    Args:
        options: Distillation whose divergence, guard and precision apply.

    Raises:
        ValueError: The divergence compares other tokens than the teacher's likeliest ones, or the form or the
            importance weights need more than lists.
    """

    def __init__(self, options: Distillation) -> None:
        divergence = options.divergence
        if divergence.top_k is None or divergence.support != "teacher":
            raise ValueError("a teacher in another process sends lists: set top_k, and support='teacher'")
        if options.form != "distribution" or options.is_clip is not None:
            raise ValueError("lists of likeliest tokens have the form 'distribution', without is_clip")
        super().__init__(divergence, "live", options.guard, head_precision=options.head_precision)

    def loss(
        self, model: Any, inputs: dict[str, Any], captured: Captured | None, old_logprobs: Tensor | None = None
    ) -> tuple[Tensor, DistilMetrics, list[SiteSums]]:
        """Return the loss, its metrics and the sums of each site; see `Distillation.loss`.

        Args:
            model: The student.
            inputs: The micro-batch, with `LISTS`.
            captured: The student's states; None where the micro-batch has no site.
            old_logprobs: Log-probabilities of the completions, which are not used.
        """
        items: Sequence[SdpoItem] = [item for row in inputs[ITEMS] for item in row]
        lists: Sequence[TokenLists] = [one for row in inputs[LISTS] for one in row]
        head = output_head(model)
        student = captured.hidden() if captured is not None else head.weight.new_zeros(0, head.weight.shape[1])
        none = torch.zeros(0, self.divergence.top_k or 1)
        ids = torch.cat([one.ids for one in lists]) if lists else none.long()
        logprobs = torch.cat([one.logprobs for one in lists]) if lists else none
        sites: list[SiteSums] = []
        with self.head_precision():
            summed, metrics = distil_lists(
                student,
                ids.to(student.device),
                logprobs.to(student.device),
                head.weight,
                head.bias,
                divergence=self.divergence,
                token_weights=self.site_weights(items, sites) if items else None,
                transform=head.transform,
            )
        return summed, metrics, sites
