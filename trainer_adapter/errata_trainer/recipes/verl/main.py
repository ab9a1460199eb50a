"""Runs VeRL's V1 trainer with the three channels: ``python -m errata_trainer.recipes.verl``, with Hydra's overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import ray
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from .options import channel_options_of, options_of
from .refusals import check_configuration
from .task_runner import ErrataTaskRunner


def train(config: Any) -> None:
    """Train.

    Args:
        config: VeRL's configuration, with the block ``errata``.

    Raises:
        ValueError: A setting is not valid, or does not fit the channels.
    """
    auto_set_device(config)
    options_of(config)
    check_configuration(config, channel_options_of(config, made=False))
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    run_ppo(config, task_runner_class=ray.remote(ErrataTaskRunner))


main = hydra.main(config_path=str(Path(__file__).parent / "config"), config_name="errata_ppo", version_base=None)(train)
