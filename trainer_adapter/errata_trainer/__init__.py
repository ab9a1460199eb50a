"""Errata's signals in a trainer: rollouts, hints, teachers, channels, and a recipe for each trainer.

It may import ``errata_protocol`` and ``errata_client`` only. Recipes do not import each other, and nothing else imports
a trainer.

    episodes            the tools of an environment, and episodes that a student plays with them
    rollouts            records of episodes: `Rollout`, and how a trainer's transcript becomes one
    packing             turns as the samples of a trainer
    hints, teachers     what a failing turn's hint says, and votes at past states
    channels            the losses as functions of tensors
    assembly            the channels on a trainer's batch: sites, pairs, losses, checkpoints (`channel_set`)
    settings, presets   options of the channels
    monitoring          what is logged
    recipes             one package for each trainer
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
