"""Counts environment instances across processes: the server appends one byte to a file for each, the load reads it."""

from __future__ import annotations

import os
from pathlib import Path

COUNTER_VARIABLE = "ERRATA_BENCH_COUNTER"
"""Environment variable with the path of the file in which instances are counted."""


class Tally:
    """Counts instances.

    Args:
        path: File that gets one byte for each instance.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def add(self) -> None:
        """Count one instance."""
        os.write(self._file, b".")


class FactoryCheck:
    """Checks that no ``opened`` reply arrives before the session's instance was made.

    Args:
        path: File of a `Tally`; None checks nothing.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._before = self._size()
        self._least: int | None = None

    def answered(self, answers: int) -> None:
        """Compare the number of instances with the number of sessions that were answered so far."""
        if self._path is not None:
            spare = self._size() - self._before - answers
            self._least = spare if self._least is None else min(self._least, spare)

    @property
    def missing(self) -> float:
        """Largest number of instances missing at any answer; 0 means that each answer came after its factory ran."""
        return float(max(0, -(self._least or 0)))

    def _size(self) -> int:
        return self._path.stat().st_size if self._path is not None and self._path.exists() else 0
