"""Environments of each recovery class that keep a log of what they did: a lost or repeated step is there to be read."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

from errata_protocol.environment import Snapshot
from errata_protocol.errors import SandboxFailed
from errata_server.context import current_session
from errata_server.sandbox.base import Sandbox, SandboxSnapshot

from ..environments import CountAction, CountObservation

Executed = list[int]
"""Tokens of the steps that any instance ran, in order, over all boots: what the world outside saw."""

_Base = Environment[CountAction, CountObservation, State]


class _Log(_Base):
    """Each step adds its token to a list; ``do`` makes it fail."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, executed: Executed) -> None:
        super().__init__()
        self._executed = executed
        self._log: list[int] | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        self._log = []
        return CountObservation(n=seed or 0)

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        return self._took(action, self._before(action))

    def _before(self, action: CountAction) -> list[int]:
        if self._log is None:
            raise RuntimeError("reset first")
        if action.do == "raise":
            raise ValueError("boom")
        self._executed.append(action.n)
        if action.do == "break":
            raise SandboxFailed("the machine broke")
        return self._log

    def _took(self, action: CountAction, log: list[int]) -> CountObservation:
        log.append(action.n)
        return CountObservation(n=action.n, text=" ".join(map(str, log)), reward=1.0)

    @property
    def state(self) -> State:
        return State(episode_id=None, step_count=len(self._log or ()))


class Pinned(_Log):
    """Sync, without snapshots, on a thread of its own."""


class AnyThread(_Log):
    """Sync, without snapshots, on any thread."""

    ANY_THREAD = True


class PinnedSnapshot(_Log):
    """Sync, with snapshots."""

    def snapshot(self) -> Snapshot:
        return Snapshot(" ".join(map(str, self._log or ())).encode())

    def restore(self, snapshot: Snapshot) -> None:
        self._log = [int(n) for n in snapshot.state.split()]


class Async(_Log):
    """Async, without snapshots; a step takes time, or hangs."""

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        return self.reset(seed)

    async def step_async(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        log = self._before(action)
        await asyncio.sleep(0.01)
        if action.do == "hang":
            await asyncio.Event().wait()
        return self._took(action, log)


class Sandboxed(_Base):
    """Async, its log a file of a sandbox."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, executed: Executed) -> None:
        super().__init__()
        self._executed = executed
        self._sandbox: Sandbox | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        raise NotImplementedError

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        raise NotImplementedError

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        await self.aclose()
        backend = current_session().sandboxes
        await backend.start()
        self._sandbox = await backend.open()
        await self._sandbox.write_file("log", b"")
        return CountObservation(n=seed or 0)

    async def step_async(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        if self._sandbox is None:
            raise RuntimeError("reset first")
        if action.do == "raise":
            raise ValueError("boom")
        self._executed.append(action.n)
        before = (await self._sandbox.read_file("log")).decode()
        await asyncio.sleep(0.01)
        await self._sandbox.write_file("log", f"{before} {action.n}".strip().encode())
        if action.do == "break":
            raise SandboxFailed("the machine broke")
        if action.do == "hang":
            await asyncio.Event().wait()
        return CountObservation(n=action.n, text=(await self._sandbox.read_file("log")).decode(), reward=1.0)

    @property
    def state(self) -> State:
        return State(episode_id=None, step_count=0)

    async def snapshot(self) -> Snapshot:
        if self._sandbox is None:
            raise RuntimeError("reset first")
        taken = await self._sandbox.snapshot()
        return Snapshot(taken.shell, (taken.ref,))

    async def restore(self, snapshot: Snapshot) -> None:
        backend = current_session().sandboxes
        await backend.start()
        self._sandbox = await backend.restore(SandboxSnapshot(snapshot.refs[0], snapshot.state))

    async def aclose(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.destroy()
            self._sandbox = None


KINDS: dict[str, tuple[type[_Base], bool]] = {
    "sandboxed": (Sandboxed, False),
    "pinned-snapshot": (PinnedSnapshot, False),
    "pinned-reexecute": (Pinned, True),
    "async-reexecute": (Async, True),
    "pinned-none": (Pinned, False),
    "any-thread-none": (AnyThread, False),
    "async-none": (Async, False),
}
"""Environment class, and whether it is declared deterministic, by a name for traces."""


def factory(kind: str, executed: Executed) -> Callable[[], _Base]:
    """Return what makes an instance."""
    return functools.partial(KINDS[kind][0], executed)  # type: ignore[arg-type]
