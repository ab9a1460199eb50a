"""Channels 2 and 3 beside a trainer's own loss, for one micro-batch, and the metrics of what they trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ..channels.compose import DPO, SDPO, Term, compose
from ..channels.forward import Captured, collective
from ..monitoring.metrics import Metrics
from .distillation import ITEMS, Distillation, SiteSums
from .preferences import PAIRS, BatchPairs, Preferences


@dataclass(frozen=True, slots=True)
class CapturedStates:
    """What the trainer's own forward pass of a micro-batch left for the channels.

    Attributes:
        sites: The student's states at the error sites; None if there are none.
        own: The micro-batch's pairs, with the states of those rejected actions that are in the batch.
    """

    sites: Captured | None
    own: BatchPairs


class ChannelLosses:
    """Adds the losses of channels 2 and 3 to a trainer's own.

    Args:
        distillation: Loss of channel 2.
        preferences: Loss of channel 3.
        metrics: Metrics to record in.
        processes: Number of ranks, over which the trainer averages gradients.
        pad_id: The tokenizer's pad token.
    """

    def __init__(
        self, distillation: Distillation, preferences: Preferences, metrics: Metrics, *, processes: int, pad_id: int
    ) -> None:
        self._distillation, self._preferences, self._metrics = distillation, preferences, metrics
        self._processes, self._pad_id = processes, pad_id

    @contextmanager
    def capturing(self, student: Any, inputs: dict[str, Any], *, alpha: float, beta: float) -> Iterator[CapturedStates]:
        """Capture what the channels with a weight need from the forward pass in the block.

        Args:
            student: The student, unwrapped.
            inputs: The micro-batch, with the keys of `distillation`, `preferences` and `layouts`.
            alpha: Weight of channel 2.
            beta: Weight of channel 3.
        """
        with (
            self._distillation.capturing(student, inputs if alpha else {**inputs, ITEMS: ()}) as sites,
            self._preferences.capturing(student, inputs if beta else {**inputs, PAIRS: ()}) as own,
        ):
            yield CapturedStates(sites, own)

    def total(
        self,
        grpo: Tensor,
        model: Any,
        student: Any,
        inputs: dict[str, Any],
        states: CapturedStates,
        counts: Mapping[str, Tensor],
        *,
        alpha: float,
        beta: float,
        old_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Term]]:
        """Return the loss of a micro-batch with all channels.

        With several ranks all have to call it, also those whose micro-batch has no site and no pair.

        Args:
            grpo: The trainer's own loss of the micro-batch, 0-d.
            model: The student as the trainer calls it.
            student: The student, unwrapped.
            inputs: The micro-batch.
            states: States that `capturing` captured, after its block.
            counts: Number of target tokens (`SDPO`) and of pairs (`DPO`) that the optimizer step has in all
                micro-batches of all ranks, 0-d, for each channel with a weight.
            alpha: Weight of channel 2.
            beta: Weight of channel 3.
            old_logprobs: Log-probabilities of the completions' tokens when they were sampled; see `Distillation.loss`.

        Returns:
            The loss, 0-d; the parts of `compose`, for `record`; and the term of each channel with work, by name.
        """
        terms: dict[str, Term] = {}
        # Where passes are collective, a rank without sites makes those of the ranks that have some.
        if alpha and (states.sites is not None or collective(student)):
            summed, sums, sites = self._distillation.loss(student, inputs, states.sites, old_logprobs)
            terms[SDPO] = Term(summed, counts[SDPO])
            self._record_sums("sdpo", asdict(sums), "tokens")
            self._record_sites(sites)
        if beta and states.own.pairs:
            summed, of_pairs = self._preferences.loss(model, states.own, pad_id=self._pad_id)
            terms[DPO] = Term(summed, counts[DPO])
            self._record_sums("dpo", of_pairs, "pairs")
        elif beta and self._processes > 1:  # another rank's pass through the wrapper waits for one here
            terms[DPO] = Term(self._preferences.idle(model, pad_id=self._pad_id), counts[DPO])
        loss, parts = compose(
            grpo,
            sdpo=terms.get(SDPO),
            dpo=terms.get(DPO),
            alpha_sdpo=alpha,
            beta_replay=beta,
            averaged_over=self._processes,
        )
        return loss, parts, terms

    def record(self, parts: Mapping[str, Tensor]) -> None:
        """Record the parts of the loss of a micro-batch; in the log they add up to the step's loss.

        A channel's parts add up over ranks; of GRPO's own loss the ranks' mean is what the trainer logs.
        """
        for name, part in parts.items():
            self._metrics.step(name, part / self._processes if name == "loss/grpo" else part)

    def _record_sums(self, channel: str, sums: Mapping[str, Tensor], over: str) -> None:
        """Record means over a channel's tokens or pairs, and their number in a step."""
        for name, value in sums.items():
            if name == over:
                self._metrics.step(f"{channel}/{name}", value)
            else:
                self._metrics.mean(f"{channel}/{name}", value, sums[over])

    def _record_sites(self, sites: Sequence[SiteSums]) -> None:
        for site in sites:
            self._metrics.mean(f"sdpo/divergence/{site.key}", site.divergence, site.tokens)
            self._metrics.share("sdpo/share", site.key, site.weight * site.divergence)
            self._metrics.step("sdpo/outliers", site.outlier)
