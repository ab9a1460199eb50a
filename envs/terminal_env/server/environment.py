"""The environment: one shell in a sandbox, a task to do in it, and a verifier at the end."""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from pathlib import Path
from typing import Any

from openenv.core.env_server.types import EnvironmentMetadata

from errata_environment.sandboxed import SandboxedEnvironment, check_reset
from errata_environment.session_backend import session_backend
from errata_protocol import detect
from errata_protocol.environment import Snapshot
from errata_protocol.errors import EnvironmentFailed, InvalidRequest, SandboxFailed
from errata_protocol.markers import NOTHING_WRONG, Detection, ErrorKind, ErrorSite
from errata_server.environments.detecting import detected
from errata_server.sandbox.base import Backend, PathRefused, Sandbox, SandboxSnapshot

from ..models import TOOL_NAMES, TerminalAction, TerminalObservation, TerminalState
from .check.results import demand_checked, harmless
from .episode import Episode, read_snapshot
from .layers import task_layers
from .task_api import TaskApi
from .tasks import BUNDLED, Task, offered_tasks
from .verifier import Verdict, verify

DEFAULT_TIMEOUT_S = 30.0
MAX_TIMEOUT_S = 600.0
"""Longest time limit of one command, seconds; shorter than the server's step deadline of 900 s."""
READ_BYTES = 64 * 1024
"""How much of a file one ``read_file`` returns."""
_README = Path(__file__).resolve().parent.parent / "README.md"


