"""What VeRL cannot do with the channels, said before anything is loaded."""

from __future__ import annotations

from typing import Any

from hydra.utils import get_class

from .estimator import GRPO_COMPOSER
from .options import ChannelOptions


def check_configuration(config: Any, options: ChannelOptions) -> None:
    """Check that the settings of VeRL and of the channels go together.

    Args:
        config: VeRL's configuration.
        options: Options of the channels.

    Raises:
        ValueError: They do not; the message names the setting to change.
    """
    rollout = config.actor_rollout_ref.rollout
    if config.algorithm.adv_estimator != GRPO_COMPOSER:
        raise ValueError(f"algorithm.adv_estimator is {config.algorithm.adv_estimator!r}: use {GRPO_COMPOSER}")
    if int(rollout.n) < 2:
        raise ValueError(
            f"actor_rollout_ref.rollout.n is {rollout.n}: rows that are alone in their group have no advantage, "
            "so use at least 2"
        )
    agent = "actor_rollout_ref.rollout.agent"
    manager = rollout.agent.get("agent_loop_manager_class")
    if manager and not hasattr(get_class(manager), "check_workers"):
        raise ValueError(
            f"{agent}.agent_loop_manager_class is {manager}, which does not see lost rollouts and "
            "workers that die: leave it null, or derive the class from "
            "errata_trainer.recipes.verl.workers.ErrataAgentLoopManager"
        )
    if options.form == "estimator":
        if options.alpha_sdpo != 0 and float(rollout.temperature) != 1.0:
            raise ValueError(
                f"actor_rollout_ref.rollout.temperature is {rollout.temperature}: the rollout server gives the "
                "teacher's log-probabilities at temperature 1, and the student's are at this one; use 1, or "
                "errata.channels.form=loss"
            )
        if options.settings.prm_weight:
            raise ValueError(
                "errata.channels.settings.prm_weight is for form=loss: with form=estimator algorithm.beta_replay is "
                "the weight of the teachers' scores"
            )
