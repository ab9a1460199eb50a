"""Errata in TRL's `GRPOTrainer`."""

from .environment import SeatedEnvironment, environment_factory
from .parallel_tools import ParallelTools
from .settings import ChannelSettings
from .teacher_pairs import TeacherPairs
from .trainer import ThreeChannelGRPOTrainer

__all__ = [
    "ChannelSettings",
    "ParallelTools",
    "SeatedEnvironment",
    "TeacherPairs",
    "ThreeChannelGRPOTrainer",
    "environment_factory",
]
