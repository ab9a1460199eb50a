"""The rule for a run that gives no verdict: where the untouched start gives one, the agent's state broke the run.

Then that state is worth nothing. If the start gives none either, the verifier or the machine is broken, which is an
error and never a reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from weakref import WeakKeyDictionary

from errata_server.sandbox.base import Backend


class ControlRuns:
    """Which verifiers gave a verdict on an untouched start, by backend. Remembered as long as the backend lives."""

    def __init__(self) -> None:
        self._sound: WeakKeyDictionary[Backend, set[str]] = WeakKeyDictionary()

    async def demand(
        self, backend: Backend, key: str, run: Callable[[], Awaitable[object]], *, again: bool = False
    ) -> None:
        """Run the control, unless it went well before.

        Args:
            backend: Where it runs.
            key: Digest of what is graded and by what.
            run: Grades the untouched start; it raises where that gives no verdict, and so does this.
            again: Run it although it went well before: for failures that a busy machine may cause, as time limits.
        """
        sound = self._sound.setdefault(backend, set())
        if again or key not in sound:
            await run()
            sound.add(key)
