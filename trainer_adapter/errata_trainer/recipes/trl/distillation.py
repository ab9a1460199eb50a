"""Channel 2 in TRL's loss: the student's own failing turns, against itself with a hint before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...channels.distil import DistilMetrics, distil
from ...channels.forward import Captured, capture_hidden, frozen_states
from ...channels.guard import DivergenceGuard
from ...channels.heads import output_head
from ...channels.sdpo import Divergence
from ...rollout import SdpoItem
from .ema import FollowingAdapter, FollowingModel

ITEMS, TOKENS = "sdpo_items", "sdpo_tokens"
"""Keys of a batch: for each row a tuple of `SdpoItem`, and how many target tokens all ranks' generation batch has."""


@dataclass(frozen=True, slots=True)
class SiteSums:
    """What the loss found at one error site.

    Attributes:
        key: Its hint template key.
        tokens: How many.
        divergence: Summed over them, in nats, before clip and weights.
        weight: Of each in the loss; 0 where the guard left the site out.
    """

    key: str
    tokens: int
    divergence: float
    weight: float


class Distillation:
    """Computes the channel's loss of a micro-batch.

    Args:
        divergence: Between student and teacher, for each token.
        teacher: ``live``, ``base`` or ``ema``; see `ChannelSettings.teacher`.
        guard: Leaves out sites whose divergence is far from that of others; None leaves out none.

    Attributes:
        follower: Keeps the teacher of ``ema``.
    """

    def __init__(self, divergence: Divergence, teacher: str = "ema", guard: DivergenceGuard | None = None) -> None:
        self.divergence = divergence
        self.guard = guard
        self.teacher = teacher
        self.follower: FollowingModel | FollowingAdapter | None = None

    @contextmanager
    def capturing(self, model: Any, inputs: dict[str, Any]) -> Iterator[Captured | None]:
        """Take the student's states from the forward pass that TRL makes in the block; None where there is no site."""
        rows, columns = [], []
        width = inputs["prompt_ids"].size(1)
        prompts = inputs["prompt_mask"].sum(1).tolist()
        for row, items in enumerate(inputs.get(ITEMS) or ()):
            for item in items:
                rows += [row] * len(item.student_positions)
                columns += [width - prompts[row] + position for position in item.student_positions]
        if not rows:
            yield None
            return
        with capture_hidden(model, torch.tensor(rows), torch.tensor(columns)) as captured:
            yield captured

    def loss(
        self, model: Any, inputs: dict[str, Any], captured: Captured
    ) -> tuple[Tensor, DistilMetrics, list[SiteSums]]:
        """Return the sum over the micro-batch's target tokens, 0-d and attached, its metrics, and each site's."""
        items: Sequence[SdpoItem] = [item for row in inputs[ITEMS] for item in row]
        head = output_head(model)
        with self._teaching(model) as taught:
            teacher = frozen_states(
                taught, [item.teacher_ids for item in items], [item.teacher_positions for item in items]
            )
            read = None if self.teacher == "live" else output_head(taught)
        sites: list[SiteSums] = []

        def weights(divergences: Tensor) -> Tensor:
            lengths = [len(item.target_ids) for item in items]
            sums = [float(one) for one in torch.stack([one.sum() for one in divergences.split(lengths)]).tolist()]
            outliers = [False] * len(items)
            if self.guard is not None:
                outliers = self.guard.outliers([one / n for one, n in zip(sums, lengths, strict=True)])
            for item, n, total, far in zip(items, lengths, sums, outliers, strict=True):
                sites.append(SiteSums(item.hint_template_key or "", n, total, 0.0 if far else item.weight))
            each = torch.tensor([site.weight for site in sites], dtype=divergences.dtype, device=divergences.device)
            return each.repeat_interleave(torch.tensor(lengths, device=divergences.device))

        summed, metrics = distil(
            captured.hidden(),
            teacher,
            head.weight,
            head.bias,
            divergence=self.divergence,
            token_weights=weights,
            teacher_weight=None if read is None else read.weight,
            teacher_bias=None if read is None else read.bias,
            transform=head.transform,
        )
        return summed, metrics, sites

    @contextmanager
    def _teaching(self, model: Any) -> Iterator[Any]:
        """Yield the model that teaches."""
        if self.teacher == "live":
            yield model
        elif self.teacher == "ema":
            if self.follower is None:
                raise RuntimeError("the teacher 'ema' has no follower: the trainer makes one when it is constructed")
            with self.follower.teaching():
                yield self.follower.model
        else:
            with model.disable_adapter():
                yield model
