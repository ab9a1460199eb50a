"""Client of Errata and of vanilla OpenEnv servers.

client, sync        `ErrataClient` and its blocking form: OpenEnv's client with state(t), fork and resumption
pool, batch         many sessions stepped together
episodes            episodes in a server's journal, without a session
doors               the ways to a session: a multiplexed socket, a plain one, HTTP
fleet               the members of a server that is several processes
connections         one multiplexed socket for many sessions
deliveries          what was received, byte for byte, and late rewards
wire                frames, and the classes of an environment made of them
"""

from . import openenv_import  # noqa: F401 # before any other module imports OpenEnv
from .client import ErrataClient
from .connections.connection import Connection
from .connections.dialing import Backoff
from .connections.stats import ConnectionStats, SessionStats
from .connections.ticket import Ticket
from .deliveries.late_rewards import Reward
from .episodes import Episodes
from .fleet import Endpoint, Fleet
from .pool import BatchFailed, EnvPool, PoolStats, SyncEnvPool
from .sync import SyncErrataClient
from .wire.frames import DigestMismatch, FrameInvalid

__all__ = [
    "Backoff",
    "BatchFailed",
    "Connection",
    "ConnectionStats",
    "DigestMismatch",
    "Endpoint",
    "EnvPool",
    "Episodes",
    "ErrataClient",
    "Fleet",
    "FrameInvalid",
    "PoolStats",
    "Reward",
    "SessionStats",
    "SyncEnvPool",
    "SyncErrataClient",
    "Ticket",
]
