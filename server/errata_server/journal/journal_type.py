"""`JournalType`: a kind of durable journal, which an entry point of the group ``errata.journal_stores`` names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from errata_protocol.errors import NotSupported

from .base import Journal
from .salvage import SalvageReport


@dataclass(frozen=True, slots=True)
class JournalConfig:
    """The operator's choices for the journal of one data directory.

    Args:
        directory: Directory of the store's files, and of no others. The store makes it if it is missing, readable for
            its owner alone; a data directory without it has no journal.
        fsync: Whether a commit is synced to the disk before it is answered.
        is_ours: Returns whether the lease of the data directory is valid. A store with `JournalType.takes_leases`
            acknowledges only what was durable before this returned True. None where one process alone has the
            directory.
    """

    directory: Path
    fsync: bool = True
    is_ours: Callable[[], bool] | None = None


class JournalType(ABC):
    """A kind of journal, named by an entry point of the group ``errata.journal_stores``.

    To add a store, subclass this in a package of your own and name the class in an entry point. `registry` finds it,
    and the setting ``journal_store`` selects it by the entry point's name for a data directory that has no journal yet.

    Attributes:
        takes_leases: Whether it keeps to `JournalConfig.is_ours` and has `take_over`, so that boxes can share a
            directory.
    """

    takes_leases: ClassVar[bool] = False

    @abstractmethod
    def open(self, config: JournalConfig) -> Journal:
        """Open the journal of a data directory, which this process has locked; make one if there is none. The commits
        of this journal have to be durable.

        Raises:
            JournalUnavailable: It cannot be used, or is damaged.
        """

    @abstractmethod
    def open_read_only(self, directory: Path) -> Journal:
        """Open a journal for reading while a server may be running on it. Each read sees what was committed before it;
        nothing on disk is changed.

        Args:
            directory: Directory of the journal's files.

        Raises:
            JournalUnavailable: There is no journal, or it cannot be read.
        """

    def is_unused(self, directory: Path) -> bool:
        """Return whether a journal has never held a row; commands that list several journals leave such ones out.

        Args:
            directory: Directory of the journal's files, which exists.

        Raises:
            JournalUnavailable: It cannot be read.
        """
        return not any(directory.iterdir())

    def salvage(self, directory: Path, *, output: Path | None = None, dry_run: bool = False) -> SalvageReport:
        """Repair a damaged journal in place, or into a copy. No server may be running on one that is repaired in place.

        Args:
            directory: Directory of the journal's files.
            output: Directory of a repaired copy, which must not exist yet; None to repair in place.
            dry_run: Whether to report only.

        Raises:
            JournalUnavailable: There is no journal, or it cannot be read or written.
            NotSupported: This store has no repair.
        """
        raise NotSupported(
            f"the journal in {directory} cannot be repaired: its store ({type(self).__module__}) has no repair; "
            "restore it from a copy"
        )

    def take_over(self, source: Path, target: Path) -> None:
        """Make a journal in an empty directory of what another has, whose owner may still write to it, durably. All
        that owner's later changes are without effect on it.

        Args:
            source: Directory of the other journal's files.
            target: Directory of the new one's, on the same file system; it does not exist yet.

        Raises:
            JournalUnavailable: A record that was durable is damaged.
            NotSupported: This store has no such thing.
            OSError: A disk cannot be read or written; or ``source`` is being removed.
        """
        raise NotSupported(f"the store of the journal in {source} ({type(self).__module__}) takes no leases")
