"""`Sandboxes`: the sandbox backend of one data directory, made at its first use, and the deletion of its layers."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from errata_protocol.environment import SnapshotRef

from ..sandbox import registry
from ..sandbox.base import Backend, CollectReport
from ..settings import Settings


class Sandboxes:
    """Makes the backend that the settings name, once.

    Args:
        settings: Name the backend.
        data_dir: Where its layers are; None for a temporary directory.
        given: Another backend than the one the settings name.
    """

    def __init__(self, settings: Settings, data_dir: Path | None, given: Backend | None) -> None:
        self._settings = settings
        self._data_dir = data_dir
        self._given = given
        self._made = given
        self._guard = threading.Lock()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    @property
    def backend(self) -> Backend:
        """The backend; the first access makes it, from any thread."""
        with self._guard:
            if self._made is None:
                self._made = self._make()
            return self._made

    @property
    def has_layers(self) -> bool:
        """Whether the data directory has ever had a sandbox."""
        return self._data_dir is not None and (self._data_dir / registry.DIRECTORY).exists()

    @property
    def snapshots_each_step(self) -> bool:
        """Whether the backend takes a snapshot after each step; answered without making it."""
        return registry.backend_type(self._settings.sandbox).snapshots_each_step

    @property
    def running(self) -> int:
        """Commands that run, are being started or cleaned up."""
        return self._made.running if self._made is not None else 0

    def trouble(self) -> str | None:
        """Return why the backend takes no new sandboxes; None where it does, or was not needed yet."""
        return self._made.trouble if self._made is not None else None

    async def collect(self, refs: Callable[[], set[SnapshotRef]]) -> CollectReport:
        """Delete the layers that neither ``refs`` nor a live sandbox names.

        Does nothing if the data directory never had a sandbox.

        Args:
            refs: Returns the layers to keep. The backend calls it after it noted which layers live sandboxes need.
        """
        if self._made is None and not self.has_layers:
            return CollectReport()
        await self.backend.start()
        return await self.backend.collect(_Lazy(refs))

    async def close(self) -> None:
        """Stop all sandboxes. A later access to `backend` makes a new one, or has the given one again."""
        if self._made is not None:
            await self._made.close()
        self._made = self._given

    def remove_temporary(self) -> None:
        """Remove the temporary directory, where there is one."""
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _make(self) -> Backend:
        settings, directory = self._settings, self._data_dir
        if directory is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="errata-", ignore_cleanup_errors=True)
            directory = Path(self._temporary.name)
        return registry.create(
            settings.sandbox, registry.config_for(directory, settings.base, settings.disk_floor_bytes)
        )


class _Lazy:
    """Refs that are read when the backend iterates over them: after it noted which layers live sandboxes need.

    Read earlier, they would miss a layer whose row is committed, and whose sandbox is closed, between the two.
    """

    def __init__(self, refs: Callable[[], set[SnapshotRef]]) -> None:
        self._refs = refs

    def __iter__(self) -> Iterator[SnapshotRef]:
        return iter(self._refs())
