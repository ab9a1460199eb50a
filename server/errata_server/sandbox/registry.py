"""Finds the installed sandbox backends and makes the one that a server uses.

A backend is a `base.BackendType` that an entry point of the group ``errata.sandboxes`` names.
"""

from __future__ import annotations

from pathlib import Path

from errata_os.plugins import PluginGroup

from .base import Backend, BackendConfig, BackendType

GROUP = "errata.sandboxes"
DEFAULT = "namespace"
"""The backend of a server whose settings do not name one."""

DIRECTORY = "sandboxes"
"""Name of a backend's directory below a data directory."""


BACKENDS = PluginGroup(GROUP, BackendType, "sandbox backend")  # type: ignore[type-abstract]
"""The installed backends."""


def backend_type(name: str | None) -> BackendType:
    """Import and return a kind of backend; it is imported once.

    Args:
        name: Name of the entry point; None for `DEFAULT`.

    Raises:
        InvalidRequest: No backend of that name is installed, it cannot be imported, or it is not a `BackendType`.
    """
    return BACKENDS.load(DEFAULT if name is None else name)


def check(name: str | None) -> None:
    """Check that a backend is installed, without importing it.

    Args:
        name: Name of the entry point; None for `DEFAULT`.

    Raises:
        InvalidRequest: No backend of that name is installed.
    """
    BACKENDS.check(DEFAULT if name is None else name)


def create(name: str | None, config: BackendConfig) -> Backend:
    """Return a backend that is not started; see `backend_type` and `BackendType.create`.

    Raises:
        InvalidRequest: No backend of that name is installed, or it cannot be imported.
    """
    return backend_type(name).create(config)


def config_for(data_dir: Path, bases: dict[str, Path], reserve_bytes: int = 0) -> BackendConfig:
    """Return the configuration of the backend below a data directory."""
    return BackendConfig(data_dir / DIRECTORY, bases, reserve_bytes)
