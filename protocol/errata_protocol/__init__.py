"""Errata's wire protocol: pure values and functions, no I/O. (`late_imports` changes how other packages are imported.)

Importing or using this package opens no socket or file, reads no clock, starts no thread and draws no random number.
"""

from .capabilities import Capabilities, ServerLimits, SessionPosition
from .environment import (
    EnvironmentSpec,
    Recoverable,
    Recovery,
    Snapshot,
    SnapshotRef,
    default_agent_text,
)
from .episode_lists import EpisodeFilter, EpisodeOrder
from .errors import CODES, CallerError, ErrataError, ServiceError, error_from_wire
from .labels import Labels
from .markers import HINT_TEMPLATE_KEYS, Detection, ErrorKind, ErrorMarkers, ErrorSite
from .payload import canonical, digest, encode_payload, semantic_digest, splice
from .replay import (
    AgentText,
    EpisodeAggregates,
    EpisodeBucket,
    EpisodeDetail,
    EpisodeEvent,
    EpisodePage,
    EpisodeSummary,
    ForkReply,
    ForkRequest,
    PlayedTurn,
    RewardPost,
    RewardRecord,
    StateAt,
    TurnPage,
    TurnRecord,
)

__all__ = [
    "CODES",
    "HINT_TEMPLATE_KEYS",
    "AgentText",
    "CallerError",
    "Capabilities",
    "Detection",
    "EnvironmentSpec",
    "EpisodeAggregates",
    "EpisodeBucket",
    "EpisodeDetail",
    "EpisodeEvent",
    "EpisodeFilter",
    "EpisodeOrder",
    "EpisodePage",
    "EpisodeSummary",
    "ErrataError",
    "ErrorKind",
    "ErrorMarkers",
    "ErrorSite",
    "ForkReply",
    "ForkRequest",
    "Labels",
    "PlayedTurn",
    "Recoverable",
    "Recovery",
    "RewardPost",
    "RewardRecord",
    "ServerLimits",
    "ServiceError",
    "SessionPosition",
    "Snapshot",
    "SnapshotRef",
    "StateAt",
    "TurnPage",
    "TurnRecord",
    "canonical",
    "default_agent_text",
    "digest",
    "encode_payload",
    "error_from_wire",
    "semantic_digest",
    "splice",
]
