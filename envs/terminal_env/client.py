"""`ErrataClient` with the terminal's types and one method for each tool."""

from __future__ import annotations

from typing import Any

from openenv.core.client_types import StepResult

from errata_client import ErrataClient

from .models import TerminalAction, TerminalObservation, TerminalState

MESSAGE_TIMEOUT_S = 960.0
"""Longer than the server's step deadline: a client that times out first loses a plain session, or an outcome."""


class TerminalEnv(ErrataClient[TerminalAction, TerminalObservation, TerminalState]):
    """Client of a terminal session.

    Takes the arguments of `ErrataClient`; the classes of actions, observations and the state are set, and
    ``message_timeout_s`` is `MESSAGE_TIMEOUT_S` by default. In sync code use
    ``with TerminalEnv(base_url=...).sync() as terminal``.
    """

    def __init__(self, base_url: str | None = None, *args: Any, **kwargs: Any) -> None:
        if len(args) < 2:
            kwargs.setdefault("message_timeout_s", MESSAGE_TIMEOUT_S)
        kwargs.setdefault("action_cls", TerminalAction)
        kwargs.setdefault("observation_cls", TerminalObservation)
        kwargs.setdefault("state_cls", TerminalState)
        super().__init__(base_url, *args, **kwargs)

    async def run(self, command: str, timeout_s: float | None = None) -> StepResult[TerminalObservation]:
        """Run ``command`` in the session's shell.

        Args:
            command: Bash text.
            timeout_s: Time limit in seconds, at most the server's maximum.
        """
        return await self.step(TerminalAction(tool="run", command=command, timeout_s=timeout_s))

    async def write_file(self, path: str, content: str) -> StepResult[TerminalObservation]:
        """Create or replace the file ``path``."""
        return await self.step(TerminalAction(tool="write_file", path=path, content=content))

    async def read_file(self, path: str) -> StepResult[TerminalObservation]:
        """Read the file ``path`` into ``observation.content``."""
        return await self.step(TerminalAction(tool="read_file", path=path))

    async def submit(self) -> StepResult[TerminalObservation]:
        """End the episode; the reward is the task's score in [0, 1]."""
        return await self.step(TerminalAction(tool="submit"))
