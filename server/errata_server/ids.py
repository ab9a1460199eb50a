"""`Ids`: source of random ids, which tests and simulations replace."""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import threading
import uuid

from errata_protocol.shards import named

DRAWN_AT_ONCE = 4096
"""Random bytes read from the operating system in one call, because a call costs as much as a step."""


MULTIPLEXED = "mux."
"""Prefix of multiplexed sessions' ids in the journal. No sid and no id of a plain session contains a dot."""


class Ids:
    """Random ids of at least 122 bits: knowing an id gives access to what it names.

    Random bytes are read from the operating system in advance; a forked process reads its own. Thread-safe.

    Attributes:
        shard: Name of the data directory, which ids of sessions and episodes have in them; None where it has none.
    """

    shard: str | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drawn = b""
        self._at = 0
        self._pid = 0

    def _bytes(self, count: int) -> bytes:
        with self._lock:
            if self._at + count > len(self._drawn) or self._pid != os.getpid():
                self._drawn, self._at, self._pid = os.urandom(DRAWN_AT_ONCE), 0, os.getpid()
            self._at += count
            return self._drawn[self._at - count : self._at]

    def session(self) -> str:
        """Return a new session id: a UUID, as upstream uses; in a named directory behind its name (PROTOCOL F5)."""
        return named(self.shard, self.uuid())

    def episode(self) -> str:
        """Return a new episode id, which is URL-safe."""
        return "ep_" + named(self.shard, base64.urlsafe_b64encode(self._bytes(18)).decode())

    def uuid(self) -> str:
        """Return a new UUID."""
        return str(uuid.UUID(bytes=self._bytes(16), version=4))

    def seed(self) -> int:
        """Return a new 31-bit seed."""
        return int.from_bytes(self._bytes(4)) >> 1

    def salt(self) -> bytes:
        """Return 8 random bytes that no payload can predict; see `errata_server.journal.codec`."""
        return secrets.token_bytes(8)


def name_of(secret_id: str) -> str:
    """Return the name of an id in logs and listings: the first 12 hex digits of its SHA-256 (PROTOCOL F2)."""
    return hashlib.sha256(secret_id.encode()).hexdigest()[:12]
