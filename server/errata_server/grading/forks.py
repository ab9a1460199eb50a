"""Forks of a state: what commands change there is gone afterwards, and the state stays as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

from errata_server.sandbox.base import Backend, CommandResult, Limits, Sandbox, SandboxSnapshot


@asynccontextmanager
async def forked(backend: Backend, state: SandboxSnapshot, *, limits: Limits | None = None) -> AsyncIterator[Sandbox]:
    """Give a fork of a state without its saved shell state; it is destroyed at the end."""
    fork = await backend.restore(SandboxSnapshot(ref=state.ref), limits=limits)
    try:
        yield fork
    finally:
        await fork.destroy()


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
