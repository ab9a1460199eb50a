"""Starts the server process again under its data directory's hash seed, where it has none yet."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from errata_protocol.errors import JournalUnavailable

from ..runtime.hash_seed import VARIABLE, chosen, given


def fix(data_dir: Path) -> None:
    """Go on under a fixed hash seed: this one's if ``PYTHONHASHSEED`` gave one, else as a new program in this process.

    Python reads the seed when it starts and the order of sets depends on it, so an environment whose requests are run
    again in another process needs it fixed before anything is imported. The process keeps its id; what it has open is
    closed.

    Args:
        data_dir: Whose seed to take; it is drawn by the first server that asks.

    Raises:
        JournalUnavailable: The data directory cannot be used.
    """
    if given() is not None or sys.flags.ignore_environment:
        return
    try:
        seed = chosen(data_dir.expanduser())
    except (OSError, ValueError) as error:
        raise JournalUnavailable(f"cannot keep a hash seed in the data directory {data_dir}: {error}") from error
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, VARIABLE: str(seed)})
