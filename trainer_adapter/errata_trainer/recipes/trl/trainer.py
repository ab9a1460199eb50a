"""`ThreeChannelGRPOTrainer`: TRL's `GRPOTrainer` with Errata's signals in its batches and its loss."""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from errata_protocol.errors import ServiceError

from ...deliveries import Delivery
from ...playing import Seat
from ...rollout import Rollout
from ...transcript import build_rollout
from .environment import SeatedEnvironment
from .parallel_tools import ParallelTools

log = logging.getLogger("errata.trainer")

LOST_BATCHES = 3
"""Batches in a row of which no episode could be counted, until training stops and says so."""


class ThreeChannelGRPOTrainer(ParallelTools, GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` on environments of an Errata server: takes what it takes.

    Episodes of a batch play side by side, and one that the machine lost trains nothing: no reward, no advantage, no
    token.

    Raises:
        ServiceError: While training, when all episodes of some batches in a row were lost.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lost_batches = 0
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        seats = self._seats()
        if seats is not None:
            self._leave_out_lost(batch, seats)
        return batch

    def _seats(self) -> list[Seat | None] | None:
        """Return the seat of each row of the batch, None for one whose environment is not ours; None without any."""
        if not self.environments:
            return None
        return [e._seat if isinstance(e, SeatedEnvironment) else None for e in self.environments]

    # What the machine did wrong

    def _calculate_rewards(self, *arguments: Any) -> torch.Tensor:
        """Return TRL's rewards ``[B * processes, functions]``, those of lost episodes NaN: no function scores them."""
        rewards: torch.Tensor = super()._calculate_rewards(*arguments)
        seats = self._seats()
        if seats is not None:
            lost = gather_object([seat is not None and seat.lost is not None for seat in seats])
            if any(lost):
                rewards[torch.tensor(lost, device=rewards.device)] = torch.nan
        return rewards

    def _leave_out_lost(self, batch: dict[str, Any], seats: list[Seat | None]) -> None:
        """Take tokens of lost episodes out of every loss: without an advantage they are still in a KL term."""
        lost = torch.tensor([seat is not None and seat.lost is not None for seat in seats])
        whys = gather_object([seat.lost if seat is not None else None for seat in seats])
        count = sum(why is not None for why in whys)
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["episodes/lost"].append(count / len(whys))
        if count and "tool_mask" in batch:
            batch["tool_mask"][lost.to(batch["tool_mask"].device)] = 0
            tokens = (batch["completion_mask"] * batch["tool_mask"]).sum()
            batch["num_items_in_batch"] = self.accelerator.gather(tokens).sum()
        self._lost_batches = self._lost_batches + 1 if count == len(whys) else 0
        if self._lost_batches >= LOST_BATCHES:
            raise ServiceError(
                f"every episode of {self._lost_batches} batches in a row was lost, the last one by {whys[0]}: "
                "look at the server, then resume from the last checkpoint"
            )

    # What the students did

    def _rollouts(self, seats: list[Seat | None]) -> list[Rollout]:
        """Return the neutral record of each row."""
        transcripts = self.transcripts
        assert transcripts is not None
        logprobs = transcripts.logprobs
        rollouts = []
        for row, seat in enumerate(seats):
            rollouts.append(
                build_rollout(
                    transcripts.prompt_ids[row],
                    transcripts.completion_ids[row],
                    transcripts.masks[row],
                    transcripts.messages[row],
                    deliveries(seat) if seat is not None else (),
                    eid=seat.eid if seat is not None else None,
                    environment=seat.environment.name if seat is not None else None,
                    reward=seat.finish() if seat is not None else None,
                    logprobs=logprobs[row] if logprobs is not None else None,
                    end_ids=[*self.eos_token_ids, self._tokenizer.pad_token_id],
                    lost=seat.lost if seat is not None else None,
                    task=seat.task if seat is not None else None,
                )
            )
        return rollouts


def deliveries(seat: Seat) -> list[Delivery]:
    """Return what a seat knows of its episode's calls."""
    return [Delivery(call.t, call.tool, call.arguments, call.text, call.marker, seat.eid) for call in seat.played]
