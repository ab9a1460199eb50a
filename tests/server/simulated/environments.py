"""Environments of each recovery class that keep a log of what they did: a lost or repeated step is there to be read."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

from errata_protocol.environment import Snapshot
from errata_protocol.errors import SandboxFailed
from errata_server.environments.context import current_session
from errata_server.sandbox.base import Sandbox, SandboxSnapshot

from ..environments import CountAction, CountObservation

Executed = list[int]
"""Tokens of the steps that any instance ran, in order, over all boots: what the world outside saw."""

_Base = Environment[CountAction, CountObservation, State]


class Tools:
    """An environment's MCP client, always connected, with one tool: it does what a step does.

    Args:
        call: What it does.
    """

    LISTED: ClassVar = [{"name": "log", "description": "Add n.", "inputSchema": {"type": "object"}}]

    def __init__(self, call: Callable[[CountAction], Awaitable[CountObservation]]) -> None:
        self._call = call

    def is_connected(self) -> bool:
        """Say so."""
        return True

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the tool."""
        return self.LISTED

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call it."""
        if name != "log":
            raise LookupError(f"no tool {name}")
        done = await self._call(CountAction(**arguments))
        return {"n": done.n, "text": done.text}


class _Log(_Base):
    """Each step adds its token to a list; ``do`` makes it fail."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, executed: Executed, *, tools: bool = False) -> None:
        super().__init__()
        self._executed = executed
        self._log: list[int] | None = None
        if tools:
            self.mcp_client = Tools(self._call)

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
        text = " ".join(map(str, log))
        return CountObservation(n=action.n, text=text, reward=1.0, done=action.do == "finish")

    async def _call(self, action: CountAction) -> CountObservation:
        """A tools/call. It needs no reset: upstream's MCP sessions have none."""
        self._log = self._log or []
        log = _Log._before(self, action)  # no step, and so nothing to be judged
        await asyncio.sleep(0.01)
        if action.do == "hang":
            await asyncio.Event().wait()
        return self._took(action, log)

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


class _Judged(_Log):
    """Whoever says that the episode is finished gets a reward for each step of it: the step's own token.

    A step is judged before it is done: one that fails was judged too, and is no delivery.
    """

    def __init__(self, executed: Executed, *, tools: bool = False) -> None:
        super().__init__(executed, tools=tools)
        self.trajectory: list[int] = []

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> CountObservation:
        self.trajectory = []
        return super().reset(seed, episode_id, **more)

    def compute_step_rewards(self) -> list[float]:
        """Return them."""
        return [float(token) for token in self.trajectory]

    def _before(self, action: CountAction) -> list[int]:
        self.trajectory.append(action.n)
        return super()._before(action)


class PinnedJudged(_Judged, Pinned):
    """Sync, without snapshots, and with a reward for each step."""


class AsyncJudged(_Judged, Async):
    """Async, likewise."""


class PinnedSnapshotJudged(_Judged, PinnedSnapshot):
    """Sync, with snapshots that hold what was judged."""

    def snapshot(self) -> Snapshot:
        return Snapshot(super().snapshot().state + b"|" + " ".join(map(str, self.trajectory)).encode())

    def restore(self, snapshot: Snapshot) -> None:
        log, _, judged = snapshot.state.partition(b"|")
        super().restore(Snapshot(log))
        self.trajectory = [int(n) for n in judged.split()]


class Sandboxed(_Base):
    """Async, its log a file of a sandbox."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, executed: Executed, *, tools: bool = False) -> None:
        super().__init__()
        self._executed = executed
        self._sandbox: Sandbox | None = None
        if tools:
            self.mcp_client = Tools(self._call)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        raise NotImplementedError

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        raise NotImplementedError

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        await self.aclose()
        self._sandbox = await self._open()
        return CountObservation(n=seed or 0)

    async def _open(self) -> Sandbox:
        backend = current_session().sandboxes
        await backend.start()
        sandbox = await backend.open()
        await sandbox.write_file("log", b"")
        return sandbox

    async def _call(self, action: CountAction) -> CountObservation:
        if self._sandbox is None:
            self._sandbox = await self._open()
        return await self.step_async(action)

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

JUDGED: dict[type[_Base], type[_Base]] = {
    PinnedSnapshot: PinnedSnapshotJudged,
    Pinned: PinnedJudged,
    Async: AsyncJudged,
}
"""Likewise with a reward for each step."""


def factory(env: type[_Base], executed: Executed, *, tools: bool) -> Callable[[], _Base]:
    """Return what makes an instance."""
    return functools.partial(env, executed, tools=tools)  # type: ignore[call-arg] # all of `KINDS` take them
