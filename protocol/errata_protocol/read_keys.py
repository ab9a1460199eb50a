"""`read_key`: the capability that opens a session's episodes where a server has no tokens (PROTOCOL F2)."""

from __future__ import annotations

import base64
import hashlib
import hmac


def read_key(secret_hash: bytes) -> str:
    """Return the read key of a session: 43 characters, URL-safe.

    It shows nothing about the secret: who has it may read, but not step.

    Args:
        secret_hash: What a server keeps of what its client has to know to continue the session: `hash_key` of a
            multiplexed session, `plain_hash` of any other.
    """
    made = hmac.digest(secret_hash, b"errata-read", "sha256")
    return base64.urlsafe_b64encode(made).decode().rstrip("=")


def plain_hash(session_id: str) -> bytes:
    """Return the hash of a plain session's id, for `read_key`: 32 bytes."""
    return hashlib.sha256(f"errata-plain\0{session_id}".encode()).digest()
