"""Restarts the server process with the ``PYTHONHASHSEED`` of its data directory, unless one is set."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from errata_protocol.errors import JournalUnavailable

from ..runtime.hash_seed import VARIABLE, chosen, given


def fix(data_dir: Path) -> None:
    """Replace this process with the same command under the data directory's hash seed (``execve``).

    Returns without effect if ``PYTHONHASHSEED`` is set or Python ignores environment variables. Python reads the seed
    when it starts and the order of sets depends on it, so an environment whose requests run again in another process
    needs a fixed seed before anything is imported. The process keeps its id; its open files are closed.

    Args:
        data_dir: Data directory that keeps the seed; it is drawn on first use.

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
