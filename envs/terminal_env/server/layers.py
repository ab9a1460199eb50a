"""The start of a task as a frozen layer, made once and restored in O(1) by every later reset."""

from __future__ import annotations

import asyncio
import io
import os
import shlex
import stat
import tarfile
from collections.abc import Callable
from weakref import WeakKeyDictionary

from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import WORKSPACE, Backend, CommandResult, Sandbox, SandboxSnapshot

from .staging import staged
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

UNPACK = (
    "python3 -I -S -c 'import sys, tarfile; "
    f'tarfile.open(fileobj=sys.stdin.buffer, mode="r|").extractall("{WORKSPACE}")\''
)
_SETUP = f"cd {WORKSPACE} && exec bash -euo pipefail /setup/setup.sh"
CLAMP = f"find {WORKSPACE} -newermt @{EPOCH_S} -exec touch -h -d @{EPOCH_S} {{}} +"


class TaskLayers:
    """The starts of one backend's tasks; ``None`` stands for the bare shell."""

    def __init__(self) -> None:
        self._made: dict[str, SandboxSnapshot] = {}
        self._making: dict[tuple[str, asyncio.AbstractEventLoop], asyncio.Task[SandboxSnapshot]] = {}

    async def start(self, backend: Backend, task: Task | None) -> SandboxSnapshot:
        """Return the start of ``task``, made on first use.

        Raises:
            errata_protocol.errors.EnvironmentFailed: The task's own set-up failed.
            errata_protocol.errors.SandboxFailed: The sandbox broke.
        """
        key = task.digest if task else ""
        if key in self._made:
            return self._made[key]
        # One build for all sessions that wait for it. It is a task of its own, because the first session may be
        # cancelled while others wait; each loop has its own, because an awaited task belongs to one.
        owner = (key, asyncio.get_running_loop())
        if owner not in self._making:
            making = asyncio.ensure_future(_make(backend, task))
            making.add_done_callback(self._keep(owner))
            self._making[owner] = making
        return await asyncio.shield(self._making[owner])

    def forget(self, task: Task | None) -> None:
        """Drop the start of ``task``: its layer is gone, the next call of `start` makes another."""
        self._made.pop(task.digest if task else "", None)

    def _keep(self, owner: tuple[str, asyncio.AbstractEventLoop]) -> Callable[[asyncio.Task[SandboxSnapshot]], None]:
        def done(making: asyncio.Task[SandboxSnapshot]) -> None:
            self._making.pop(owner, None)
            if not making.cancelled() and making.exception() is None:
                self._made[owner[0]] = making.result()

        return done


_layers: WeakKeyDictionary[Backend, TaskLayers] = WeakKeyDictionary()


def task_layers(backend: Backend) -> TaskLayers:
    """Return the starts that ``backend`` holds, shared by all sessions on it."""
    return _layers.setdefault(backend, TaskLayers())


async def _make(backend: Backend, task: Task | None) -> SandboxSnapshot:
    sandbox = await backend.open()
    try:
        if task is not None:
            await _install(sandbox, task)
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in (SHELL_ENV | _env(task)).items())
        _demand(await sandbox.run(f"export {exports}"), task, "its [errata.env]")
        return await sandbox.snapshot()
    finally:
        await sandbox.destroy()


def _env(task: Task | None) -> dict[str, str]:
    return dict(task.env) if task else {}


async def _install(sandbox: Sandbox, task: Task) -> None:
    _demand(await sandbox.run(UNPACK, stdin=_archive(task), clean=True), task, "unpacking environment/")
    if task.setup is not None:
        mounts = {"/setup": staged(task.setup)}
        result = await sandbox.run(
            _SETUP, clean=True, env=SHELL_ENV | _env(task), mounts=mounts, timeout_s=SETUP_TIMEOUT_S
        )
        _demand(result, task, "setup.sh")
    _demand(await sandbox.run(CLAMP, clean=True), task, "setting file times")


def _demand(result: CommandResult, task: Task | None, what: str) -> None:
    if result.exit_code != 0:
        name = task.id if task else "the bare shell"
        status = "was killed at its time limit" if result.timed_out else f"ended with {result.exit_code}"
        raise EnvironmentFailed(f"cannot set up {name}: {what} {status}: {(result.stderr or result.stdout)[-500:]}")


def _archive(task: Task) -> bytes:
    """Return environment/ as a tar whose bytes depend on names, contents, symlinks and execute bits only."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in tree(task.environment):
            mode = path.lstat().st_mode
            info = tarfile.TarInfo(name)
            info.mtime = EPOCH_S
            info.mode = 0o755 if stat.S_ISDIR(mode) or mode & 0o100 else 0o644
            if stat.S_ISLNK(mode):
                info.type, info.linkname = tarfile.SYMTYPE, os.fspath(path.readlink())
                archive.addfile(info)
            elif stat.S_ISDIR(mode):
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            elif stat.S_ISREG(mode):
                content = path.read_bytes()
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
