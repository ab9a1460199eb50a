"""Errata's signals in a trainer: rollouts, hints, teachers, channels, and a recipe for each trainer.

It may import ``errata_protocol`` and ``errata_client`` only. Recipes do not import each other; channels import no
trainer.

    playing, transcript, batch, rollout     episodes, and their conversion to `Rollout` records
    sites, hints, counterfactual            failing turns, their hints, and whether a hint helps
    teachers, teacher_pairs                 votes at past states, and the pairs made from them
    channels                                the losses as functions of tensors
    distillation, preferences, driver       the channels on a trainer's batch, independent of the trainer
    settings, presets, metrics, watch       options, and what is logged
    recipes                                 one package for each trainer
"""

from .rollouts.deliveries import Delivery, call_of, deliveries_of
from .rollouts.record_files import read_records, write_records
from .rollouts.rollout import Call, DpoPair, Rollout, SdpoItem, Turn, state_of_turns
from .rollouts.transcript import build_rollout

__all__ = [
    "Call",
    "Delivery",
    "DpoPair",
    "Rollout",
    "SdpoItem",
    "Turn",
    "build_rollout",
    "call_of",
    "deliveries_of",
    "read_records",
    "state_of_turns",
    "write_records",
]
