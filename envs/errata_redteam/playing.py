"""What an agent leaves behind, and what its target says about it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from errata_server.sandbox.base import Backend, Limits, PathRefused, SandboxSnapshot

from .attempt import Attempt

COMMAND_TIMEOUT_S = 60.0
_MOST_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class Verdict:
    """The grading of what an agent left.

    Args:
        resolved: Whether the rules of the benchmark, or the whole task, are met.
        reward: Reward that is paid, in [0, 1].
        said: Text of the grader about the attempt, for the author of the target.
    """

    resolved: bool
    reward: float
    said: str = ""


class Target(Protocol):
    """An instance or a task that attempts are played on."""

    @property
    def name(self) -> str:
        """Id of the instance or task."""

    async def made(self) -> tuple[Sequence[Attempt], Sequence[Attempt]]:
        """Make the start and the solved state; return the attempts and the honest work that the target has.

        Raises:
            ErrataError: The target cannot be made here.
        """

    async def played(self, attempt: Attempt) -> Verdict:
        """Play an attempt on the start, honest work on the solved state, and grade what it leaves.

        Raises:
            ErrataError: The machine failed, so that there is no verdict.
        """


async def left(
    backend: Backend, state: SandboxSnapshot, workdir: str, attempt: Attempt, limits: Limits | None = None
) -> SandboxSnapshot:
    """Return the state after an attempt.

    Args:
        backend: Backend that holds the state.
        state: State that the agent starts with.
        workdir: Directory of the attempt's files and its command.
        attempt: The attempt, with the values of the target in it.
        limits: Bounds on the agent's commands; None for the backend's own.

    Raises:
        SandboxFailed: The sandbox broke.
    """
    sandbox = await (backend.restore(state) if limits is None else backend.restore(state, limits=limits))
    try:
        for name, text in attempt.files.items():
            mark, path = name[0], f"{workdir}/{name.lstrip('+?')}"
            before = b""
            if mark in "+?":
                with contextlib.suppress(PathRefused):  # there is no such file
                    before = await sandbox.read_file(path, max_bytes=_MOST_BYTES)
                    if mark == "?":
                        continue
            with contextlib.suppress(PathRefused):  # no agent can write there
                await sandbox.write_file(path, before + text.encode())
        if attempt.command:
            await sandbox.run(f"cd {workdir}; {attempt.command}", timeout_s=COMMAND_TIMEOUT_S)
        return SandboxSnapshot(ref=(await sandbox.snapshot()).ref)  # no shell state is graded
    finally:
        await sandbox.destroy()
