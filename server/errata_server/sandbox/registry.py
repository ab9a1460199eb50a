"""Finds installed sandbox backends, and makes the one that a server uses; nothing else does.

A backend is a `base.BackendType` that an entry point of the group ``errata.sandboxes`` names.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from errata_protocol.errors import InvalidRequest

from .base import Backend, BackendType, Place

GROUP = "errata.sandboxes"
DEFAULT = "namespace"
"""The backend of a server whose settings name none."""

DIRECTORY = "sandboxes"
"""Where a backend keeps its files, below a data directory."""


@cache
def installed() -> dict[str, EntryPoint]:
    """Return the installed backends by name, not loaded."""
    return {point.name: point for point in entry_points(group=GROUP)}


def backend_type(name: str | None) -> BackendType:
    """Return a kind of backend.

    Args:
        name: Its name; None for `DEFAULT`.

    Raises:
        InvalidRequest: None of that name is installed, or it cannot be imported.
    """
    return _loaded(check(name))


@cache
def _loaded(point: EntryPoint) -> BackendType:
    try:
        made = point.load()()
    except ImportError as error:
        raise InvalidRequest(f"sandbox backend {point.name!r} ({point.value}) cannot be imported: {error}") from error
    if not isinstance(made, BackendType):
        raise InvalidRequest(
            f"sandbox backend {point.name!r} ({point.value}) is no errata_server.sandbox.base.BackendType"
        )
    return made


def check(name: str | None) -> EntryPoint:
    """Return the entry point of a backend, not loaded.

    Raises:
        InvalidRequest: None of that name is installed.
    """
    name = DEFAULT if name is None else name
    found = installed().get(name)
    if found is None:
        known = ", ".join(sorted(installed())) or "none: install the project again, `pip install .`"
        raise InvalidRequest(f"no sandbox backend {name!r} is installed; there are: {known}")
    return found


def create(name: str | None, place: Place) -> Backend:
    """Return a backend that works in a place; see `BackendType.create`.

    Raises:
        InvalidRequest: As `backend_type`.
    """
    return backend_type(name).create(place)


def place_of(data_dir: Path, bases: dict[str, Path], reserve_bytes: int = 0) -> Place:
    """Return where the backend of a data directory works."""
    return Place(data_dir / DIRECTORY, bases, reserve_bytes)
