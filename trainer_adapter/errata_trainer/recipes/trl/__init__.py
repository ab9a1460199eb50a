"""Errata in TRL's `GRPOTrainer`."""

from ...assembly.teacher_pairs import TeacherPairs
from ...episodes.tasks import EvaluationSplitWarning
from ...settings import ChannelSettings
from .dataset import dataset
from .environment import EpisodeEnvironment, environment_factory
from .parallel_tools import ParallelTools
from .trainer import ThreeChannelGRPOTrainer

__all__ = [
    "ChannelSettings",
    "EpisodeEnvironment",
    "EvaluationSplitWarning",
    "ParallelTools",
    "TeacherPairs",
    "ThreeChannelGRPOTrainer",
    "dataset",
    "environment_factory",
]
