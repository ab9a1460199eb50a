"""Where ids come from: a seam, so that a test or a simulation can say what they are."""

from __future__ import annotations

import hashlib
import secrets
import uuid


class Ids:
    """Random ids; each is a capability, so each holds at least 122 random bits."""

    def session(self) -> str:
        """Return a new plain session id, of the form upstream uses."""
        return str(uuid.uuid4())

    def episode(self) -> str:
        """Return a new episode key, URL-safe."""
        return "ep_" + secrets.token_urlsafe(18)

    def seed(self) -> int:
        """Return a new 31-bit seed."""
        return secrets.randbits(31)

    def salt(self) -> bytes:
        """Return 8 random bytes that no payload can foresee; see `errata_server.journal.codec`."""
        return secrets.token_bytes(8)


def name_of(secret_id: str) -> str:
    """Return what logs and listings call an id: the first 12 hex digits of its sha256 (PROTOCOL F2)."""
    return hashlib.sha256(secret_id.encode()).hexdigest()[:12]
