"""The start of a task as a frozen layer, made once and restored in O(1) by every later reset."""

from __future__ import annotations

import asyncio
import io
import os
import shlex
import stat
import tarfile
from pathlib import Path, PurePosixPath
from weakref import WeakKeyDictionary

from errata_environment.grading.staging import staged
from errata_environment.shared_builds import SharedBuilds
from errata_os.input_files import FileRefused, read_file
from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import WORKSPACE, Backend, CommandResult, Sandbox, SandboxSnapshot
from errata_server.sandbox.base_trees.recipe import AGENT_UID
from errata_server.sandbox.spec import Entry, SandboxSpec, SpecRefused

from .dockerfile import Placed, Recipe, Run
from .task_files import MAX_BYTES
from .tasks import Task, tree

EPOCH_S = 1767225600
"""2026-01-01T00:00:00Z: no file of a start is newer, so that two starts are equal byte for byte."""

SHELL_ENV = {
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Exported in every first shell: one locale, time zone and hash order, and no caches that embed times."""

SETUP_TIMEOUT_S = 120.0

UNPACK = 'python3 -I -S -c \'import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode="r|").extractall("/")\''
_SETUP = "exec bash -euo pipefail /setup/setup.sh"
_TOUCH = f"-xdev -user {AGENT_UID} -newermt @{EPOCH_S} -exec touch -h -d @{EPOCH_S} {{}} +"
CLAMP = f"xargs -0 sh -c 'exec find \"$@\" {_TOUCH}' find"
"""Reads directories from standard input, each ended by NUL."""


class TaskLayers:
    """The start states of one backend's tasks; the task None is the bare shell."""

    def __init__(self) -> None:
        self._made: SharedBuilds[str, SandboxSnapshot] = SharedBuilds()

    async def start(self, backend: Backend, task: Task | None) -> SandboxSnapshot:
        """Return the start of ``task``, made on first use.

        Raises:
            errata_protocol.errors.EnvironmentFailed: The task's own set-up failed.
            errata_protocol.errors.SandboxFailed: The sandbox broke.
        """
        return await self._made.get(_key(task), lambda: _make(backend, task))

    def forget(self, task: Task | None) -> None:
        """Forget the start state of ``task``, whose layer was deleted; the next `start` makes another."""
        self._made.forget(_key(task))


def _key(task: Task | None) -> str:
    return task.digest if task else ""


_layers: WeakKeyDictionary[Backend, TaskLayers] = WeakKeyDictionary()


def task_layers(backend: Backend) -> TaskLayers:
    """Return the starts that ``backend`` holds, shared by all sessions on it."""
    return _layers.setdefault(backend, TaskLayers())


async def _make(backend: Backend, task: Task | None) -> SandboxSnapshot:
    sandbox = await _opened(backend, task)
    try:
        if task is not None:
            await _install(sandbox, task)
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in shell_env(task).items())
        _demand(await sandbox.run(f"export {exports}"), task, "its [errata.env]")
        return await sandbox.snapshot()
    finally:
        await sandbox.destroy()


async def _opened(backend: Backend, task: Task | None) -> Sandbox:
    if task is None or task.recipe is None:
        return await backend.open(base=task.base if task else "default")
    try:
        entries = await asyncio.to_thread(_entries, task.recipe)
        spec = SandboxSpec(workdir=task.workdir, entries=entries, mtime_s=EPOCH_S)
        return await backend.open(base=task.base, spec=spec)
    except (SpecRefused, FileRefused, OSError) as error:
        raise EnvironmentFailed(f"cannot set up {task.id}: environment/Dockerfile: {error}") from error


def _entries(recipe: Recipe) -> tuple[Entry, ...]:
    return tuple(made.entry() if isinstance(made, Placed) else made for made in recipe.start)


def shell_env(task: Task | None) -> dict[str, str]:
    """Return what is exported in the first shell of ``task``, and for its probes and its verifier."""
    return SHELL_ENV | (dict(task.env) if task else {})


async def _install(sandbox: Sandbox, task: Task) -> None:
    if task.recipe is None:
        archive = await asyncio.to_thread(_archive_of_tree, task.environment)
        _demand(await sandbox.run(UNPACK, stdin=archive, clean=True), task, "unpacking environment/")
    else:
        await _follow(sandbox, task, task.recipe)
    if task.setup is not None:
        mounts = {"/setup": await asyncio.to_thread(staged, task.setup)}
        command = f"cd {shlex.quote(task.workdir)} && {_SETUP}"
        result = await sandbox.run(command, clean=True, env=shell_env(task), mounts=mounts, timeout_s=SETUP_TIMEOUT_S)
        _demand(result, task, "setup.sh")
    places = "".join(f"{place}\0" for place in (task.workdir, *_top_directories(task.recipe)))
    result = await sandbox.run(CLAMP, stdin=os.fsencode(places), clean=True)
    _demand(result, task, "setting file times")


def _archive_of_tree(root: Path) -> bytes:
    return _archive([Placed(f"{WORKSPACE}/{name}", *_source(path)) for name, path in tree(root)])


def _source(path: Path) -> tuple[Path | None, int]:
    mode = path.lstat().st_mode
    if stat.S_ISDIR(mode):
        return None, 0o755
    return path, 0o755 if mode & 0o100 else 0o644


def _top_directories(recipe: Recipe | None) -> list[str]:
    """Return the directories of the agent that the Dockerfile made, none inside of another."""
    tops: dict[str, None] = {}
    for made in recipe.start if recipe else ():
        is_agents = isinstance(made, Placed) and made.is_directory and made.owner == "agent"
        if is_agents and not any(str(above) in tops for above in PurePosixPath(made.path).parents):
            tops[made.path] = None
    return list(tops)


async def _follow(sandbox: Sandbox, task: Task, recipe: Recipe) -> None:
    """Do what the Dockerfile does after the files of the start, as the agent."""
    for step in recipe.steps:
        if isinstance(step, Run):
            command = f"cd {shlex.quote(step.cwd)} && exec /bin/sh -ec {shlex.quote(step.command)}"
            result = await sandbox.run(command, clean=True, env=step.env, timeout_s=SETUP_TIMEOUT_S)
        else:
            archive = await asyncio.to_thread(_archive, list(step.entries))
            result = await sandbox.run(UNPACK, stdin=archive, clean=True)
        _demand(result, task, f"environment/Dockerfile {step.line}")


def _demand(result: CommandResult, task: Task | None, what: str) -> None:
    if result.exit_code != 0:
        name = task.id if task else "the bare shell"
        status = "was killed at its time limit" if result.timed_out else f"ended with {result.exit_code}"
        raise EnvironmentFailed(f"cannot set up {name}: {what} {status}: {(result.stderr or result.stdout)[-500:]}")


def _archive(files: list[Placed]) -> bytes:
    """Return a tar of ``files`` whose bytes depend on names, contents, symlinks and modes only."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for placed in files:
            info = tarfile.TarInfo(placed.path.lstrip("/"))
            info.mtime, info.mode = EPOCH_S, placed.mode
            if placed.is_directory:
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            elif placed.source is not None and placed.source.is_symlink():
                info.type, info.linkname = tarfile.SYMTYPE, os.fspath(placed.source.readlink())
                archive.addfile(info)
            else:
                content = placed.text if placed.source is None else read_file(placed.source, MAX_BYTES, follow=False)
                info.size = len(content or b"")
                archive.addfile(info, io.BytesIO(content or b""))
    return buffer.getvalue()
