"""Errata in TRL's `GRPOTrainer`."""

from ...settings import ChannelSettings
from ...teacher_pairs import TeacherPairs
from .dataset import EvaluationSplitWarning, dataset
from .environment import SeatedEnvironment, environment_factory
from .parallel_tools import ParallelTools
from .trainer import ThreeChannelGRPOTrainer

__all__ = [
    "ChannelSettings",
    "EvaluationSplitWarning",
    "ParallelTools",
    "SeatedEnvironment",
    "TeacherPairs",
    "ThreeChannelGRPOTrainer",
    "dataset",
    "environment_factory",
]
