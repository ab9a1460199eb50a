"""Counters of connections and sessions: requests, reconnects, retries."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class ConnectionStats:
    """Counters of one `Connection`, since it was made.

    Attributes:
        connects: Sockets that were opened.
        sockets_lost: Sockets that were closed by the server or the network.
        protocol_errors: Sockets closed here because the server broke the protocol.
        goaways: Times that the server asked to reconnect.
        overloaded: Sockets closed here because the server had no memory for a fragmented message.
        frames_sent: WebSocket messages sent.
        frames_received: WebSocket messages received.
    """

    connects: int = 0
    sockets_lost: int = 0
    protocol_errors: int = 0
    goaways: int = 0
    overloaded: int = 0
    frames_sent: int = 0
    frames_received: int = 0


@dataclass(slots=True)
class SessionStats:
    """Counters of one client's session; all 0 on a plain socket.

    Attributes:
        requests: Resets, steps, tool calls and forks that were requested.
        replies: Requests with a recorded outcome, errors included.
        resumes: Times the session was attached again.
        refused: Refusals after which the client waited and sent again, by code: OVERLOADED, CAPACITY_REACHED,
            JOURNAL_UNAVAILABLE,
            MISDIRECTED.
        retried: Requests sent again after an infrastructure failure was rolled back, by code: SANDBOX_FAILED.
        abandoned: Requests whose caller was cancelled or timed out.
        rewards: Late rewards that the server pushed.
    """

    requests: int = 0
    replies: int = 0
    resumes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    abandoned: int = 0
    rewards: int = 0

    def __add__(self, other: SessionStats) -> SessionStats:
        """Return the sums of both."""
        return SessionStats(
            self.requests + other.requests,
            self.replies + other.replies,
            self.resumes + other.resumes,
            self.refused + other.refused,
            self.retried + other.retried,
            self.abandoned + other.abandoned,
            self.rewards + other.rewards,
        )
