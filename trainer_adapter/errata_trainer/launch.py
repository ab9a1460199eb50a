"""Which of how many processes this is, as `torchrun` and `accelerate launch` say it in the environment."""

from __future__ import annotations

import os


def processes() -> int:
    """Return how many processes train together: ``WORLD_SIZE``, 1 without."""
    return max(1, int(os.environ.get("WORLD_SIZE", "1")))


def process() -> int:
    """Return which of them this is, from 0: ``RANK``, 0 without."""
    return int(os.environ.get("RANK", "0"))
