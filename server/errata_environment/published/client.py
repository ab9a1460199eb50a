"""`ToolClient`: base class of an environment's client, with one method for each tool that all of them have."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

from openenv.core.client_types import StepResult
from openenv.core.env_server.types import Action, Observation, State

from errata_client import ErrataClient

MESSAGE_TIMEOUT_S = 960.0
"""Longer than the server's step deadline: a client that times out first loses a plain session, or an outcome."""

ActT = TypeVar("ActT", bound=Action)
ObsT = TypeVar("ObsT", bound=Observation)
StateT = TypeVar("StateT", bound=State)


class ToolClient(ErrataClient[ActT, ObsT, StateT], Generic[ActT, ObsT, StateT]):
    """Client of a session with a shell.

    Takes the arguments of `ErrataClient`; the classes of actions, observations and the state are set, and
    ``message_timeout_s`` is `MESSAGE_TIMEOUT_S` by default. In sync code use ``with CLIENT(base_url=...).sync() as c``.

    Attributes:
        ACTION: The environment's class of actions.
        OBSERVATION: The environment's class of observations.
        STATE: The environment's class of states.
    """

    ACTION: ClassVar[type[Any]]
    OBSERVATION: ClassVar[type[Any]]
    STATE: ClassVar[type[Any]]

    def __init__(self, base_url: str | None = None, *args: Any, **kwargs: Any) -> None:
        if len(args) < 2:
            kwargs.setdefault("message_timeout_s", MESSAGE_TIMEOUT_S)
        kwargs.setdefault("action_cls", self.ACTION)
        kwargs.setdefault("observation_cls", self.OBSERVATION)
        kwargs.setdefault("state_cls", self.STATE)
        super().__init__(base_url, *args, **kwargs)

    async def call(self, tool: str, **arguments: Any) -> StepResult[ObsT]:
        """Call a tool.

        Args:
            tool: Name of the tool.
            **arguments: Arguments of the tool, as fields of the action.
        """
        return await self.step(self.ACTION(tool=tool, **arguments))

    async def run(self, command: str, timeout_s: float | None = None) -> StepResult[ObsT]:
        """Run ``command`` in the session's shell.

        Args:
            command: Bash text.
            timeout_s: Time limit in seconds, at most the server's maximum.
        """
        return await self.call("run", command=command, timeout_s=timeout_s)

    async def write_file(self, path: str, content: str) -> StepResult[ObsT]:
        """Create or replace the file ``path``."""
        return await self.call("write_file", path=path, content=content)

    async def submit(self) -> StepResult[ObsT]:
        """End the episode; the reward is the task's score in [0, 1]."""
        return await self.call("submit")
