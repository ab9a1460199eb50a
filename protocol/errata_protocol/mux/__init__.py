"""The multiplexed protocol (PROTOCOL D) without sockets: envelopes, messages, and the state machines of both sides."""

from .client import ClientProtocol
from .client_session import ClientConfig, ClientRead, ClientRequest, ClientSession
from .effects import Effect, Find, Forget, Hibernate, Read, Recall, RecallPushes, Record, Run, Stored, Write
from .events import (
    Answered,
    ClientEvent,
    Failed,
    GoneAway,
    Opened,
    Pushed,
    Refused,
    Replied,
    SessionEnded,
    TakenOver,
)
from .messages import CLIENT_MESSAGES, SERVER_MESSAGES, injected_fork, schemas
from .parts import Allowance, Pieces
from .records import ForkRequest, Recorded, Reply
from .server import ServerProtocol
from .server_requests import hash_key
from .server_session import ServerConfig, ServerConnection, ServerSession

__all__ = [
    "CLIENT_MESSAGES",
    "SERVER_MESSAGES",
    "Allowance",
    "Answered",
    "ClientConfig",
    "ClientEvent",
    "ClientProtocol",
    "ClientRead",
    "ClientRequest",
    "ClientSession",
    "Effect",
    "Failed",
    "Find",
    "Forget",
    "ForkRequest",
    "GoneAway",
    "Hibernate",
    "Opened",
    "Pieces",
    "Pushed",
    "Read",
    "Recall",
    "RecallPushes",
    "Record",
    "Recorded",
    "Refused",
    "Replied",
    "Reply",
    "Run",
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
