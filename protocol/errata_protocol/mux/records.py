"""Values that the server's machine keeps and its effects carry: requests' kinds, recorded replies, forks."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from ..replay import Kind

RequestKind = Literal["reset", "step", "mcp", "fork", "close"]
ReadKind = Literal["state", "capabilities", "rewards", "mcp", "close_group"]
EndReason = Literal["closed", "expired", "lost"]


class Reply(Struct, frozen=True, gc=False):
    """A reply, ready to be spliced.

    Args:
        type: Reply type on the wire; ``error`` for a recorded error.
        data: The exact bytes of ``data``.
        eid: Episode of a delivery.
        t: Its delivery index.
        digest: ``sha256:<hex>`` of ``data``, empty where there is none.
        kind: What a state(t) was delivered by.
    """

    type: str
    data: bytes
    eid: str | None = None
    t: int | None = None
    digest: str = ""
    kind: Kind | None = None


class Recorded(Struct, frozen=True, gc=False):
    """A committed request and its reply.

    Args:
        id: Request id.
        kind: Its type.
        sha: sha256 of its ``data`` as received.
        reply: What it was answered with; None where the journal keeps it no longer.
        request: ``data`` as given in `Run`, to compare RFC 8785 forms with; None where it is not at hand.
    """

    id: int
    kind: str
    sha: bytes
    reply: Reply | None
    request: bytes | None = None


class ForkRequest(Struct, frozen=True, gc=False):
    """The child that a fork makes; ``key_hash`` is all that is kept of its key."""

    t: int
    eid: str | None
    sid: str
    key_hash: bytes
