"""Kinds of requests, for both sides; and values that the server's effects carry: encoded and recorded replies,
forks."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from ..replay import Kind

RequestKind = Literal["reset", "step", "mcp", "fork", "close"]
ReadKind = Literal["state", "capabilities", "rewards", "mcp", "close_group"]
EndReason = Literal["closed", "expired", "lost"]


class EncodedReply(Struct, frozen=True, gc=False):
    """A reply whose ``data`` is encoded; the envelope is built around these bytes.

    Args:
        type: Reply type on the wire; ``error`` for an error.
        data: The exact bytes of ``data``.
        eid: Episode of a delivery.
        t: Its delivery index.
        digest: ``sha256:<hex>`` of ``data``, empty where there is none.
        kind: Of a state(t): the kind of request that made this delivery.
    """

    type: str
    data: bytes
    eid: str | None = None
    t: int | None = None
    digest: str = ""
    kind: Kind | None = None


class RecordedReply(Struct, frozen=True, gc=False):
    """A committed request and its reply.

    Args:
        id: Request id.
        kind: Type of the request.
        sha: sha256 of the request's ``data`` as received.
        reply: The reply; None if the journal no longer keeps it.
        request: ``data`` as in `RunRequest`, for comparing RFC 8785 forms; None if it is not known.
    """

    id: int
    kind: str
    sha: bytes
    reply: EncodedReply | None
    request: bytes | None = None


class ForkSpec(Struct, frozen=True, gc=False):
    """What a fork asks for.

    Args:
        t: Delivery to continue from.
        eid: Its episode; None for the current one.
        sid: Session id of the child.
        key_hash: Hash of the child's key, which itself is not kept.
    """

    t: int
    eid: str | None
    sid: str
    key_hash: bytes
