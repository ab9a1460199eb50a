"""Attempts on a task of the terminal."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence

from errata_environment.grading.staging import staged
from errata_protocol.errors import EnvironmentFailed, SandboxUnavailable
from errata_server.sandbox.base import Backend, SandboxSnapshot
from terminal_env.server.check.checker import SOLUTION_TIMEOUT_S
from terminal_env.server.check.degenerate import named_paths
from terminal_env.server.check.results import harmless
from terminal_env.server.layers import task_layers
from terminal_env.server.tasks import Task
from terminal_env.server.verifier import verify

from . import honest, workspaces
from .attempt import HONEST, Attempt
from .playing import Verdict, left

_REPOSITORIES = "find . -maxdepth 4 -name .git -prune -printf '%h\\n'"


class TaskTarget:
    """A task.

    Args:
        backend: Backend that makes the sandboxes.
        task: The task.
    """

    def __init__(self, backend: Backend, task: Task) -> None:
        self.name = task.id
        self._backend = backend
        self._task = task
        self._harmless: frozenset[str] = frozenset()
        self._solved: SandboxSnapshot | None = None

    async def made(self) -> tuple[Sequence[Attempt], Sequence[Attempt]]:
        """Make the start and run the solution; see `playing.Target`."""
        try:
            values = await self._values()
        except SandboxUnavailable as error:
            if self._task.base == "default":
                raise
            raise EnvironmentFailed(error.message) from error  # of this task alone: its base tree is missing
        self._harmless = await harmless(self._backend, self._task)
        attempts = [attempt.on(self.name, values) for attempt in workspaces.ATTEMPTS]
        if self._task.solution is not None:
            self._solved = await self._solution()
        work = honest.IN_WORKSPACES if self._solved is not None else ()
        return [attempt for attempt in attempts if attempt is not None], work

    async def played(self, attempt: Attempt) -> Verdict:
        """Grade by the task's verifier; see `playing.Target`."""
        state = self._solved if attempt.kind == HONEST else await self._start()
        assert state is not None
        state = await left(self._backend, state, self._task.workdir, attempt)
        found = await verify(self._backend, self._task, state, self._start, harmless=self._harmless)
        return Verdict(found.score >= 1.0, found.score, found.detail)

    async def _start(self) -> SandboxSnapshot:
        return await task_layers(self._backend).start(self._backend, self._task)

    async def _values(self) -> dict[str, str]:
        """Return what stands for ``@NAME@``: files that the instruction names, and repositories in the start."""
        named = [
            path if not path.startswith("~/") else f"$HOME/{path[2:]}" for path in named_paths(self._task.instruction)
        ]
        words = " ".join(f'"{path}"' if path.startswith("$HOME/") else shlex.quote(path) for path in named)
        values = {"OUTPUTS": words} | ({"NAMED": words} if words else {})
        sandbox = await self._backend.restore(await self._start())
        try:
            found = (await sandbox.run(f"cd {self._task.workdir}; {_REPOSITORIES}", clean=True)).stdout.splitlines()
        finally:
            await sandbox.destroy()
        return values | ({"REPOSITORIES": shlex.join(found)} if found else {})

    async def _solution(self) -> SandboxSnapshot:
        solution = await asyncio.to_thread(staged, self._task.root / "solution", key=self._task.whole_digest)
        sandbox = await self._backend.restore(await self._start())
        try:
            ended = await sandbox.run(
                "bash /solution/solve.sh", mounts={"/solution": solution}, timeout_s=SOLUTION_TIMEOUT_S
            )
            if ended.timed_out:
                raise EnvironmentFailed(f"the solution of task {self.name} was killed after {SOLUTION_TIMEOUT_S:g} s")
            return SandboxSnapshot(ref=(await sandbox.snapshot()).ref)
        finally:
            await sandbox.destroy()
