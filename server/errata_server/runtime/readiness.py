"""`Readiness`: whether a server can be given new work, and why not (``GET /ready``)."""

from __future__ import annotations

from collections.abc import Callable

Check = Callable[[], str | None]
"""Returns why the server should be given no new work; None when all is well."""


class Readiness:
    """The checks of one server.

    Args:
        *checks: What is checked from the start.
    """

    def __init__(self, *checks: Check) -> None:
        self._checks = list(checks)

    def add(self, check: Check) -> None:
        """Check one thing more."""
        self._checks.append(check)

    def reasons(self) -> list[str]:
        """Return why the server should be given no new work; empty when it is ready."""
        return [reason for check in self._checks if (reason := check()) is not None]
