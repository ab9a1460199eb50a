"""Forks of a state: what commands change there is gone afterwards, and the state stays as it is."""

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
    """Give a fork of a state without its saved shell state; it is destroyed at the end.

    Args:
        backend: Holds the state.
        state: A snapshot.
        limits: Of the fork; None for the backend's.
        wait: Return when it is destroyed. Else its destruction is only begun, and `forks_gone` waits for it: to delete
            what a test suite wrote may take a second, in which the next fork can run.
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
    """Return when every fork on ``backend`` that this event loop has left without waiting is destroyed."""
    loop = asyncio.get_running_loop()
    tasks = [task for task in _ending.get(backend, ()) if task.get_loop() is loop]
    if tasks:
        await asyncio.wait(tasks)


async def _destroy(fork: Sandbox) -> None:
    try:
        await fork.destroy()
    except Exception:  # what its run showed holds all the same; the next start of the server removes what is left
        log.exception("a fork of a graded state could not be destroyed")


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
    """Return what a command did in a fork of a state. No saved shell state of the agent is used.

    Args:
        backend: Holds the state.
        state: A snapshot.
        command: Shell text.
        env: Variables of the command.
        mounts: Read-only host directories by path inside.
        stdin: Bytes on standard input.
        timeout_s: Wall time after which every process of the command is killed.
        limits: Of the fork; None for the backend's.

    Raises:
        SandboxFailed: The sandbox broke.
    """
    async with forked(backend, state, limits=limits) as fork:
        return await fork.run(command, clean=True, env=dict(env), mounts=dict(mounts), stdin=stdin, timeout_s=timeout_s)
