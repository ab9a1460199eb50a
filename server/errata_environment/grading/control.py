"""`ControlRuns`: grades the untouched start state where a grading run gave no verdict.

If the start state gets a verdict, the agent's changes broke the run, and they earn nothing. If it gets none either, the
verifier or the machine is broken, which is an error and never a reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from weakref import WeakKeyDictionary

from errata_server.sandbox.base import Backend


class ControlRuns:
    """Remembers, for the lifetime of each backend, which verifiers gave a verdict on an untouched start state."""

    def __init__(self) -> None:
        self._sound: WeakKeyDictionary[Backend, set[str]] = WeakKeyDictionary()

    async def demand(
        self, backend: Backend, key: str, run: Callable[[], Awaitable[object]], *, again: bool = False
    ) -> None:
        """Call ``run`` unless it succeeded before for this backend and key; its exceptions propagate.

        Args:
            backend: The backend that the grading runs on.
            key: Digest of the start state and the verifier.
            run: Grades the untouched start state, and raises an exception if that gives no verdict.
            again: Call ``run`` even if it succeeded before; for failures that a busy machine may cause, such as a time
                limit.
        """
        sound = self._sound.setdefault(backend, set())
        if again or key not in sound:
            await run()
            sound.add(key)
