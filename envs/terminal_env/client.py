"""`ErrataClient` with the terminal's types and one method for each tool."""

from __future__ import annotations

from openenv.core.client_types import StepResult

from errata_environment.published.client import ToolClient

from .models import TerminalAction, TerminalObservation, TerminalState


class TerminalEnv(ToolClient[TerminalAction, TerminalObservation, TerminalState]):
    """Client of a terminal session.

    Takes the arguments of `ErrataClient`; the classes of actions, observations and the state are set, and
    ``message_timeout_s`` is longer than the server's step deadline. In sync code use
    ``with TerminalEnv(base_url=...).sync() as terminal``.
    """

    ACTION = TerminalAction
    OBSERVATION = TerminalObservation
    STATE = TerminalState

    async def read_file(self, path: str) -> StepResult[TerminalObservation]:
        """Read the file ``path`` into ``observation.content``."""
        return await self.call("read_file", path=path)
