"""`FakeType`: the fake backend as an entry point."""

from __future__ import annotations

from ..base import Backend, BackendType, Place
from .backend import FakeBackend


class FakeType(BackendType):
    """A backend without isolation and without files: its shell is a toy."""

    def create(self, place: Place) -> Backend:
        return FakeBackend()
