"""Rank and world size of this process, from the environment variables that `torchrun` and `accelerate launch` set."""

from __future__ import annotations

import os
from pathlib import Path


def processes() -> int:
    """Return the number of training processes: ``WORLD_SIZE``, or 1."""
    return max(1, int(os.environ.get("WORLD_SIZE", "1")))


def process() -> int:
    """Return the rank of this process: ``RANK``, or 0."""
    return int(os.environ.get("RANK", "0"))


def of_this_process(path: Path) -> Path:
    """Return the path with the rank in its file name if there are several processes; otherwise the path itself."""
    return path if processes() == 1 else path.with_name(f"{path.stem}.rank{process()}{path.suffix}")
