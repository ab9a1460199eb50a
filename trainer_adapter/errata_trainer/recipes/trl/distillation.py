"""Channel 2 in TRL's loss: the student's own failing turns, against itself with a hint before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...channels.distil import DistilMetrics, distil
from ...channels.forward import Captured, capture_hidden, frozen_states
from ...channels.heads import output_head
from ...channels.sdpo import Divergence
from ...rollout import SdpoItem
from .ema import FollowingAdapter, FollowingModel

ITEMS, TOKENS = "sdpo_items", "sdpo_tokens"
"""Keys of a batch: for each row a tuple of `SdpoItem`, and how many target tokens all ranks' generation batch has."""


class Distillation:
    """Computes the channel's loss of a micro-batch.

    Args:
        divergence: Between student and teacher, for each token.
        teacher: ``live``, ``base`` or ``ema``; see `ChannelSettings.teacher`.

    Attributes:
        follower: Keeps the teacher of ``ema``.
    """

    def __init__(self, divergence: Divergence, teacher: str = "ema") -> None:
        self.divergence = divergence
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

    def loss(self, model: Any, inputs: dict[str, Any], captured: Captured) -> tuple[Tensor, DistilMetrics]:
        """Return the sum over the micro-batch's target tokens, 0-d and attached, and its metrics."""
        items: Sequence[SdpoItem] = [item for row in inputs[ITEMS] for item in row]
        head = output_head(model)
        with self._teaching(model) as taught:
            teacher = frozen_states(
                taught, [item.teacher_ids for item in items], [item.teacher_positions for item in items]
            )
            read = None if self.teacher == "live" else output_head(taught)
        weights = torch.tensor([item.weight for item in items for _ in item.target_ids], device=teacher.device)
        return distil(
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

    @contextmanager
    def _teaching(self, model: Any) -> Iterator[Any]:
        """Yield the model that teaches."""
        if self.teacher == "live":
            yield model
        elif self.teacher == "ema":
            assert self.follower is not None
            with self.follower.teaching():
                yield self.follower.model
        else:
            with model.disable_adapter():
                yield model
