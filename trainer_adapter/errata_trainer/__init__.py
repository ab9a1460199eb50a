"""Errata's signals in a trainer: rollouts, hints, teachers, channels, and a recipe for each trainer.

It may import ``errata_protocol`` and ``errata_client`` only; no recipe imports another, and no channel a trainer.
"""

from .deliveries import Delivery, call_of, deliveries_of
from .record_files import read_records, write_records
from .rollout import Call, DpoPair, Rollout, SdpoItem, Turn, state_of_turns
from .transcript import build_rollout

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
