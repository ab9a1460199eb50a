"""``PYTHONHASHSEED``, on which the order of sets depends: one for each data directory, and a record of each process's.

`chosen` draws the seed that ``errata serve`` runs deterministic environments under. `HashSeeds` keeps in the data
directory what every server process really had, so that a re-execution that differs can say so.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("errata.server")

VARIABLE = "PYTHONHASHSEED"
CHOSEN = "hash_seed"
"""Name of the file with the seed of a data directory."""

PROCESSES = "hash_seeds.jsonl"
"""Name of the file with the seeds that processes had."""

_KEPT = 1000
"""Changes of the seed that are kept; nobody looks for older ones."""


@dataclass(frozen=True, slots=True)
class HashSeed:
    """What one process, or several after each other, had.

    Args:
        since: When the first of them started, seconds since the epoch.
        seed: ``PYTHONHASHSEED``; None where Python drew one, which nothing tells.
        order: Hash of a fixed text: equal under equal seeds, whether drawn or given.
    """

    since: float
    seed: str | None
    order: int


def given() -> str | None:
    """Return the seed that this process was started with; None where Python drew one."""
    seed = os.environ.get(VARIABLE, "random")
    return seed if seed.isdecimal() else None


def chosen(data_dir: Path) -> int:
    """Return the seed of a data directory; the first call draws it.

    It is drawn, not 0, because a seed that everybody knows lets a client choose keys that collide.

    Raises:
        OSError: The directory cannot be written or read.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = data_dir / CHOSEN
    draft = data_dir / f"{CHOSEN}.{os.getpid()}"
    if not file.exists():
        draft.touch(mode=0o600)
        draft.write_text(f"{secrets.randbits(32)}\n")
        try:
            os.link(draft, file)  # all of it or nothing, and never over another's
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return int(file.read_text())


class HashSeeds:
    """The hash seeds of the server processes of one data directory, this one's included.

    Args:
        data_dir: Where they are kept; None for a server without one, whose sessions end with its process.
        now: When this process began, seconds since the epoch.
    """

    def __init__(self, data_dir: Path | None, now: float) -> None:
        self._own = HashSeed(now, given(), hash("the order of a set"))
        self._known: list[HashSeed] = []
        self._file = data_dir / PROCESSES if data_dir is not None else None

    def keep(self) -> None:
        """Write down this process's seed, now that sessions may begin, and read those of the processes before it."""
        file = self._file
        if file is None:
            return
        try:
            lines = file.read_text().splitlines() if file.exists() else []
            self._known = [HashSeed(**json.loads(line)) for line in lines[-_KEPT:]]
            if self._known and self._known[-1].order == self._own.order:
                return
            self._known.append(self._own)
            text = "".join(
                json.dumps({"since": known.since, "seed": known.seed, "order": known.order}) + "\n"
                for known in self._known[-_KEPT:]
            )
            draft = file.with_name(file.name + ".new")
            draft.write_text(text)
            draft.chmod(0o600)
            draft.replace(file)
        except (OSError, ValueError, TypeError) as error:  # only messages are worse without it
            log.warning("the hash seed of this process could not be noted in %s: %s", file, error)

    def another(self, at: float) -> HashSeed | None:
        """Return the seed of the process that ran at ``at``; None where it was this one's, or nobody knows.

        Args:
            at: Seconds since the epoch.
        """
        before = [known for known in self._known if known.since <= at]
        return before[-1] if before and before[-1].order != self._own.order else None
