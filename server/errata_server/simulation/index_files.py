"""The files of a real SQLite index next to a simulated disk; a crash leaves the current files, older or torn ones.

SQLite does its own I/O, so the files are real ones in a directory of the caller. When the simulated machine crashes
they are copied for the next boot; after a power loss that may be an earlier copy, a damaged one, or none.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from ..journal.index import INDEX

_FILES = (INDEX, f"{INDEX}-wal")
"""The files from which SQLite opens an index; it makes the third one, for shared memory, again."""


class IndexFiles:
    """The directories of an index, one for each boot.

    Args:
        root: An empty directory, which the caller removes.
        chance: Random numbers for what a power loss leaves.

    Attributes:
        current: Directory of the current boot.
    """

    def __init__(self, root: Path, chance: random.Random) -> None:
        self._root = root
        self._chance = chance
        self._boots = 0
        self._kept: Path | None = None
        self.current = self._next()

    def keep(self) -> None:
        """Copy the current files; a later power loss may leave this copy."""
        self._kept = self._root / "kept"
        shutil.rmtree(self._kept, ignore_errors=True)
        self._kept.mkdir()
        _copy(self.current, self._kept)

    def crash(self, *, power_loss: bool) -> None:
        """Copy the files for the next boot, so that it does not see what the crashed server still writes.

        Args:
            power_loss: Replace the copy by an older or damaged one, drawn at random.
        """
        before, self.current = self.current, self._next()
        _copy(before, self.current)
        if power_loss:
            self._spoil()

    def _spoil(self) -> None:
        """Damage the next boot's files in one of several ways, or not, drawn at random."""
        what = self._chance.choice(["as it was", "kept", "kept", "missing", "without its log", "torn", "garbage"])
        index, wal = (self.current / name for name in _FILES)
        match what:
            case "kept" if self._kept is not None:
                for path in (index, wal):
                    path.unlink(missing_ok=True)
                _copy(self._kept, self.current)
            case "missing":
                index.unlink(missing_ok=True)
                wal.unlink(missing_ok=True)
            case "without its log":
                wal.unlink(missing_ok=True)
            case "torn" if wal.exists():  # not the database itself: SQLite writes its log first and syncs it
                content = wal.read_bytes()
                wal.write_bytes(content[: self._chance.randint(0, len(content))])
            case "garbage":
                index.write_bytes(self._chance.randbytes(8192))
                wal.unlink(missing_ok=True)

    def _next(self) -> Path:
        self._boots += 1
        made = self._root / str(self._boots)
        made.mkdir()
        return made


def _copy(here: Path, there: Path) -> None:
    for name in _FILES:
        if (here / name).exists():
            shutil.copyfile(here / name, there / name)
