"""`ErrataTaskRunner`: VeRL's task runner with trainers that have channels 2 and 3."""

from __future__ import annotations

from typing import Any

from omegaconf import open_dict
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from .options import channel_options_of
from .refusals import check_configuration
from .trainer import ChannelTrainer, with_channels

MANAGER = "errata_trainer.recipes.verl.workers.ErrataAgentLoopManager"


class ErrataTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc]
    """VeRL's task runner. ``run_ppo`` makes it as a Ray actor."""

    def run(self, config: Any) -> None:
        """Train as VeRL does, with the channels that the configuration asks for.

        Args:
            config: VeRL's configuration, with the block ``errata``.

        Raises:
            ValueError: A setting does not fit the channels.
        """
        check_configuration(config, channel_options_of(config, made=False))
        agent = config.actor_rollout_ref.rollout.agent
        with open_dict(agent):
            if not agent.get("agent_loop_manager_class"):
                agent.agent_loop_manager_class = MANAGER
        mode = config.trainer.v1.trainer_mode
        if not issubclass(TRAINER_REGISTRY[mode], ChannelTrainer):
            TRAINER_REGISTRY[mode] = with_channels(TRAINER_REGISTRY[mode])
        super().run(config)
