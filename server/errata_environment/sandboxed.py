"""`SandboxedEnvironment`: base class of environments that play an episode in one sandbox."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine
from typing import Any, Generic, Protocol, TypeVar

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from errata_protocol.environment import Snapshot
from errata_protocol.errors import InvalidRequest, NoReset
from errata_server.sandbox.base import Backend, Sandbox, SandboxSnapshot


class SandboxedEpisode(Protocol):
    """What an environment keeps of an episode beside its sandbox."""

    def saved(self, sandbox: SandboxSnapshot) -> Snapshot:
        """Return the snapshot of this episode with its files at ``sandbox``."""


ActT = TypeVar("ActT", bound=Action)
ObsT = TypeVar("ObsT", bound=Observation)
StateT = TypeVar("StateT", bound=State)
EpisodeT = TypeVar("EpisodeT", bound=SandboxedEpisode)
T = TypeVar("T")


class SandboxedEnvironment(Environment[ActT, ObsT, StateT], Generic[ActT, ObsT, StateT, EpisodeT]):  # type: ignore[misc]
    """An environment whose session is one sandbox. A subclass fills ``_sandbox`` and ``_episode`` at reset and restore.

    Args:
        **arguments: Of `Environment`.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._backend: Backend | None = None
        self._sandbox: Sandbox | None = None
        self._episode: EpisodeT | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> ObsT:
        """Start an episode."""

    @abstractmethod
    async def step_async(self, action: ActT, timeout_s: float | None = None, **kwargs: Any) -> ObsT:
        """Call one tool."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> ObsT:
        """Run `reset_async` to its end; for code outside of an event loop."""
        return _finish(self.reset_async(seed=seed, episode_id=episode_id, **kwargs))

    def step(self, action: ActT, timeout_s: float | None = None, **kwargs: Any) -> ObsT:
        """Run `step_async` to its end; for code outside of an event loop."""
        return _finish(self.step_async(action, timeout_s, **kwargs))

    async def snapshot(self) -> Snapshot:
        """Return the session after its last call, as one journal row keeps it (PROTOCOL E1).

        Raises:
            NoReset: There is nothing to keep before the first reset.
        """
        episode, sandbox = self._live()
        return episode.saved(await sandbox.snapshot())

    async def aclose(self) -> None:
        """End the session and drop what no snapshot names."""
        await self._release()
        self._episode = None

    def close(self) -> None:
        """Do what `aclose` does; inside an event loop it is only begun here, and the loop finishes it."""
        sandbox, self._sandbox, self._episode = self._sandbox, None, None
        if sandbox is None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(sandbox.destroy())
            return
        closing = loop.create_task(sandbox.destroy())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _live(self) -> tuple[EpisodeT, Sandbox]:
        """Return the episode and its sandbox.

        Raises:
            NoReset: There are none.
        """
        if self._episode is None or self._sandbox is None:
            raise NoReset("no episode is running: reset first")
        return self._episode, self._sandbox

    async def _release(self) -> None:
        """Destroy the sandbox, if there is one."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.destroy()


def check_reset(known: str, unknown: dict[str, Any], **numbers: int | None) -> None:
    """Refuse arguments of a reset that are misspelt, or no whole numbers.

    Args:
        known: The arguments that there are, for the message.
        unknown: Arguments by names that the environment does not have.
        **numbers: Arguments that have to be whole numbers or None.

    Raises:
        InvalidRequest: An argument is not known, or no whole number.
    """
    if unknown:
        raise InvalidRequest(f"reset takes {known}, not {', '.join(sorted(unknown))}")
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidRequest(f"reset: {name} is a whole number, not {value!r}")


def _finish(call: Coroutine[Any, Any, T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(call)
    call.close()
    raise RuntimeError("inside an event loop await reset_async and step_async")
