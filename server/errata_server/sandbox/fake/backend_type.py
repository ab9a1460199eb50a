"""`FakeType`: the entry point of the fake backend."""

from __future__ import annotations

from ..base import Backend, BackendConfig, BackendType
from .backend import FakeBackend


class FakeType(BackendType):
    """The fake backend: no isolation, files in memory, a few shell commands."""

    def create(self, config: BackendConfig) -> Backend:
        return FakeBackend()