class TerminalEnvironment(TaskApi, SandboxedEnvironment[TerminalAction, TerminalObservation, TerminalState, Episode]):
    """One terminal session; see the package's README for its tools, tasks and rewards.

    Commands that fail are marked observations. A sandbox that fails raises `SandboxFailed` or `SandboxUnavailable`:
    never an observation, never a reward.
    """

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
        await self._release()
        self._backend, self._sandbox, self._task, self.verdict = backend, sandbox, task, None
        self._episode = Episode(
            episode_id=str(uuid.uuid4()) if episode_id is None else episode_id,
            task_id=task.id if task else "",
            seed=seed,
            cwd=sandbox.cwd,
        )
        observation = TerminalObservation(
            tool="reset",
            reward=0.0,
            instruction=task.instruction if task else "",
            task_id=self._episode.task_id,
            cwd=self._episode.cwd,
        )
        transformed: TerminalObservation = self._apply_transform(observation)
        return transformed

    # step

    async def step_async(
        self, action: TerminalAction, timeout_s: float | None = None, **kwargs: Any
    ) -> TerminalObservation:
        """Call one tool.

        Args:
            action: What to do.
            timeout_s: Upper bound for a command's time limit, in seconds.
            **kwargs: Not used.

        Raises:
            NoReset: There was no reset.
            InvalidRequest: The episode is over.
            SandboxFailed: The sandbox broke; the step did not happen.
            EnvironmentFailed: The task's verifier is broken.
        """
        del kwargs
        episode, _ = self._live()
        if episode.done:
            raise InvalidRequest("the episode is over: reset to start another")
        started = time.monotonic()
        values, detection = await self._call(action, timeout_s)
        episode.step_count += 1
        observation = TerminalObservation(
            **{
                "tool": action.tool,
                "task_id": episode.task_id,
                "reward": 0.0,
                "cwd": episode.cwd,
                "duration_s": round(time.monotonic() - started, 4),
                **values,
            }
        )
        transformed: TerminalObservation = self._apply_transform(observation.with_detection(detection))
        return transformed

    async def _call(self, action: TerminalAction, bound_s: float | None) -> tuple[dict[str, Any], Detection]:
        if action.tool not in TOOL_NAMES:
            message = f"no tool {action.tool[:80]!r}: there are {', '.join(TOOL_NAMES)}"
            return {"stderr": message}, detect.tool_not_found(action.tool, TOOL_NAMES)
        wrong = _wrong_argument(action)
        if wrong is not None:
            field, message = wrong
            site = ErrorSite(action_field=field, source="action", message=message)
            return {"stderr": message}, Detection.of(ErrorKind.INVALID_ARGUMENTS, site)
        if action.tool == "run":
            return await self._run(action, bound_s)
        if action.tool == "submit":
            return await self._submit(), NOTHING_WRONG
        try:
            return await self._file(action)
        except PathRefused as refusal:
            return {"stderr": str(refusal)}, detect.path_refused(action.path, refusal.reason, refusal.message)

    async def _run(self, action: TerminalAction, bound_s: float | None) -> tuple[dict[str, Any], Detection]:
        episode, sandbox = self._live()
        limits = [MAX_TIMEOUT_S, DEFAULT_TIMEOUT_S if action.timeout_s is None else action.timeout_s]
        limit_s = min(limits if bound_s is None or bound_s <= 0 else [*limits, bound_s])
        result = await sandbox.run(action.command, timeout_s=limit_s)
        before, episode.cwd = episode.cwd, sandbox.cwd
        detection = await detected(
            action.command,
            result.exit_code,
            result.stdout,
            result.stderr,
            timed_out=result.timed_out,
            limit_hit=result.limit_hit,
            cwd=before or None,
            workdir=sandbox.workdir,
        )
        if detection.error_kind is None and result.truncated:
            detection = detect.output_truncated()
        values = {
            "stdout": result.stdout,
            "stderr": result.stderr,
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
            "time_limit_s": limit_s,
            "truncated": result.truncated,
            "limit_hit": result.limit_hit,
            "killed_background": list(result.killed_background),
            "shell_saved": result.shell_saved,
            "cwd": episode.cwd,
        }
        return values, detection

    async def _file(self, action: TerminalAction) -> tuple[dict[str, Any], Detection]:
        _, sandbox = self._live()
        if action.tool == "write_file":
            await sandbox.write_file(action.path, (action.content or "").encode())
            return {}, NOTHING_WRONG
        content = await sandbox.read_file(action.path, max_bytes=READ_BYTES + 1)
        truncated = len(content) > READ_BYTES
        text = content[:READ_BYTES].decode("utf-8", "backslashreplace")
        return {"content": text, "truncated": truncated}, detect.output_truncated() if truncated else NOTHING_WRONG

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
        episode, saved = read_snapshot(snapshot)
        task = (await asyncio.to_thread(offered_tasks)).find(episode.task_id) if episode.task_id else None
        if episode.task_id and task is None:
            raise EnvironmentFailed(f"cannot restore a session on task {episode.task_id}: this server has no such task")
        backend, _ = session_backend()
        sandbox = await backend.restore(saved)
        await self._release()
        self._backend, self._sandbox, self._task, self._episode = backend, sandbox, task, episode

    async def forked(self, episode_id: str) -> None:
        """Become a child episode that was forked here: its own name, and no steps yet (PROTOCOL D11)."""
        episode, _ = self._live()
        episode.episode_id, episode.step_count = episode_id, 0

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(
            name="terminal",
            description="A sandboxed Linux terminal with graded tasks; failing turns carry error-site markers.",
            version="1.0.0",
            author="The Errata authors",
            readme_content=_README.read_text("utf-8"),
        )


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
    if name not in tasks.splits:
        raise InvalidRequest(f"no split {name!r}: there are {', '.join(tasks.splits)}", known=list(tasks.splits))
    entries = tasks.splits[name]
    if index is None:
        return random.Random(seed).choice(entries)
    if not 0 <= index < len(entries):
        raise InvalidRequest(f"split {name} has tasks 0..{len(entries) - 1}, not {index}")
    return entries[index]


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


def _wrong_argument(action: TerminalAction) -> tuple[str, str] | None:
    """Return the field at fault and what is wrong with it, or None."""
    limit = action.timeout_s
    if action.tool == "run":
        if not action.command.strip():
            return "command", "run needs a command"
        if "\0" in action.command:
            return "command", "command: a NUL character cannot be part of a command"
        if limit is not None and (math.isnan(limit) or limit <= 0):
            return "timeout_s", f"timeout_s must be above 0, not {limit:g}"
    elif action.tool in ("write_file", "read_file") and not action.path:
        return "path", f"{action.tool} needs a path"
    elif action.tool == "write_file" and action.content is None:
        return "content", "write_file needs content; empty content empties the file"
    return None
