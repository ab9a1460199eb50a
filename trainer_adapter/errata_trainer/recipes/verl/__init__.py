"""Errata in VeRL's own trainer: rollouts in any environment of a server, and the advantages of a batch of them.

VeRL loads it in each of its processes with the environment variable
``VERL_USE_EXTERNAL_MODULES=errata_trainer.recipes.verl``; docs/training.md has the settings.
"""

from .agent_loop import ERRATA, ErrataAgentLoop
from .dataset import write_dataset
from .estimator import GRPO_COMPOSER, Shaping, grpo_composer, shaping
from .options import EpisodeOptions

__all__ = [
    "ERRATA",
    "GRPO_COMPOSER",
    "EpisodeOptions",
    "ErrataAgentLoop",
    "Shaping",
    "grpo_composer",
    "shaping",
    "write_dataset",
]
