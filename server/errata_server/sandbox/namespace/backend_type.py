"""`NamespaceType`: the entry point of the namespace backend."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from ..base import Backend, BackendConfig, BackendType, Finding
from .backend import COMMANDS_AT_ONCE, RESERVE_BYTES, RUNNING_DESCRIPTORS, NamespaceBackend
from .checks import examine
from .probes import Probes


class NamespaceType(BackendType):
    """Linux namespaces, overlayfs and cgroups; no daemon."""

    unfit_file_systems = MappingProxyType({"overlay": "overlayfs cannot have its upper directory on another overlay"})
    descriptors = COMMANDS_AT_ONCE * RUNNING_DESCRIPTORS

    def create(self, config: BackendConfig) -> Backend:
        reserve = max(RESERVE_BYTES, config.reserve_bytes)
        return NamespaceBackend(config.directory, bases=config.bases, reserve_bytes=reserve, division=config.division)

    def checks(self, config: BackendConfig, *, usable: bool) -> Iterator[Finding]:
        return examine(Probes(config), usable=usable)
