"""Durable deliveries: the seam, the codec, and the stores: SQLite, append-only segments, memory."""

from .base import (
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
from .log import LogJournal
from .memory import MemoryJournal
from .sqlite import SqliteJournal
from .sqlite_reads import ReadOnlyJournal

__all__ = [
    "DeliveryRow",
    "DirectoryDisk",
    "Disk",
    "EpisodeRow",
    "EpisodeStats",
    "HeldEpisode",
    "Journal",
    "LogJournal",
    "MemoryJournal",
    "ReadOnlyJournal",
    "RewardRow",
    "SessionChange",
    "SessionRow",
    "SqliteJournal",
    "TurnRow",
]
