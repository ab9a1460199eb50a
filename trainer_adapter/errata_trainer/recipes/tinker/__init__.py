"""SDPO on a Tinker service: rollouts, error sites and pairs as its ``Datum``, losses for its custom passes, and a
policy whose calls have deadlines and whose scores are checked.

docs/tinker.md has the whole way. `errata_trainer.recipes.tinker.env` has environments for the Tinker cookbook, which
the extra does not install.
"""

from .datums import datums, divergence_datums, group_advantages, pair_datums
from .losses import divergence_loss, preference_loss
from .policy import Capabilities, Sampled, TinkerPolicy
from .reprompt import Attempt, Reprompt
from .session import Completion, SdpoSession

__all__ = [
    "Attempt",
    "Capabilities",
    "Completion",
    "Reprompt",
    "Sampled",
    "SdpoSession",
    "TinkerPolicy",
    "datums",
    "divergence_datums",
    "divergence_loss",
    "group_advantages",
    "pair_datums",
    "preference_loss",
]
