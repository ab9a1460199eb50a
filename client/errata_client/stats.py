"""What a client counts: how often something had to be asked for again, and what became of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class ConnectionStats:
    """Counters of one `Connection`, from its beginning.

    Attributes:
        connects: Sockets that were opened.
        sockets_lost: Sockets that ended without being closed here.
        protocol_errors: Sockets dropped because the server sent what the protocol does not allow.
        goaways: Times the server asked for another socket.
        overloaded: Sockets dropped because the server had no room for a message that came in pieces.
        frames_sent: WebSocket messages.
        frames_received: Likewise.
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
        requests: Resets, steps, tool calls and forks that were asked for.
        replies: Requests with a recorded outcome, errors included.
        resumes: Times the session was attached again.
        refused: Refusals that were waited out, by code: OVERLOADED, CAPACITY_REACHED, JOURNAL_UNAVAILABLE.
        retried: Requests sent again after an infrastructure failure was rolled back, by code: SANDBOX_FAILED.
        abandoned: Requests whose caller was cancelled or ran out of time.
        rewards: Late rewards that were pushed.
    """

    requests: int = 0
    replies: int = 0
    resumes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    abandoned: int = 0
    rewards: int = 0

    def __add__(self, other: SessionStats) -> SessionStats:
        """Return both together."""
        return SessionStats(
            self.requests + other.requests,
            self.replies + other.replies,
            self.resumes + other.resumes,
            self.refused + other.refused,
            self.retried + other.retried,
            self.abandoned + other.abandoned,
            self.rewards + other.rewards,
        )
