"""Forks of a snapshot: commands run in a copy that is destroyed afterwards, and the snapshot does not change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from weakref import WeakKeyDictionary

from errata_server.sandbox.base import Backend, CommandResult, Limits, Sandbox, SandboxSnapshot

log = logging.getLogger("errata.grading")

_ending: WeakKeyDictionary[Backend, set[asyncio.Task[None]]] = WeakKeyDictionary()


@asynccontextmanager
async def forked(
    backend: Backend, state: SandboxSnapshot, *, limits: Limits | None = None, wait: bool = True
) -> AsyncIterator[Sandbox]:
    """Restore a snapshot as a new sandbox, without its saved shell state, and destroy the sandbox at the end.

    Args:
        backend: The backend that holds the snapshot.
        state: The snapshot.
        limits: Limits of the fork; None for the backend's.
        wait: Wait until the fork is destroyed. If False, destruction continues in a task, for which `forks_gone` waits,
            and its failure is logged: deleting the files of a test suite may take a second, and the next fork can run
            in that time.

    Raises:
        SandboxFailed: The snapshot cannot be restored, or the fork cannot be destroyed while ``wait`` is set.
    """
    fork = await backend.restore(SandboxSnapshot(ref=state.ref), limits=limits)
    try:
        yield fork
    finally:
        if wait:
            await fork.destroy()
        else:
            ending = _ending.setdefault(backend, set())
            task = asyncio.get_running_loop().create_task(_destroy(fork))
            ending.add(task)
            task.add_done_callback(ending.discard)


async def forks_gone(backend: Backend) -> None:
    """Wait until every fork that this event loop left with ``wait=False`` on ``backend`` is destroyed."""
    loop = asyncio.get_running_loop()
    tasks = [task for task in _ending.get(backend, ()) if task.get_loop() is loop]
    if tasks:
        await asyncio.wait(tasks)


async def _destroy(fork: Sandbox) -> None:
    try:
        await fork.destroy()
    except Exception:  # the result of its run is valid; the next start of the server deletes the remains
        log.exception("cannot destroy a fork of a graded state")


async def run_in_fork(
    backend: Backend,
    state: SandboxSnapshot,
    command: str,
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    mounts: Mapping[str, Path] = MappingProxyType({}),
    stdin: bytes | None = None,
    timeout_s: float,
    limits: Limits | None = None,
) -> CommandResult:
    """Run a command in a fork of a snapshot, without the agent's saved shell state, and destroy the fork.

    Args:
        backend: The backend that holds the snapshot.
        state: The snapshot.
        command: Shell command.
        env: Environment variables of the command.
        mounts: Host directories to mount read-only, by path in the sandbox.
        stdin: Standard input.
        timeout_s: Wall time after which all processes of the command are killed, seconds.
        limits: Limits of the fork; None for the backend's.

    Raises:
        SandboxFailed: The sandbox failed.
    """
    async with forked(backend, state, limits=limits) as fork:
        return await fork.run(command, clean=True, env=dict(env), mounts=dict(mounts), stdin=stdin, timeout_s=timeout_s)
