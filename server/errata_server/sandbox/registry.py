"""Finds the installed sandbox backends and makes the one that a server uses.

A backend is a `base.BackendType` that an entry point of the group ``errata.sandboxes`` names.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from errata_protocol.errors import InvalidRequest

from .base import Backend, BackendConfig, BackendType

GROUP = "errata.sandboxes"
DEFAULT = "namespace"
"""The backend of a server whose settings do not name one."""

DIRECTORY = "sandboxes"
"""Name of a backend's directory below a data directory."""


@cache
def installed() -> dict[str, EntryPoint]:
    """Return the entry points of the installed backends by name, without importing them."""
    return {point.name: point for point in entry_points(group=GROUP)}


def backend_type(name: str | None) -> BackendType:
    """Import and return a kind of backend; it is imported once.

    Args:
        name: Name of the entry point; None for `DEFAULT`.

    Raises:
        InvalidRequest: No backend of that name is installed, it cannot be imported, or it is not a `BackendType`.
    """
    return _loaded(check(name))


@cache
def _loaded(point: EntryPoint) -> BackendType:
    """Import an entry point and return an instance of its class, once."""
    try:
        made = point.load()()
    except ImportError as error:
        raise InvalidRequest(f"sandbox backend {point.name!r} ({point.value}) cannot be imported: {error}") from error
    if not isinstance(made, BackendType):
        raise InvalidRequest(
            f"sandbox backend {point.name!r} ({point.value}) is not an errata_server.sandbox.base.BackendType"
        )
    return made


def check(name: str | None) -> EntryPoint:
    """Return the entry point of a backend without importing it.

    Args:
        name: Name of the entry point; None for `DEFAULT`.

    Raises:
        InvalidRequest: No backend of that name is installed.
    """
    name = DEFAULT if name is None else name
    found = installed().get(name)
    if found is None:
        known = ", ".join(sorted(installed())) or "none: install the project again, `pip install .`"
        raise InvalidRequest(f"no sandbox backend {name!r} is installed; there are: {known}")
    return found


def create(name: str | None, config: BackendConfig) -> Backend:
    """Return a backend that is not started; see `backend_type` and `BackendType.create`.

    Raises:
        InvalidRequest: No backend of that name is installed, or it cannot be imported.
    """
    return backend_type(name).create(config)


def config_for(data_dir: Path, bases: dict[str, Path], reserve_bytes: int = 0) -> BackendConfig:
    """Return the configuration of the backend below a data directory."""
    return BackendConfig(data_dir / DIRECTORY, bases, reserve_bytes)
