"""Channels 2 and 3 in the loss of VeRL's actor: they share the forward pass that VeRL makes for its own.

VeRL calls its loss function inside the engine's step over a micro-batch, and gives it log-probabilities only. So the
step itself is wrapped, on the engine that trains: states are captured while VeRL calls the model, and the channels'
terms are added to what VeRL's loss function returns. A batch without weights of the channels has VeRL's loss, the same
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from ...assembly.channel_set import ChannelSet
from ...assembly.distillation import ITEMS
from ...assembly.layouts import LAYOUT, PROMPT_LENGTHS, Layout, PackedRows, PaddedRows
from ...assembly.losses import ChannelLosses
from ...assembly.preferences import OWN, PAIRS
from ...channels.compose import DPO, SDPO, global_counts
from ...monitoring.metrics import Metrics
from ...rollouts.rollout import DpoPair, SdpoItem
from .columns import ALPHA, BETA, ITEMS_COLUMN, OWN_COLUMN, PAIRS_COLUMN, items_of, owned_of, pairs_of

WRAPPED = ("forward_backward_batch", "forward_step", "optimizer_step")
"""Methods of an engine that `EngineLoss` wraps."""

LOGPROBS = ("rollout_log_probs", "old_log_probs")
"""Columns of a batch that may hold the log-probabilities of sampled tokens, the best first."""

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class _Step:
    """One optimizer step.

    Attributes:
        alpha: Weight of channel 2; 0 without a site.
        beta: Weight of channel 3; 0 without a pair.
        counts: Number of target tokens and of pairs that all ranks' mini-batch trains on, by channel.
        items: Error sites by their text.
        pairs: Pairs by their text.
    """

    alpha: float
    beta: float
    counts: Mapping[str, torch.Tensor]
    items: dict[str, tuple[SdpoItem, ...]]
    pairs: dict[str, tuple[DpoPair, ...]]


class EngineLoss:
    """Adds the losses of channels 2 and 3 to those of one of VeRL's FSDP2 engines.

    Args:
        engine: Engine of the actor, with its model.
        channels: The channels.
        metrics: Metrics to record in: VeRL's own choose how to reduce a value by parts of its name.
        pad_id: The tokenizer's pad token.
    """

    def __init__(self, engine: Any, channels: ChannelSet, metrics: Metrics, *, pad_id: int) -> None:
        self._engine, self._channels = engine, channels
        self._ranks = engine.get_data_parallel_size()
        self._losses = ChannelLosses(
            channels.distillation, channels.preferences, metrics, processes=self._ranks, pad_id=pad_id
        )
        self._step: _Step | None = None
        self._stock = {name: getattr(engine, name) for name in WRAPPED}

    def attach(self) -> None:
        """Wrap the engine's methods, on the instance."""
        for name in WRAPPED:
            setattr(self._engine, name, getattr(self, name))

    def detach(self) -> None:
        """Give the engine its own methods back."""
        for name in WRAPPED:
            delattr(self._engine, name)

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """Make the passes of one optimizer step as the engine does, and count before it what all ranks train on.

        Args:
            data: Mini-batch of this rank, a TensorDict.
            loss_function: VeRL's loss function.
            forward_only: Whether there is no backward pass; then VeRL's loss is left as it is.
        """
        self._step = None if forward_only else self._step_of(data)
        try:
            return self._stock["forward_backward_batch"](data, loss_function, forward_only=forward_only)
        finally:
            self._step = None

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """Return VeRL's loss of a micro-batch with the channels' losses, and what the engine reports.

        Args:
            micro_batch: Micro-batch of this rank, a TensorDict.
            loss_function: VeRL's loss function.
            forward_only: Whether there is no backward pass; then VeRL's loss is left as it is.
        """
        stock = self._stock["forward_step"]
        if forward_only:
            return stock(micro_batch, loss_function=loss_function, forward_only=True)
        step = self._step
        if step is None:
            return stock(micro_batch, loss_function=self._recorded(loss_function), forward_only=False)
        inputs, model = self._inputs(micro_batch, step), self._engine.module
        with ExitStack() as capturing:
            states = capturing.enter_context(self._losses.capturing(model, inputs, alpha=step.alpha, beta=step.beta))

            def with_channels(**given: Any) -> tuple[torch.Tensor, dict[str, Any]]:
                capturing.close()  # the channels' own passes are none of what is captured
                grpo, metrics = loss_function(**given)
                total, parts, _ = self._losses.total(
                    grpo,
                    model,
                    model,
                    inputs,
                    states,
                    step.counts,
                    alpha=step.alpha,
                    beta=step.beta,
                    old_logprobs=self._old_logprobs(micro_batch),
                )
                self._losses.record(parts)
                return total, metrics

            return stock(micro_batch, loss_function=with_channels, forward_only=False)

    def optimizer_step(self) -> Any:
        """Make the engine's optimizer step, which a teacher with weights of its own follows."""
        norm = self._stock["optimizer_step"]()
        self._channels.update(self._engine.module)
        return norm

    def _step_of(self, data: Any) -> _Step | None:
        """Return the step of a mini-batch; None if there is nothing for the channels to train on. Ranks wait for each
        other if a channel has a weight."""
        alpha, beta = (float(tu.get_non_tensor_data(data=data, key=name, default=0.0)) for name in (ALPHA, BETA))
        if not alpha and not beta:
            return None
        sites, paired = _texts(data, ITEMS_COLUMN), _texts(data, PAIRS_COLUMN)
        items, pairs = _read(items_of, sites if alpha else ()), _read(pairs_of, paired if beta else ())
        own = {
            SDPO: sum(len(site.target_ids) for text in sites for site in items.get(text, ())),
            DPO: sum(len(pairs.get(text, ())) for text in paired),
        }
        group = self._engine.get_data_parallel_group()
        # On the host, so that nothing waits for the device to read them.
        total = {name: one.cpu() for name, one in global_counts(own, device=get_device_id(), group=group).items()}
        alpha, beta = alpha if total[SDPO] else 0.0, beta if total[DPO] else 0.0
        return _Step(alpha, beta, total, items, pairs) if alpha or beta else None

    def _inputs(self, micro_batch: Any, step: _Step) -> dict[str, Any]:
        """Return the micro-batch as the channels take it."""
        prompts = micro_batch["prompts"]
        return {
            ITEMS: [step.items.get(text, ()) for text in _texts(micro_batch, ITEMS_COLUMN)],
            PAIRS: [step.pairs.get(text, ()) for text in _texts(micro_batch, PAIRS_COLUMN)],
            OWN: [owned_of(text) for text in _texts(micro_batch, OWN_COLUMN)],
            LAYOUT: _layout(micro_batch),
            PROMPT_LENGTHS: prompts.offsets().diff().tolist(),
        }

    def _old_logprobs(self, micro_batch: Any) -> torch.Tensor | None:
        """Return the log-probabilities of the responses when they were sampled, ``[B, R]``, NaN behind their ends; None
        if no importance weights are used."""
        if self._channels.distillation.is_clip is None:
            return None
        for name in LOGPROBS:
            if name in micro_batch:
                found = micro_batch[name]
                rows = found.unbind() if found.is_nested else list(found)
                padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)
                return padded.to(get_device_id())
        return None

    def _recorded(self, loss_function: Any) -> Callable[..., Any]:
        """Return a loss function that returns what VeRL's does, and records the loss."""

        def recorded(**given: Any) -> Any:
            loss, metrics = loss_function(**given)
            self._losses.record({"loss/grpo": loss.detach()})
            return loss, metrics

        return recorded


def _texts(data: Any, name: str) -> list[str]:
    """Return the texts of a column, an empty list in JSON for each row if there is no such column."""
    found = tu.get(data, name, "[]")
    return [found] * len(data) if isinstance(found, str) else list(found)


def _read(reader: Callable[[str], Read], texts: Iterable[str]) -> dict[str, Read]:
    """Return what texts say, by text: micro-batches have the same texts, in another order."""
    return {text: reader(text) for text in set(texts)}


def _layout(micro_batch: Any) -> Layout:
    """Return where the engine puts the tokens of a micro-batch's rows."""
    if tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
        offsets: Sequence[int] = micro_batch["input_ids"].offsets().tolist()
        return PackedRows(offsets)
    return PaddedRows()
