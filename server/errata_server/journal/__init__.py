"""Keeps sessions, episodes, deliveries and rewards durable: the base class `Journal` (`base`) and its stores.

`IndexedJournal` (segments and a SQLite index) is what a data directory has unless its store is another: `registry`
finds stores by their entry points. `LogJournal` keeps rows in memory beside segments, for the simulation;
`MemoryJournal` has no disk; `ReadOnlyJournal` reads beside a running server. What a request means, and the files of
sandboxes, do not belong here.
"""

from .base import (
    ALL_OWNERS,
    DeliveryRow,
    EpisodeRow,
    EpisodeStats,
    HeldEpisode,
    Journal,
    Reads,
    RewardRow,
    SessionChange,
    SessionRow,
    TurnRow,
)
from .disk import DirectoryDisk, Disk
from .indexed import IndexedJournal
from .journal_type import JournalConfig, JournalType
from .log import LogJournal
from .memory import MemoryJournal
from .read_only import ReadOnlyJournal, is_unused
from .registry import journal_in
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
    "JournalConfig",
    "JournalSize",
    "JournalType",
    "LogJournal",
    "MemoryJournal",
    "ReadOnlyJournal",
    "Reads",
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
