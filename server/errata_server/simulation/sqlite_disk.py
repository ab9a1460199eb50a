"""A disk that forgets: the fake for the one promise that killing a process cannot test.

``kill -9`` leaves the page cache alone, so it says nothing about fsync. `ForgetfulDisk` is an SQLite VFS that remembers
each file as of its last sync; `power_loss` writes those images out, which is what a machine would find after the
power came back.
"""

from __future__ import annotations

import threading
from pathlib import Path

import apsw


class ForgetfulDisk(apsw.VFS):
    """VFS that can lose everything written since the last sync.

    Args:
        name: Name to register under; pass it as ``vfs`` to `errata_server.journal.sqlite.SqliteJournal`.
        honours_sync: False makes a sync do nothing, as a lying disk would: the control of a test.

    Set ``full`` and every sync fails for want of space, until it is unset; ``refused`` is set by the first that does.
    """

    def __init__(self, name: str, *, honours_sync: bool = True) -> None:
        super().__init__(name, "")
        self.name = name
        self.honours_sync = honours_sync
        self.images: dict[Path, bytes] = {}
        self.syncs = 0
        self.full = False
        self.refused = threading.Event()

    def xOpen(self, name: apsw.URIFilename | str | None, flags: list[int]) -> _File:  # noqa: N802 - SQLite's names
        return _File(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        super().xDelete(filename, syncdir)
        self.images.pop(Path(filename), None)  # durable, because SqliteJournal syncs the directory after set-up

    def power_loss(self, directory: Path) -> None:
        """Write every file as of its last sync into ``directory``; a file never synced is not there."""
        for path, image in self.images.items():
            if not path.name.endswith("-shm"):  # rebuilt by SQLite; never synced on a real machine either
                (directory / path.name).write_bytes(image)


class _File(apsw.VFSFile):
    def __init__(self, disk: ForgetfulDisk, name: apsw.URIFilename | str | None, flags: list[int]) -> None:
        filename = name.filename() if isinstance(name, apsw.URIFilename) else name
        self._disk = disk
        self._path = Path(filename) if filename else None
        super().__init__("", name, flags)

    def xSync(self, flags: int) -> None:  # noqa: N802
        if self._disk.full:
            self._disk.refused.set()
            raise apsw.FullError("the disk is full")
        super().xSync(flags)
        self._disk.syncs += 1
        if self._disk.honours_sync and self._path is not None:
            self._disk.images[self._path] = self._path.read_bytes()
