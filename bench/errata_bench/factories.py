"""How many environment instances were made, counted in one process and read in another: a file with a byte for each."""

from __future__ import annotations

import os
from pathlib import Path


class Tally:
    """Counts.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def add(self) -> None:
        """Count one more."""
        os.write(self._file, b".")


class Ahead:
    """Whether each answer came after the instance it speaks of was made.

    Args:
        path: The file of a `Tally`; None looks at nothing.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._before = self._size()
        self._least: int | None = None

    def answered(self, answers: int) -> None:
        """Take that so many sessions have been answered by now."""
        if self._path is not None:
            spare = self._size() - self._before - answers
            self._least = spare if self._least is None else min(self._least, spare)

    @property
    def missing(self) -> float:
        """The most instances that were missing at any answer; 0 means that every answer came after its factory ran."""
        return float(max(0, -(self._least or 0)))

    def _size(self) -> int:
        return self._path.stat().st_size if self._path is not None and self._path.exists() else 0
