"""`RuntimeRegistry`: the runtimes of this process, one for each data directory."""

from __future__ import annotations

import threading
from pathlib import Path

from errata_protocol.errors import InvalidRequest, JournalUnavailable

from ..settings import Settings
from .data_lock import resolved
from .fleet import Fleet
from .runtime import Runtime

_PER_APPLICATION = ("token", "allowed_hosts")
"""Settings that each application keeps for itself."""


class RuntimeRegistry:
    """Makes and finds runtimes. Applications with the same data directory share one; those without have one each."""

    def __init__(self) -> None:
        self._runtimes: dict[Path, Runtime] = {}
        self._guard = threading.RLock()
        self._fleet: Fleet | None = None

    def join(self, fleet: Fleet) -> None:
        """Make all runtimes of this process those of one worker of a fleet. Call it before the first is made.

        Args:
            fleet: The other workers.
        """
        self._fleet = fleet

    def shared(self, settings: Settings) -> Runtime:
        """Return the runtime of the settings' data directory; made at its first use in this process.

        Raises:
            InvalidRequest: It was made with other settings. Token and hosts may differ.
            JournalUnavailable: Another process holds the data directory, or the journal cannot be opened.
        """
        if settings.data_dir is None:
            return Runtime(settings)
        directory = resolved(settings.data_dir)
        with self._guard:
            found = self._runtimes.get(directory)
            if found is None:
                return Runtime(settings, registry=self, fleet=self._fleet)  # enters itself by `claim`
            if differing := _differing(found.settings, settings):
                raise InvalidRequest(
                    f"{directory} is in use in this process with other settings: {differing}; "
                    "use the same ones, another data_dir, or pass runtime="
                )
            return found

    def of_application(self, settings: Settings | None = None, data_dir: str | Path | None = None) -> Runtime:
        """Return the runtime for an application's arguments.

        Args:
            settings: ``ERRATA_*`` variables by default.
            data_dir: Overrides the settings' data directory.

        Raises:
            InvalidRequest, JournalUnavailable: See `shared`.
        """
        settings = settings or Settings()
        if data_dir is not None:
            settings = settings.model_copy(update={"data_dir": Path(data_dir)})
        return self.shared(settings)

    def claim(self, directory: Path, runtime: Runtime) -> None:
        """Enter a runtime that opens its data directory.

        Raises:
            JournalUnavailable: Another runtime of this process has it.
        """
        with self._guard:
            if self._runtimes.setdefault(directory, runtime) is not runtime:
                raise JournalUnavailable(
                    f"another application of this process took over {directory} after this one was stopped: "
                    "make this one anew"
                )

    def release(self, directory: Path, runtime: Runtime) -> None:
        """Remove a runtime that is closed, or could not be opened."""
        with self._guard:
            if self._runtimes.get(directory) is runtime:
                del self._runtimes[directory]


RUNTIMES = RuntimeRegistry()
"""The registry of this process."""


def _differing(one: Settings, other: Settings) -> str:
    return ", ".join(
        f"{name}={getattr(one, name)!r} and {getattr(other, name)!r}"
        for name in sorted(Settings.model_fields.keys() - {"data_dir", *_PER_APPLICATION})
        if getattr(one, name) != getattr(other, name)
    )
