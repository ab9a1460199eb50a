"""Durable deliveries: the seam, the SQLite store, the one in memory, and a disk that forgets."""

from .base import DeliveryRow, EpisodeRow, EpisodeStats, Journal, SessionChange, SessionRow, TurnRow
from .memory import MemoryJournal
from .sqlite import SqliteJournal

__all__ = [
    "DeliveryRow",
    "EpisodeRow",
    "EpisodeStats",
    "Journal",
    "MemoryJournal",
    "SessionChange",
    "SessionRow",
    "SqliteJournal",
    "TurnRow",
]
