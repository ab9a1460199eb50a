"""Where ids come from: a seam, so that a test or a simulation can say what they are."""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import threading
import uuid

DRAWN_AT_ONCE = 4096
"""Bytes asked of the operating system in one call, which costs as much as a step."""


class Ids:
    """Random ids; each is a capability, so each holds at least 122 random bits.

    The bits are the operating system's, drawn ahead; a forked process draws its own.
    """

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
        """Return a new plain session id, of the form upstream uses."""
        return str(uuid.UUID(bytes=self._bytes(16), version=4))

    def episode(self) -> str:
        """Return a new episode key, URL-safe."""
        return "ep_" + base64.urlsafe_b64encode(self._bytes(18)).decode()

    def seed(self) -> int:
        """Return a new 31-bit seed."""
        return int.from_bytes(self._bytes(4)) >> 1

    def salt(self) -> bytes:
        """Return 8 random bytes that no payload can foresee; see `errata_server.journal.codec`."""
        return secrets.token_bytes(8)


def name_of(secret_id: str) -> str:
    """Return what logs and listings call an id: the first 12 hex digits of its sha256 (PROTOCOL F2)."""
    return hashlib.sha256(secret_id.encode()).hexdigest()[:12]
