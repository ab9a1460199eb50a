"""Client of Errata and of vanilla OpenEnv servers.

A session of `ErrataClient` uses a multiplexed or a plain WebSocket (`doors.Door`). `http_door` calls the HTTP routes.
"""

from . import openenv_import  # noqa: F401 # before any other module imports OpenEnv
from .client import ErrataClient
from .connection import Connection
from .dialing import Backoff
from .episodes import Episodes
from .frames import DigestMismatch, FrameInvalid
from .late_rewards import Reward
from .pool import BatchFailed, EnvPool, PoolStats, SyncEnvPool
from .stats import ConnectionStats, SessionStats
from .sync import SyncErrataClient
from .ticket import Ticket

__all__ = [
    "Backoff",
    "BatchFailed",
    "Connection",
    "ConnectionStats",
    "DigestMismatch",
    "EnvPool",
    "Episodes",
    "ErrataClient",
    "FrameInvalid",
    "PoolStats",
    "Reward",
    "SessionStats",
    "SyncEnvPool",
    "SyncErrataClient",
    "Ticket",
]
