"""Errata in TRL's `GRPOTrainer`."""

from .environment import SeatedEnvironment, environment_factory
from .parallel_tools import ParallelTools

__all__ = ["ParallelTools", "SeatedEnvironment", "environment_factory"]
