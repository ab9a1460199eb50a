"""Client of Errata and of vanilla OpenEnv servers."""

from .client import ErrataClient
from .connection import Connection
from .dialing import Backoff
from .frames import DigestMismatch, FrameInvalid
from .late_rewards import Reward
from .stats import ConnectionStats, SessionStats
from .sync import SyncErrataClient
from .ticket import Ticket

__all__ = [
    "Backoff",
    "Connection",
    "ConnectionStats",
    "DigestMismatch",
    "ErrataClient",
    "FrameInvalid",
    "Reward",
    "SessionStats",
    "SyncErrataClient",
    "Ticket",
]
