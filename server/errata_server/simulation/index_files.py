"""A real SQLite index beside a simulated disk: a crash leaves what was there, or something older or torn.

SQLite does its own input and output, so its files are real ones in a directory of the caller's. A machine that goes
down copies them as they are in that moment; a power loss may leave an earlier copy instead, a part of it, or nothing.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from ..journal.index import INDEX

_FILES = (INDEX, f"{INDEX}-wal")
"""What SQLite finds an index again in; the third, shared memory, it makes anew."""


class IndexFiles:
    """The directories of an index, one for each boot.

    Args:
        root: An empty directory; whoever made it removes it.
        chance: Draws what a power loss leaves.

    Attributes:
        current: Directory of this boot.
    """

    def __init__(self, root: Path, chance: random.Random) -> None:
        self._root = root
        self._chance = chance
        self._boots = 0
        self._kept: Path | None = None
        self.current = self._next()

    def keep(self) -> None:
        """Keep a copy of the index as it is now: a power loss may leave this one."""
        self._kept = self._root / "kept"
        shutil.rmtree(self._kept, ignore_errors=True)
        self._kept.mkdir()
        _copy(self.current, self._kept)

    def crash(self, *, power_loss: bool) -> None:
        """Take what is there now for what the next boot finds: what the dead server does later is not seen."""
        before, self.current = self.current, self._next()
        _copy(before, self.current)
        if power_loss:
            self._spoil()

    def _spoil(self) -> None:
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
            case "torn" if wal.exists():  # the database itself is written behind its log and synced: it is never torn
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
