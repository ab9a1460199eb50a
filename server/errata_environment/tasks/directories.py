"""Tasks as directories: read from disk, started in a sandbox, graded in a fork of its final state.

A task's directory has ``instruction.md``, what the agent reads; ``environment/``, the files of the work directory;
``tests/verify.py`` with a function ``score() -> float``, which runs in the work directory and returns a score from 0
to 1; and ``solution/solve.sh``, which earns 1. Agents see the instruction and the files, nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from errata_protocol.errors import EnvironmentFailed, SandboxFailed
from errata_server.sandbox.base import WORKSPACE, Backend, Sandbox, SandboxSnapshot

from ..grading.control import ControlRuns
from ..grading.forks import run_in_fork
from ..grading.results import NoVerdict, nonced
from ..grading.staging import staged
from ..shared_builds import SharedBuilds

VERIFIER_TIMEOUT_S = 120.0
"""Time limit of one verifier, seconds."""
_MOUNT = "/verifier"
_RUNNER = Path(__file__).with_name("run_verifier.py")
_control = ControlRuns()
_starts: WeakKeyDictionary[Backend, SharedBuilds[str, SandboxSnapshot]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class TaskDirectory:
    """One task.

    Args:
        id: Name of the directory.
        path: The directory.
        instruction: Text that the agent reads.
        digest: Digest of the files of the start and of the verifier.
    """

    id: str
    path: Path
    instruction: str
    digest: str

    def public(self, index: int) -> dict[str, Any]:
        """Return what agents and trainers may know of the task.

        Args:
            index: Position of the task in its split.
        """
        return {"index": index, "task_id": self.id, "instruction": self.instruction}


def read_tasks(root: Path) -> tuple[TaskDirectory, ...]:
    """Return the tasks below a directory, sorted by name.

    Raises:
        EnvironmentFailed: A directory lacks its instruction or its verifier, or a file cannot be read.
    """
    try:
        return tuple(_read(path) for path in sorted(root.iterdir()) if path.is_dir())
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentFailed(f"cannot read the tasks in {root}: {error}") from error


def _read(path: Path) -> TaskDirectory:
    for needed in ("instruction.md", "tests/verify.py"):
        if not (path / needed).is_file():
            raise EnvironmentFailed(f"task {path.name} has no {needed}")
    digest = hashlib.sha256()
    for part in ("environment", "tests"):
        for file in _files(path / part):
            content = file.read_bytes()
            name = file.relative_to(path).as_posix()
            digest.update(f"{name}\0{_mode(file):o}\0{len(content)}\0".encode() + content)
    return TaskDirectory(path.name, path, (path / "instruction.md").read_text("utf-8").strip(), digest.hexdigest())


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _mode(file: Path) -> int:
    return 0o755 if file.stat().st_mode & 0o100 else 0o644


async def open_task(backend: Backend, task: TaskDirectory) -> Sandbox:
    """Return a new sandbox at the start of a task.

    Raises:
        SandboxUnavailable: This machine cannot run sandboxes.
        SandboxFailed: The sandbox broke.
    """
    await backend.start()
    try:
        return await backend.restore(await _start(backend, task))
    except SandboxFailed:
        # A layer that no journal row names is collected, this one perhaps among them. A second failure is real.
        _starts[backend].forget(task.digest)
        return await backend.restore(await _start(backend, task))


async def grade(backend: Backend, task: TaskDirectory, final: SandboxSnapshot) -> float:
    """Return the score of a final state, in [0, 1].

    The verifier runs in a fork of the state, as the agent's user. If it gives no verdict there but does on the
    untouched start, the agent broke it, and the score is 0.

    Args:
        backend: The backend that holds the state.
        task: The task.
        final: The state at ``submit``.

    Raises:
        EnvironmentFailed: The verifier gives no verdict on the start of the task either.
        SandboxFailed: The sandbox broke.
    """
    try:
        return await _verdict(backend, task, final)
    except NoVerdict:
        await _control.demand(backend, task.digest, lambda: _check_verifier(backend, task))
        return 0.0


async def _check_verifier(backend: Backend, task: TaskDirectory) -> None:
    try:
        await _verdict(backend, task, await _start(backend, task))
    except NoVerdict as error:
        raise EnvironmentFailed(f"the verifier of task {task.id} is broken: {error}") from error


async def _verdict(backend: Backend, task: TaskDirectory, state: SandboxSnapshot) -> float:
    nonce = secrets.token_hex(16)
    files = await asyncio.to_thread(staged, task.path / "tests", _RUNNER, key=task.digest)
    result = await run_in_fork(
        backend,
        state,
        f"cd {shlex.quote(WORKSPACE)} && exec /usr/bin/python3 -I {_MOUNT}/{_RUNNER.name}",
        mounts={_MOUNT: files},
        stdin=f"{nonce}\n".encode(),
        timeout_s=VERIFIER_TIMEOUT_S,
    )
    score = nonced(result, nonce).get("score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        raise NoVerdict(f"its score is {score!r}, not a number from 0 to 1")
    return float(score)


async def _start(backend: Backend, task: TaskDirectory) -> SandboxSnapshot:
    starts = _starts.setdefault(backend, SharedBuilds())
    return await starts.get(task.digest, lambda: _make(backend, task))


async def _make(backend: Backend, task: TaskDirectory) -> SandboxSnapshot:
    root = task.path / "environment"
    sandbox = await backend.open()
    try:
        for file in await asyncio.to_thread(_files, root):
            content = await asyncio.to_thread(file.read_bytes)
            await sandbox.write_file(f"{WORKSPACE}/{file.relative_to(root).as_posix()}", content, mode=_mode(file))
        return await sandbox.snapshot()
    finally:
        await sandbox.destroy()
