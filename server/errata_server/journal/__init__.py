"""Keeps sessions, episodes, deliveries and rewards durable: the `Journal` protocol (`base`) and its stores.

`IndexedJournal` (segments and a SQLite index) is what a data directory has; `LogJournal` keeps rows in memory beside
segments, for the simulation; `MemoryJournal` has no disk; `ReadOnlyJournal` reads beside a running server.
`runtime.startup.open_journal` chooses the one of a server, `cli.source` that of a command. What a request means, and
the files of sandboxes, do not belong here.
"""

from .base import (
    ALL_OWNERS,
    DeliveryRow,
    EpisodeRow,
    EpisodeStats,
    HeldEpisode,
    Journal,
    RewardRow,
    SessionChange,
    SessionRow,
    TurnRow,
)
from .disk import DirectoryDisk, Disk
from .indexed import IndexedJournal, journal_in
from .log import LogJournal
from .memory import MemoryJournal
from .read_only import ReadOnlyJournal, is_unused
from .report import JournalSize, SegmentSize, journal_problems, journal_size
from .salvage import AffectedSession, DamagedRange, SalvageReport, salvage

__all__ = [
    "ALL_OWNERS",
    "AffectedSession",
    "DamagedRange",
    "DeliveryRow",
    "DirectoryDisk",
    "Disk",
    "EpisodeRow",
    "EpisodeStats",
    "HeldEpisode",
    "IndexedJournal",
    "Journal",
    "JournalSize",
    "LogJournal",
    "MemoryJournal",
    "ReadOnlyJournal",
    "RewardRow",
    "SalvageReport",
    "SegmentSize",
    "SessionChange",
    "SessionRow",
    "TurnRow",
    "is_unused",
    "journal_in",
    "journal_problems",
    "journal_size",
    "salvage",
]
