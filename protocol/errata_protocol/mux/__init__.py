"""The multiplexed protocol (PROTOCOL D) without sockets: envelopes, messages, and the state machines of both sides."""

from .client import ClientProtocol
from .client_session import ClientConfig, ClientRead, ClientRequest, ClientSession
from .effects import (
    AnswerRead,
    Effect,
    FindSession,
    ForgetReplies,
    Hibernate,
    ReadPushes,
    ReadReplies,
    RecordError,
    RunRequest,
    Stored,
    Write,
)
from .events import (
    Answered,
    Attached,
    ClientEvent,
    Failed,
    GoneAway,
    Pushed,
    Refused,
    Replied,
    SessionEnded,
    TakenOver,
)
from .messages import CLIENT_MESSAGES, SERVER_MESSAGES, injected_fork, schemas
from .parts import Allowance, Pieces
from .records import EncodedReply, ForkSpec, RecordedReply
from .server import ServerProtocol
from .server_requests import hash_key
from .server_session import ServerConfig, ServerConnection, ServerSession

__all__ = [
    "CLIENT_MESSAGES",
    "SERVER_MESSAGES",
    "Allowance",
    "AnswerRead",
    "Answered",
    "Attached",
    "ClientConfig",
    "ClientEvent",
    "ClientProtocol",
    "ClientRead",
    "ClientRequest",
    "ClientSession",
    "Effect",
    "EncodedReply",
    "Failed",
    "FindSession",
    "ForgetReplies",
    "ForkSpec",
    "GoneAway",
    "Hibernate",
    "Pieces",
    "Pushed",
    "ReadPushes",
    "ReadReplies",
    "RecordError",
    "RecordedReply",
    "Refused",
    "Replied",
    "RunRequest",
    "ServerConfig",
    "ServerConnection",
    "ServerProtocol",
    "ServerSession",
    "SessionEnded",
    "Stored",
    "TakenOver",
    "Write",
    "hash_key",
    "injected_fork",
    "schemas",
]
