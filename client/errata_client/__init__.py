"""Client of Errata and of vanilla OpenEnv servers."""

from .client import ErrataClient
from .frames import DigestMismatch, FrameInvalid
from .sync import SyncErrataClient

__all__ = ["DigestMismatch", "ErrataClient", "FrameInvalid", "SyncErrataClient"]
