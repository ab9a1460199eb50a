"""`ErrataClient` with this environment's types and one method for each tool."""

from __future__ import annotations

from openenv.core.client_types import StepResult

from errata_environment.published.client import ToolClient

from .models import SweAction, SweObservation, SweState


class SweBenchLiteEnv(ToolClient[SweAction, SweObservation, SweState]):
    """Client of a SWE-bench Lite session.

    Takes the arguments of `ErrataClient`; the classes of actions, observations and the state are set, and
    ``message_timeout_s`` is longer than the server's step deadline. In sync code use
    ``with SweBenchLiteEnv(base_url=...).sync() as env``. ``reset`` takes ``instance_id``, or ``split`` and ``index``,
    or ``seed``.
    """

    ACTION = SweAction
    OBSERVATION = SweObservation
    STATE = SweState

    async def read_file(
        self, path: str, first_line: int | None = None, last_line: int | None = None
    ) -> StepResult[SweObservation]:
        """Read the lines ``first_line`` to ``last_line``, from 1 and inclusive, into ``observation.content``."""
        return await self.call("read_file", path=path, first_line=first_line, last_line=last_line)

    async def edit(self, path: str, old_text: str, new_text: str) -> StepResult[SweObservation]:
        """Replace ``old_text``, which has to occur exactly once in the file, by ``new_text``."""
        return await self.call("edit", path=path, old_text=old_text, new_text=new_text)

    async def apply_patch(self, patch: str) -> StepResult[SweObservation]:
        """Apply a unified diff at the root of the repository: all of it, or nothing."""
        return await self.call("apply_patch", patch=patch)

    async def search(self, pattern: str, path: str = "") -> StepResult[SweObservation]:
        """Find the lines that match an extended regular expression, in the current directory without ``path``."""
        return await self.call("search", pattern=pattern, path=path)

    async def submit(self) -> StepResult[SweObservation]:
        """End the episode; the reward is 1.0 where the issue is resolved, with the default rubric, and else 0.0.

        The call can take longer than ``message_timeout_s`` says where many submissions wait for a grading slot: the
        server announces the deadline.
        """
        return await self.call("submit")
