"""The batches that TRL's trainer computed channel losses of, for VeRL's engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import distribute_tensor

from errata_trainer.channels.pairs import placed
from errata_trainer.recipes.verl.options import LossOptions
from errata_trainer.settings import ChannelSettings

from .workers import batch_of

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from recorded_losses import Recorded, initial, student, tokenizer
from recorded_losses import load as load


def write_model(directory: Path) -> Path:
    """Return a directory after the model with the initial weights was written to it."""
    tokenizer().save_pretrained(directory)
    initial().save_pretrained(directory)
    return directory


def rows_of(recorded: Recorded) -> Recorded:
    """Return a recorded batch as VeRL has it: lost rollouts are no rows there."""
    left = [n for n, rollout in enumerate(recorded.rollouts) if rollout.lost is None]
    rollouts, groups, items, advantages = (
        tuple(of_all[n] for n in left)
        for of_all in (recorded.rollouts, recorded.groups, recorded.items, recorded.advantages)
    )
    pairs = placed([pair for row in recorded.pairs for pair in row], rollouts)
    return replace(recorded, rollouts=rollouts, groups=groups, items=items, pairs=tuple(pairs), advantages=advantages)


def begin(worker: Any, recorded: Recorded) -> None:
    """Begin a recorded batch's channels in a worker with the initial weights, and give it the student's."""
    given = recorded.options
    settings = ChannelSettings(**given["settings"])
    move(worker, initial())
    worker.begin_channels(
        LossOptions(
            settings,
            has_pairs=True,
            nll=settings.dpo_nll or 0.0,
            beta_dpo=given["beta_dpo"],
            jsd_beta=given["jsd_beta"],
            token_clip=given["token_clip"],
            sampling_temperature=given["temperature"],
        )
    )
    move(worker, student())


def move(worker: Any, model: Any) -> None:
    """Give a worker's engine the weights of a model."""
    with torch.no_grad():
        for name, weight in worker.engine.module.named_parameters():
            weight.copy_(distribute_tensor(model.get_parameter(name), weight.device_mesh, weight.placements))


def batch_with_channels(recorded: Recorded, micro: int) -> Any:
    """Return the mini-batch of a recorded batch, without advantages: its loss is that of the channels.

    Args:
        recorded: Recorded batch.
        micro: Rows of a micro-batch.
    """
    rows, given = rows_of(recorded), recorded.options
    data = batch_of(
        rows.items,
        rows.pairs,
        made=rows.rollouts,
        alpha=given["alpha_sdpo"],
        beta=given["beta_replay"],
        micro=micro,
        temperature=given["temperature"],
    )
    data["advantages"] = torch.zeros_like(data["advantages"])
    if all(row.logprobs is not None for row in rows.rollouts):
        logprobs = [torch.tensor(row.logprobs) for row in rows.rollouts]
        data["rollout_log_probs"] = torch.nested.as_nested_tensor(logprobs, layout=torch.jagged)
    return data
