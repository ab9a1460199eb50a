"""Errata in VeRL's own trainer: so far the advantage estimator `grpo_composer`.

VeRL loads it in each of its processes with the environment variable
``VERL_USE_EXTERNAL_MODULES=errata_trainer.recipes.verl`` and uses it with ``algorithm.adv_estimator=grpo_composer``.
"""

from .estimator import GRPO_COMPOSER, Shaping, grpo_composer, shaping

__all__ = ["GRPO_COMPOSER", "Shaping", "grpo_composer", "shaping"]
