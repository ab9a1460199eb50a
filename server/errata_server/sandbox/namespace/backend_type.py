"""`NamespaceType`: the namespace backend as an entry point: its maker, its checks, its limits."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from ..base import Backend, BackendType, Finding, Place
from .backend import COMMANDS_AT_ONCE, RESERVE_BYTES, RUNNING_DESCRIPTORS, NamespaceBackend
from .checks import examine
from .probes import Probes


class NamespaceType(BackendType):
    """Linux namespaces, overlayfs and cgroups; no daemon."""

    unfit_file_systems = MappingProxyType({"overlay": "no other overlay can write there"})
    descriptors = COMMANDS_AT_ONCE * RUNNING_DESCRIPTORS

    def create(self, place: Place) -> Backend:
        reserve = max(RESERVE_BYTES, place.reserve_bytes)
        return NamespaceBackend(place.directory, bases=place.bases, reserve_bytes=reserve)

    def checks(self, place: Place, *, usable: bool) -> Iterator[Finding]:
        return examine(Probes(place), usable=usable)
