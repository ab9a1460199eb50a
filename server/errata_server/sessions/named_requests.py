"""`NamedRequests`: which requests of a plain session were run under a ``request_id`` that their client chose.

A request that is sent again under its id gets the reply that is in the journal. The journal counts requests by rising
integers. Those of a plain session hold a part of the hash of the id that the client chose, so that the last ones are
known again on another socket, also after the server was killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any, NamedTuple

from errata_protocol.errors import ReplyGone, RequestIdReused

from ..journal.base import DeliveryRow, Journal
from ..runtime.store import Store
from .reexecution import as_received

MAX_LENGTH = 255
"""Longest ``request_id``, characters."""

KEPT = 256
"""Ids of a session that are known in memory, and rows of the journal that are looked at for one."""

HASH_BITS = 40
"""Low bits of a request's number in the journal that come from the hash of its id. The others count the requests."""

_INLINE = 64 * 1024
"""Most bytes of a request of which the digest is computed on the event loop."""


class Named(NamedTuple):
    """A request that has run.

    Args:
        number: Number under which the request is in the journal.
        digest: Result of `digest_of` the request.
    """

    number: int
    digest: bytes


async def digest_of(kind: str, data: Any, size: int) -> bytes:
    """Return the digest by which two requests are the same one: key order and spaces of their JSON do not count.

    Args:
        kind: Type of the request.
        data: Decoded ``data`` of the request.
        size: Bytes of the message that it came in. A large one is digested in a thread.
    """
    return _digest(kind, data) if size <= _INLINE else await asyncio.to_thread(_digest, kind, data)


class NamedRequests:
    """The named requests of one session, for one socket. Use it while no request of the session runs.

    Args:
        store: The journal.
        sid: Id of a session of a plain socket.
    """

    def __init__(self, store: Store, sid: str) -> None:
        self._store = store
        self._sid = sid
        self._named: dict[str, Named] = {}  # oldest first
        self._earlier: dict[int, int] = {}  # numbers of the last ones before this socket, by the hash of their ids
        self._last: int | None = None

    async def reply(self, request_id: str, digest: bytes) -> DeliveryRow | None:
        """Return the row of the reply to a request that has run; None if no request had this id.

        Raises:
            RequestIdReused: Another request had this id.
            ReplyGone: Its episode was deleted.
        """
        if self._last is None:
            self._last = await asyncio.to_thread(self._found, self._store.journal)
        known = self._named.get(request_id)
        number = known.number if known is not None else self._earlier.get(_hash(request_id))
        if number is None:
            return None
        rows = await self._store.read(lambda journal: journal.replies(self._sid, number, number))
        if known is None and rows:
            recorded = await asyncio.to_thread(_digest_of_row, rows[0])
        else:
            recorded = known.digest if known is not None else None
        if recorded not in (None, digest):
            raise RequestIdReused(f"request_id {request_id!r} was given to another request")
        if not rows:
            raise ReplyGone(f"request {request_id!r} was executed, and its reply is no longer kept")
        return rows[0]

    def number(self, request_id: str) -> int:
        """Return the number under which to journal a request that has not run."""
        assert self._last is not None, "reply() comes first"
        return ((self._last >> HASH_BITS) + 1 << HASH_BITS) | _hash(request_id)

    def ran(self, request_id: str, number: int, digest: bytes) -> None:
        """Note that a request ran and its reply is in the journal."""
        self._last = number
        self._named[request_id] = Named(number, digest)
        if len(self._named) > KEPT:
            del self._named[next(iter(self._named))]

    def _found(self, journal: Journal) -> int:
        """Find the last numbers and return the highest; in a thread, one row at a time, since rows may be large."""
        last = journal.last_id(self._sid)
        count = last >> HASH_BITS
        for at in range(max(1, count - KEPT + 1), count + 1):
            for row in journal.replies(self._sid, at << HASH_BITS, (at << HASH_BITS) | _MASK):
                assert row.id is not None
                self._earlier[row.id & _MASK] = row.id
        return last


_MASK = (1 << HASH_BITS) - 1


def _hash(request_id: str) -> int:
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") & _MASK


def _digest_of_row(row: DeliveryRow) -> bytes | None:
    """Return the digest of the request of a row; None where the journal does not hold what was received."""
    received = as_received(row.request, row.request_sha) if row.kind == "reset" else row.request
    return _digest(row.kind, json.loads(received)) if received else None


def _digest(kind: str, data: Any) -> bytes:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(f"{kind}\n{text}".encode()).digest()
