"""Rank and world size of this process, from the environment variables that `torchrun` and `accelerate launch` set."""

from __future__ import annotations

import os


def processes() -> int:
    """Return the number of training processes: ``WORLD_SIZE``, or 1."""
    return max(1, int(os.environ.get("WORLD_SIZE", "1")))


def process() -> int:
    """Return the rank of this process: ``RANK``, or 0."""
    return int(os.environ.get("RANK", "0"))
