"""`Readiness`: whether a server can be given new work, why not, and what of it cannot be used (``GET /ready``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from errata_protocol.exception_text import named_text_of
from errata_protocol.printable import printable

Check = Callable[[], str | None]
"""Returns why the server should be given no new work; None when all is well."""

Unusable = Callable[[], Mapping[str, str]]
"""Returns why parts of what an environment offers cannot be used, by name; it may read files."""

_LISTED = 100
_WAIT_S = 1.0


class Readiness:
    """The checks of one server.

    Args:
        *checks: What is checked from the start.
    """

    def __init__(self, *checks: Check) -> None:
        self._checks = list(checks)
        self._unusable: dict[str, Unusable] = {}
        self._reading: asyncio.Task[dict[str, list[str]]] | None = None
        self._known: dict[str, list[str]] = {}

    def add(self, check: Check) -> None:
        """Check one thing more."""
        self._checks.append(check)

    def tell(self, environment: str, unusable: Unusable) -> None:
        """Report which parts of an environment, such as tasks, cannot be used; the server stays ready."""
        self._unusable[environment] = unusable

    def reasons(self) -> list[str]:
        """Return why the server should be given no new work; empty when it is ready."""
        return [reason for check in self._checks if (reason := check()) is not None]

    async def unusable(self, *, details: bool) -> dict[str, list[str]]:
        """Return which parts of each environment cannot be used, and why; empty when all can be.

        It is read in a thread. While that takes long, the result is what was known before.

        Args:
            details: Whether the caller may see names and reasons; otherwise each environment has one line with the
                number of parts.
        """
        if not self._unusable:
            return {}
        loop = asyncio.get_running_loop()
        if self._reading is None or self._reading.done() or self._reading.get_loop() is not loop:
            self._reading = loop.create_task(asyncio.to_thread(self._read))
        done, _ = await asyncio.wait({self._reading}, timeout=_WAIT_S)
        for read in done:
            self._known = read.result()
        return self._known if details else listed_without_details(self._known)

    def _read(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for environment, unusable in list(self._unusable.items()):
            try:
                why = [printable(text, 1000) for text in unusable().values()]
            except BaseException as error:  # of the environment's code; SystemExit would end the event loop
                why = [printable(f"what it offers cannot be read ({named_text_of(error)})", 1000)]
            if why:
                more = [f"and {len(why) - _LISTED:,} more"] if len(why) > _LISTED else []
                found[environment] = [*why[:_LISTED], *more]
        return found


def listed_without_details(unusable: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the same with the number of parts in place of their names and reasons."""
    return {name: [f"{len(why):,} cannot be used: ask with a token for which"] for name, why in unusable.items()}
