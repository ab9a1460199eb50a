"""Connects channel 2 to a trainer's batch: captures the student's hidden states at its failing turns, runs the teacher,
which also reads a hint, and calls `channels.distil`.

A batch is a mapping with the keys below and those of `layouts`, which say where its rows lie in the model's input. By
default ``prompt_ids`` ``[B, W]`` are padded on the left, and completions follow them and are padded on the right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from ..channels.arguments import upper_bound
from ..channels.distil import DistilMetrics, action_logprobs, distil
from ..channels.forward import Captured, capture_hidden, frozen_states
from ..channels.guard import DivergenceGuard
from ..channels.heads import OutputHead, output_head
from ..channels.sdpo import Divergence, importance_weights
from ..rollouts.rollout import SdpoItem
from .layouts import PROMPT_LENGTHS, layout_of

ITEMS, TOKENS = "sdpo_items", "sdpo_tokens"
"""Keys of a batch: for each row a tuple of `SdpoItem`, and how many target tokens all ranks' generation batch has."""


Form = Literal["distribution", "sampled"]

FIXED = ("base", "initial")
"""Teachers whose weights stay as they are."""


@dataclass(frozen=True, slots=True)
class SiteSums:
    """Sums over the target tokens of one error site.

    Attributes:
        key: Hint template key of the site.
        tokens: Number of target tokens.
        divergence: Sum of the tokens' divergences, in nats, before clip and weights: 0-d, without gradient. In the form
            ``sampled`` the divergence of a token is the absolute log-ratio of the sampled token.
        weight: Weight of each token in the loss, 0-d.
        outlier: 1 if the guard left the site out, else 0: 0-d.
    """

    key: str
    tokens: int
    divergence: Tensor
    weight: Tensor
    outlier: Tensor


class SeparateTeacher(Protocol):
    """A teacher with weights of its own.

    Attributes:
        model: Model to call inside `teaching`.
    """

    model: Any

    def teaching(self) -> AbstractContextManager[None]:
        """Return a context in which `model` is ready to be called as the teacher."""
        ...


