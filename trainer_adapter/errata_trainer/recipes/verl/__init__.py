"""The three channels in VeRL's own V1 trainer, with rollouts in any environment of a server.

    python -m errata_trainer.recipes.verl errata.url=http://127.0.0.1:8000 data.train_files=train.parquet ...

docs/training.md has the settings. VeRL's stock command loads the agent loop and the estimator, without the other
channels, with the environment variable ``VERL_USE_EXTERNAL_MODULES=errata_trainer.recipes.verl``.
"""

from .agent_loop import ERRATA, ErrataAgentLoop
from .dataset import write_dataset
from .estimator import GRPO_COMPOSER, Shaping, grpo_composer, shaping
from .options import ChannelOptions, EpisodeOptions
from .policy_loss import SEGMENT_RATIO, segment_ratio_loss

__all__ = [
    "ERRATA",
    "GRPO_COMPOSER",
    "SEGMENT_RATIO",
    "ChannelOptions",
    "EpisodeOptions",
    "ErrataAgentLoop",
    "Shaping",
    "grpo_composer",
    "segment_ratio_loss",
    "shaping",
    "write_dataset",
]
