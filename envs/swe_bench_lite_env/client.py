"""`ErrataClient` with this environment's types and one method for each tool."""

from __future__ import annotations

from typing import Any

from openenv.core.client_types import StepResult

from errata_client import ErrataClient

from .models import SweAction, SweObservation, SweState

MESSAGE_TIMEOUT_S = 960.0
"""Above the server's step deadline: a client that gives up first loses a plain session, or an outcome."""


class SweBenchLiteEnv(ErrataClient[SweAction, SweObservation, SweState]):
    """Client of a SWE-bench Lite session.

    Takes the arguments of `ErrataClient`; the classes of actions, observations and the state are set, and
    ``message_timeout_s`` is `MESSAGE_TIMEOUT_S` by default. In sync code use
    ``with SweBenchLiteEnv(base_url=...).sync() as env``. ``reset`` takes ``instance_id``, or ``split`` and ``index``,
    or ``seed``.
    """

    def __init__(self, base_url: str | None = None, *args: Any, **kwargs: Any) -> None:
        if len(args) < 2:
            kwargs.setdefault("message_timeout_s", MESSAGE_TIMEOUT_S)
        kwargs.setdefault("action_cls", SweAction)
        kwargs.setdefault("observation_cls", SweObservation)
        kwargs.setdefault("state_cls", SweState)
        super().__init__(base_url, *args, **kwargs)

    async def run(self, command: str, timeout_s: float | None = None) -> StepResult[SweObservation]:
        """Run ``command`` in the session's shell.

        Args:
            command: Bash text.
            timeout_s: Time limit in seconds, at most the server's maximum.
        """
        return await self.step(SweAction(tool="run", command=command, timeout_s=timeout_s))

    async def read_file(
        self, path: str, first_line: int | None = None, last_line: int | None = None
    ) -> StepResult[SweObservation]:
        """Read the lines ``first_line`` to ``last_line``, from 1 and inclusive, into ``observation.content``."""
        return await self.step(SweAction(tool="read_file", path=path, first_line=first_line, last_line=last_line))

    async def write_file(self, path: str, content: str) -> StepResult[SweObservation]:
        """Create or replace the file ``path``."""
        return await self.step(SweAction(tool="write_file", path=path, content=content))

    async def edit(self, path: str, old_text: str, new_text: str) -> StepResult[SweObservation]:
        """Replace ``old_text``, which has to occur exactly once in the file, by ``new_text``."""
        return await self.step(SweAction(tool="edit", path=path, old_text=old_text, new_text=new_text))

    async def apply_patch(self, patch: str) -> StepResult[SweObservation]:
        """Apply a unified diff at the root of the repository: all of it, or nothing."""
        return await self.step(SweAction(tool="apply_patch", patch=patch))

    async def search(self, pattern: str, path: str = "") -> StepResult[SweObservation]:
        """Find the lines that match an extended regular expression, in the current directory without ``path``."""
        return await self.step(SweAction(tool="search", pattern=pattern, path=path))

    async def submit(self) -> StepResult[SweObservation]:
        """End the episode; the reward is 1.0 where the issue is resolved, with the default rubric, and else 0.0.

        The call can take longer than ``message_timeout_s`` says where many submissions wait for a grading slot: the
        server announces the deadline.
        """
        return await self.step(SweAction(tool="submit"))
