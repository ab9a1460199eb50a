"""Environments of which an action kills the server, once: those of a server that dies in the middle of a batch.

The variable `KILLED` names a file. The first action that kills makes it; where it is, the action does nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections import Counter
from pathlib import Path

from terminal_env import SPEC as TERMINAL_SPEC
from terminal_env.server.environment import TerminalEnvironment

from .shelf import SPEC as SHELF_SPEC
from .shelf import FragileShelf

KILLED = "ERRATA_TESTS_KILLED"
KILL = "true # kill the server"
"""Command of a terminal that kills."""
HELD = 3
"""Number of sessions that hold when the server is killed."""


def kill_once() -> None:
    """Kill this process as a crash does, unless that was done before."""
    killed = Path(os.environ[KILLED])
    if not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class KillingShelf(FragileShelf):
    """A shelf whose place ``kill`` kills when `HELD` sessions look at ``hold`` and the places after it are done.

    ``kill:mint,rose`` waits for the ends of two sessions of each of the two places.
    """

    holding = 0
    ended: Counter[str] = Counter()  # noqa: RUF012 # of all sessions
    changed = asyncio.Condition()

    async def step_async(self, action, timeout_s=None, **kwargs):
        async with self.changed:
            KillingShelf.holding += action.path == "hold"
            self.changed.notify_all()
            if action.path.startswith("kill:"):
                places = action.path.removeprefix("kill:").split(",")
                await self.changed.wait_for(
                    lambda: self.holding == HELD and all(self.ended[place] == 2 for place in places)
                )
                kill_once()
        if action.path == "hold":
            await asyncio.get_running_loop().create_future()
        return await super().step_async(action, timeout_s, **kwargs)

    async def aclose(self):
        async with self.changed:
            self.ended[self._place] += 1
            self.changed.notify_all()


class KillingTerminal(TerminalEnvironment):
    """A terminal of which the command `KILL` kills the server."""

    async def _use(self, action, bound_s):
        if action.command == KILL:
            kill_once()
        return await super()._use(action, bound_s)


SHELF = dataclasses.replace(SHELF_SPEC, factory=f"{__name__}:KillingShelf")
TERMINAL = dataclasses.replace(TERMINAL_SPEC, factory=f"{__name__}:KillingTerminal")
