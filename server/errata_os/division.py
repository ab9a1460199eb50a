"""What the machine has, divided among the processes that serve one address: each of N may use an Nth of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Division:
    """Which part of what the machine has is one process's.

    Args:
        number: Number of the process, from 0.
        of: Number of processes.
        first: Data directory of the first process; None where there is one process.
    """

    number: int = 0
    of: int = 1
    first: Path | None = None

    def share(self, limit: int, least: int = 1) -> int:
        """Return the process's part of a limit of all processes.

        Args:
            limit: The limit.
            least: Smallest part, unless the limit is lower; so N parts may be more than the limit.
        """
        return max(min(least, limit), limit // self.of)


ALONE = Division()
"""A process that serves alone."""

_own = ALONE


def own_division() -> Division:
    """Return which part is this process's; all of it, unless `divide` was called."""
    return _own


def divide(division: Division) -> None:
    """Make this process one of several. Call it before the process uses what is divided."""
    global _own
    _own = division
