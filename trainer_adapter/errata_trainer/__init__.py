"""Errata's signals in a trainer: rollouts, hints, teachers, channels, and a recipe for each trainer.

It may import ``errata_protocol`` and ``errata_client`` only; no recipe imports another, and no channel a trainer.
"""

from .rollout import Call, DpoPair, Rollout, SdpoItem, Turn

__all__ = ["Call", "DpoPair", "Rollout", "SdpoItem", "Turn"]