class Distillation:
    """Computes channel 2's loss of a micro-batch.

    Args:
        divergence: Divergence between student and teacher at each token.
        teacher: Weights of the teacher: ``live``, ``base``, ``ema`` or ``initial``; see `ChannelSettings.teacher`.
        guard: Leaves out sites whose divergence is far from that of others; None leaves out none.
        form: Form of the loss: ``distribution`` or ``sampled``; see `ChannelSettings.sdpo_form`.
        is_clip: Upper bound of the importance weights of tokens; None for no weights.
        sampling_temperature: Temperature that the batch was sampled with, which its log-probabilities refer to.
        keep: Keep a fixed teacher's states for a generation batch. It costs memory, and saves passes where a batch is
            used several times.
        head_precision: Returns the context in which hidden states are multiplied with the output embedding, e.g. the
            trainer's ``autocast``. By default the caller's own context applies.

    Raises:
        ValueError: An option out of its range, or that does not fit the form.

    Attributes:
        separate_teacher: The teacher of ``ema`` and ``initial``, set by the trainer; None for the others.
    """

    def __init__(
        self,
        divergence: Divergence,
        teacher: str = "ema",
        guard: DivergenceGuard | None = None,
        *,
        form: Form = "distribution",
        is_clip: float | None = None,
        sampling_temperature: float = 1.0,
        keep: bool = False,
        head_precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        upper_bound("is_clip", is_clip)
        if form not in get_args(Form):
            raise ValueError(f"sdpo_form is {form!r}: one of {', '.join(get_args(Form))}")
        if form == "sampled" and divergence.top_k is not None:
            raise ValueError("sdpo_form='sampled' compares the sampled token alone: top_k has to be None")
        self.form, self.is_clip, self.sampling_temperature = form, is_clip, sampling_temperature
        self.keep = keep and teacher in FIXED
        self.head_precision = head_precision
        self._kept: dict[int, tuple[SdpoItem, Tensor]] = {}
        self.divergence = divergence
        self.guard = guard
        self.teacher = teacher
        self.separate_teacher: SeparateTeacher | None = None
        self._found: list[Tensor] = []

    @contextmanager
    def capturing(self, model: Any, inputs: dict[str, Any]) -> Iterator[Captured | None]:
        """Capture the student's hidden states at the sites from the forward pass in the block; None if there is no
        site."""
        rows: list[int] = []
        columns: list[int] = []
        for row, items in enumerate(inputs.get(ITEMS) or ()):
            for item in items:
                place, of_item = layout_of(inputs).columns(row, item.student_positions)
                rows += [place] * len(of_item)
                columns += of_item
        if not rows:
            yield None
            return
        with capture_hidden(model, torch.tensor(rows), torch.tensor(columns)) as captured:
            yield captured

    def loss(
        self, model: Any, inputs: dict[str, Any], captured: Captured | None, old_logprobs: Tensor | None = None
    ) -> tuple[Tensor, DistilMetrics, list[SiteSums]]:
        """Return the loss summed over the micro-batch's target tokens (0-d, attached), its metrics, and the sums of
        each site.

        It never waits for the device. Where forward passes are collective (FSDP), ranks without sites call it, too.

        Args:
            model: The student.
            inputs: The micro-batch.
            captured: The student's states; None where the micro-batch has no site.
            old_logprobs: ``[B, T]`` log-probabilities of the completions' tokens when they were sampled, NaN where
                unknown; None if the policy has not moved since. They are those of completions in every layout, and the
                batch needs `PROMPT_LENGTHS` for them.
        """
        items: Sequence[SdpoItem] = [item for row in inputs[ITEMS] for item in row]
        head = output_head(model)
        with self._teaching(model) as teacher_model:
            teacher = self._states(teacher_model, items)
            teacher_head = head if self.teacher == "live" else output_head(teacher_model)
        student = captured.hidden() if captured is not None else head.weight.new_zeros(0, head.weight.shape[1])
        with self.head_precision():
            return self._compared(student, teacher, head, teacher_head, inputs, items, old_logprobs)

    def _compared(
        self,
        student: Tensor,
        teacher: Tensor,
        head: OutputHead,
        teacher_head: OutputHead,
        inputs: dict[str, Any],
        items: Sequence[SdpoItem],
        old_logprobs: Tensor | None,
    ) -> tuple[Tensor, DistilMetrics, list[SiteSums]]:
        """Compute `loss` from hidden states. ``teacher_head`` is the teacher's output embedding."""
        ratios = self._importance(student, head, inputs, old_logprobs)
        sites: list[SiteSums] = []
        weights = self.site_weights(items, sites, ratios)
        if self.form == "sampled":
            summed, metrics = self._sampled(student, teacher, head, teacher_head, items, weights)
        else:
            summed, metrics = distil(
                student,
                teacher,
                head.weight,
                head.bias,
                divergence=self.divergence,
                token_weights=weights if items else None,
                teacher_weight=None if teacher_head is head else teacher_head.weight,
                teacher_bias=None if teacher_head is head else teacher_head.bias,
                transform=head.transform,
            )
        return summed, metrics, sites

    def site_weights(
        self, items: Sequence[SdpoItem], sites: list[SiteSums], ratios: Tensor | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return a function from the divergences ``[N]`` of items' target tokens to the tokens' weights ``[N]``: their
        site's, and 0 for a site that the guard leaves out.

        Args:
            items: The items, whose target tokens follow each other.
            sites: List that the sums of each site are added to when the function is called.
            ratios: ``[N]`` importance weights of the tokens; None for none.
        """

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
            return of_site[site_of] if ratios is None else of_site[site_of] * ratios.to(of_site.dtype)

        return weights

    def _states(self, teacher_model: Any, items: Sequence[SdpoItem]) -> Tensor:
        """Return the teacher's hidden states of items. With `keep`, each item is computed once for a generation
        batch."""
        new = [item for item in items if id(item) not in self._kept]
        states = frozen_states(
            teacher_model, [item.teacher_ids for item in new], [item.teacher_positions for item in new]
        )
        if not self.keep or not items:
            return states
        parts = states.split([len(item.target_ids) for item in new])
        self._kept |= {id(item): (item, part) for item, part in zip(new, parts, strict=True)}
        return torch.cat([self._kept[id(item)][1] for item in items])

    def _importance(
        self, student: Tensor, head: OutputHead, inputs: dict[str, Any], old: Tensor | None
    ) -> Tensor | None:
        """Return the importance weight of each target token, ``[N]``; 1 where its old log-probability is unknown. None
        if no weights are used."""
        if self.is_clip is None or old is None:
            return None
        rows, columns, targets = [], [], []
        for row, items in enumerate(inputs[ITEMS]):
            for item in items:
                rows += [row] * len(item.target_ids)
                columns += [position + 1 - inputs[PROMPT_LENGTHS][row] for position in item.student_positions]
                targets += item.target_ids
        sampled = old[torch.tensor(rows, dtype=torch.int64), torch.tensor(columns, dtype=torch.int64)]
        with torch.no_grad():
            now = _logprobs(student, targets, head, head, self.sampling_temperature)
            return importance_weights(now, torch.where(sampled.isnan(), now, sampled.to(now.dtype)), self.is_clip)

    def _sampled(
        self,
        student: Tensor,
        teacher: Tensor,
        head: OutputHead,
        teacher_head: OutputHead,
        items: Sequence[SdpoItem],
        weights: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, DistilMetrics]:
        """Return the sampled-token loss, ``(log S - log T).detach() * log S`` summed over the target tokens, and its
        metrics.

        The metrics are estimated from the sampled tokens: the mean of log S - log T estimates KL(S || T), the mean of
        -log S the entropy.
        """
        targets = [token for item in items for token in item.target_ids]
        own = _logprobs(student, targets, head, head, self.divergence.temperature)
        with torch.no_grad():
            other = _logprobs(teacher, targets, teacher_head, head, self.divergence.temperature)
        gap = own.detach() - other
        each = gap * own
        summed = (each * weights(gap.abs()).to(each.dtype)).sum() if items else each.sum()
        count = torch.full((), len(targets), dtype=gap.dtype, device=gap.device)
        return summed, DistilMetrics(count, gap.sum(), -own.detach().sum(), torch.zeros_like(count))

    def clear_kept(self) -> None:
        """Drop the kept teacher states; call it when a new generation batch begins."""
        self._kept.clear()

    def update_guard(self) -> None:
        """Pass the sites since the last call to the guard, which compares later sites with them. Waits for the
        device."""
        found, self._found = self._found, []
        if self.guard is not None and found:
            self.guard.add(torch.cat(found).tolist())

    @contextmanager
    def _teaching(self, model: Any) -> Iterator[Any]:
        """Yield the model that is called as the teacher."""
        if self.teacher == "live":
            yield model
        elif self.teacher in ("ema", "initial"):
            if self.separate_teacher is None:
                raise RuntimeError(f"the teacher {self.teacher!r} has no weights: the trainer makes them")
            with self.separate_teacher.teaching():
                yield self.separate_teacher.model
        else:
            with model.disable_adapter():
                yield model


def _logprobs(
    states: Tensor, targets: Sequence[int], head: OutputHead, student: OutputHead, temperature: float
) -> Tensor:
    """Return the log-probability of each target token, ``[N]``."""
    ids = torch.tensor(targets, dtype=torch.int64).to(states.device)
    return action_logprobs(states, ids, head.weight, head.bias, temperature=temperature, transform=student.transform)
