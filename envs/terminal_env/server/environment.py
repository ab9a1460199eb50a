"""The environment: one shell in a sandbox, a task to do in it, and a verifier at the end."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

from errata_environment import tool_calls
from errata_environment.episodes import TaskEpisode
from errata_environment.sandboxed import SandboxedEnvironment, check_reset
from errata_environment.session_backend import session_backend
from errata_environment.tasks.task_api import TaskApi, pick
from errata_environment.tool_calls import Answer
from errata_protocol.environment import Snapshot
from errata_protocol.errors import EnvironmentFailed, InvalidRequest, SandboxFailed
from errata_protocol.markers import NOTHING_WRONG
from errata_server.sandbox.base import Backend, Sandbox, SandboxSnapshot

from ..models import TOOL_NAMES, TerminalAction, TerminalObservation, TerminalState
from .check.results import demand_checked, harmless
from .layers import task_layers
from .tasks import BUNDLED, Task, offered_tasks
from .verifier import Verdict, verify

DEFAULT_TIMEOUT_S = 30.0
MAX_TIMEOUT_S = 600.0
"""Longest time limit of one command, seconds; shorter than the server's step deadline of 900 s."""


class TerminalEnvironment(
    TaskApi[Task], SandboxedEnvironment[TerminalAction, TerminalObservation, TerminalState, TaskEpisode]
):
    """One terminal session; see the package's README for its tools, tasks and rewards.

    Commands that fail are marked observations. A sandbox that fails raises `SandboxFailed` or `SandboxUnavailable`:
    never an observation, never a reward.
    """

    NAME = "terminal"
    DESCRIPTION = "A sandboxed Linux terminal with graded tasks; failing turns carry error-site markers."
    AUTHOR = "The Errata authors"
    README = Path(__file__).resolve().parent.parent / "README.md"
    TOOLS = TOOL_NAMES

    def __init__(self) -> None:
        super().__init__()
        self._task: Task | None = None
        self.verdict: Verdict | None = None
        """The verdict on the last ``submit``, for logs and tests; it is not sent to clients."""

    # reset

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        task_id: str | None = None,
        split: str | None = None,
        index: int | None = None,
        **kwargs: Any,
    ) -> TerminalObservation:
        """Start an episode: the named task, or a bare shell when none is named.

        Args:
            seed: Chooses the task where only ``split`` is given; without one the session's seed does.
            episode_id: Name of the episode in ``state``.
            task_id: A task by name.
            split: A task by split and ``index``, or by split and seed.
            index: Position in ``split``, which is ``bundled`` without a name.
            **kwargs: Refused: a misspelt ``task_id`` would train on a bare shell.

        Raises:
            InvalidRequest: There is no such task, or no such argument.
            EnvironmentFailed: The task's own set-up failed, or it is a local one that was not checked.
            SandboxUnavailable: This machine cannot run sandboxes.
        """
        check_reset("seed, episode_id, task_id, split, index", kwargs, seed=seed, index=index)
        backend, drawn = session_backend()
        seed = drawn if seed is None else seed
        task = await asyncio.to_thread(_choose, task_id, split, index, seed)
        if task is not None:
            await demand_checked(backend, task)
        sandbox = await _open(backend, task)
        episode = TaskEpisode(
            episode_id=str(uuid.uuid4()) if episode_id is None else episode_id,
            task_id=task.id if task else "",
            seed=seed,
            cwd=sandbox.cwd,
        )
        await self._begin(backend, sandbox, episode)
        self._task, self.verdict = task, None
        return self._sent(
            TerminalObservation(
                tool="reset",
                reward=0.0,
                instruction=task.instruction if task else "",
                task_id=episode.task_id,
                cwd=episode.cwd,
            )
        )

    # step

    def _observation(self, action: TerminalAction, values: dict[str, Any], seconds: float) -> TerminalObservation:
        episode, _ = self._live()
        episode.step_count += 1
        standing = {"task_id": episode.task_id, "reward": 0.0, "cwd": episode.cwd, "duration_s": round(seconds, 4)}
        return TerminalObservation(**{"tool": action.tool, **standing, **values})

    async def _use(self, action: TerminalAction, bound_s: float | None) -> Answer:
        episode, sandbox = self._live()
        if action.tool == "submit":
            return await self._submit(), NOTHING_WRONG
        if action.tool == "write_file":
            return await tool_calls.write_file(sandbox, action.path, action.content or "")
        if action.tool == "read_file":
            return await tool_calls.read_file(sandbox, action.path)
        limits = [MAX_TIMEOUT_S, DEFAULT_TIMEOUT_S if action.timeout_s is None else action.timeout_s]
        limit_s = min(limits if bound_s is None or bound_s <= 0 else [*limits, bound_s])
        answer = await tool_calls.run(sandbox, action.command, before=episode.cwd, limit_s=limit_s)
        episode.cwd = sandbox.cwd
        return answer

    async def _submit(self) -> dict[str, Any]:
        episode, sandbox = self._live()
        task, backend = self._task, self._backend
        score = 0.0  # a bare shell has no verifier
        if task is not None and backend is not None:
            final = await sandbox.snapshot()
            missed = await harmless(backend, task)
            self.verdict = await verify(backend, task, final, lambda: _start(backend, task), harmless=missed)
            score = self.verdict.score
        episode.submitted = episode.done = True
        return {"reward": score, "done": True}

    # state

    @property
    def state(self) -> TerminalState:
        """State of the episode; default values before a reset."""
        episode = self._episode
        if episode is None:
            return TerminalState()
        return TerminalState(
            episode_id=episode.episode_id,
            step_count=episode.step_count,
            task_id=episode.task_id,
            seed=episode.seed,
            cwd=episode.cwd,
            submitted=episode.submitted,
            done=episode.done,
        )

    async def restore(self, snapshot: Snapshot) -> None:
        """Continue from ``snapshot`` instead of a reset.

        Raises:
            EnvironmentFailed: The snapshot cannot be read, or names a task that this server does not have.
            SandboxFailed: A layer that it names does not exist any more.
        """
        episode, saved = TaskEpisode.read(snapshot, "a terminal session")
        task = (await asyncio.to_thread(offered_tasks)).find(episode.task_id) if episode.task_id else None
        if episode.task_id and task is None:
            raise EnvironmentFailed(f"cannot restore a session on task {episode.task_id}: this server has no such task")
        backend, _ = session_backend()
        sandbox = await backend.restore(saved)
        await self._begin(backend, sandbox, episode)
        self._task = task

    # tasks

    def split_types(self) -> dict[str, str]:
        """Return the splits: ``bundled``, and ``local`` where the operator added tasks."""
        return dict.fromkeys(offered_tasks().splits, "train")

    def tasks_of(self, split: str) -> tuple[Task, ...]:
        """Return the tasks of a split.

        Raises:
            UnknownSplit: There is no such split.
        """
        return offered_tasks().split(split)

    def public_task(self, task: Task, index: int) -> dict[str, Any]:
        """Return a task without its tests, its set-up and its solution."""
        return task.public(index)


def _choose(task_id: str | None, split: str | None, index: int | None, seed: int | None) -> Task | None:
    """Return the task that a reset names, None for a bare shell."""
    if task_id and (split is not None or index is not None):
        raise InvalidRequest("reset: name a task by task_id, or by split and index, not by both")
    tasks = offered_tasks()
    if task_id:
        task = tasks.find(task_id)
        if task is None and task_id in tasks.broken:
            raise EnvironmentFailed(tasks.broken[task_id])
        if task is None:
            raise InvalidRequest(f"no task {task_id!r}: there are {', '.join(tasks.ids)}", known=tasks.ids)
        return task
    if split is None and index is None:
        return None
    name = BUNDLED if split is None else split
    return pick(name, tasks.split(name), index, seed)


async def _start(backend: Backend, task: Task | None) -> SandboxSnapshot:
    return await task_layers(backend).start(backend, task)


async def _open(backend: Backend, task: Task | None) -> Sandbox:
    await backend.start()
    try:
        return await backend.restore(await _start(backend, task))
    except SandboxFailed:
        # Layers that no journal row names are collected, this one perhaps among them. A second failure is real.
        task_layers(backend).forget(task)
        return await backend.restore(await _start(backend, task))
