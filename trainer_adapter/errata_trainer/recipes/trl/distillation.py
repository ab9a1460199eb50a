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

PROMPT_LENGTHS = "channel_prompt_lengths"
"""Key of a batch: tokens of each row's prompt, as numbers: a device that is asked for them waits for its queue."""


@dataclass(frozen=True, slots=True)
class SiteSums:
    """What the loss found at one error site.

    Attributes:
        key: Its hint template key.
        tokens: How many.
        divergence: Summed over them, in nats, before clip and weights: 0-d, without gradient.
        weight: Of each in the loss, 0-d.
        outlier: 1 where the guard left the site out, else 0: 0-d.
    """

    key: str
    tokens: int
    divergence: Tensor
    weight: Tensor
    outlier: Tensor


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
        self._found: list[Tensor] = []

    @contextmanager
    def capturing(self, model: Any, inputs: dict[str, Any]) -> Iterator[Captured | None]:
        """Take the student's states from the forward pass that TRL makes in the block; None where there is no site."""
        rows, columns = [], []
        width = inputs["prompt_ids"].size(1)
        for row, items in enumerate(inputs.get(ITEMS) or ()):
            for item in items:
                rows += [row] * len(item.student_positions)
                columns += [width - inputs[PROMPT_LENGTHS][row] + position for position in item.student_positions]
        if not rows:
            yield None
            return
        with capture_hidden(model, torch.tensor(rows), torch.tensor(columns)) as captured:
            yield captured

    def loss(
        self, model: Any, inputs: dict[str, Any], captured: Captured | None
    ) -> tuple[Tensor, DistilMetrics, list[SiteSums]]:
        """Return the sum over the micro-batch's target tokens, 0-d and attached, its metrics, and each site's.

        Nothing of it waits for a device. Where the model's passes are collective, a rank without sites calls it, too.

        Args:
            model: The student.
            inputs: The micro-batch.
            captured: The student's states; None where the micro-batch has no site.
        """
        items: Sequence[SdpoItem] = [item for row in inputs[ITEMS] for item in row]
        head = output_head(model)
        with self._teaching(model) as taught:
            teacher = frozen_states(
                taught, [item.teacher_ids for item in items], [item.teacher_positions for item in items]
            )
            read = None if self.teacher == "live" else output_head(taught)
        student = captured.hidden() if captured is not None else head.weight.new_zeros(0, head.weight.shape[1])
        sites: list[SiteSums] = []

        def weights(divergences: Tensor) -> Tensor:
            lengths = [len(item.target_ids) for item in items]
            site_of = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64)
            site_of = site_of.to(divergences.device)
            sums = divergences.new_zeros(len(items)).index_add(0, site_of, divergences)
            means = sums / divergences.new_tensor(lengths)
            outlier = torch.zeros_like(sums)
            if self.guard is not None:
                outlier = (~((means <= self.guard.bound()) & means.isfinite())).to(sums.dtype)
                self._found.append(means)
            of_site = divergences.new_tensor([item.weight for item in items]) * (1.0 - outlier)
            sites.extend(
                SiteSums(item.hint_template_key or "", length, *of_one)
                for item, length, *of_one in zip(
                    items, lengths, sums.unbind(), of_site.unbind(), outlier.unbind(), strict=True
                )
            )
            return of_site[site_of]

        summed, metrics = distil(
            student,
            teacher,
            head.weight,
            head.bias,
            divergence=self.divergence,
            token_weights=weights if items else None,
            teacher_weight=None if read is None else read.weight,
            teacher_bias=None if read is None else read.bias,
            transform=head.transform,
        )
        return summed, metrics, sites

    def remember(self) -> None:
        """Let the guard know of the sites since the last call: it compares later ones with them. It waits for them."""
        found, self._found = self._found, []
        if self.guard is not None and found:
            self.guard.remember(torch.cat(found).tolist())

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
