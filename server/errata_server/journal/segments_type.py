"""`SegmentsType`: the entry point of the store ``segments``, the default one."""

from __future__ import annotations

from pathlib import Path

from .base import Journal
from .disk import DirectoryDisk
from .indexed import IndexedJournal
from .journal_type import JournalConfig, JournalType
from .leased import take_over
from .read_only import ReadOnlyJournal, is_unused
from .salvage import SalvageReport, salvage


class SegmentsType(JournalType):
    """Append-only segments with a SQLite index."""

    takes_leases = True

    def open(self, config: JournalConfig) -> Journal:
        return IndexedJournal(config.directory, fsync=config.fsync, is_ours=config.is_ours)

    def open_read_only(self, directory: Path) -> Journal:
        return ReadOnlyJournal(directory)

    def is_unused(self, directory: Path) -> bool:
        return is_unused(directory)

    def salvage(self, directory: Path, *, output: Path | None = None, dry_run: bool = False) -> SalvageReport:
        return salvage(directory, output=output, dry_run=dry_run)

    def take_over(self, source: Path, target: Path) -> None:
        take_over(DirectoryDisk(source, make=False), DirectoryDisk(target))
