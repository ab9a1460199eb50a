"""`SandboxedEnvironment`: base class of environments that play an episode in one sandbox."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State

from errata_protocol.environment import Snapshot
from errata_protocol.errors import InvalidRequest, NoReset
from errata_protocol.markers import Detection
from errata_server.sandbox.base import Backend, Sandbox, SandboxSnapshot

from .tool_calls import Answer, Fault, answered, fault_of


class SandboxedEpisode(Protocol):
    """What an environment keeps of an episode beside its sandbox; `errata_environment.episodes` has base classes."""

    episode_id: str
    step_count: int
    done: bool
    cwd: str

    def saved(self, sandbox: SandboxSnapshot) -> Snapshot:
        """Return the snapshot of this episode with its files at ``sandbox``."""


ActT = TypeVar("ActT", bound=Action)
ObsT = TypeVar("ObsT", bound=Observation)
StateT = TypeVar("StateT", bound=State)
EpisodeT = TypeVar("EpisodeT", bound=SandboxedEpisode)
T = TypeVar("T")


class SandboxedEnvironment(Environment[ActT, ObsT, StateT], Generic[ActT, ObsT, StateT, EpisodeT]):  # type: ignore[misc]
    """An environment whose session is one sandbox, in which an agent calls tools.

    A subclass opens a sandbox in `reset_async` and `restore` and gives it to `_begin`; `_use` runs a tool, and
    `_observation` makes an observation of what it did. Commands that fail are marked observations. A sandbox that fails
    raises `errata_protocol.errors.SandboxFailed` or `SandboxUnavailable`: never an observation, never a reward.

    Args:
        **arguments: Arguments of `Environment`.

    Attributes:
        NAME: Name of the environment.
        DESCRIPTION: One sentence about it.
        AUTHOR: Its authors.
        VERSION: Its version.
        README: File with its description for people.
        TOOLS: Names of its tools.
    """

    NAME: ClassVar[str]
    DESCRIPTION: ClassVar[str]
    AUTHOR: ClassVar[str] = ""
    VERSION: ClassVar[str] = "1.0.0"
    README: ClassVar[Path]
    TOOLS: ClassVar[Collection[str]]
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
    async def _use(self, action: ActT, bound_s: float | None) -> Answer:
        """Run a tool whose arguments were checked, and return the fields of its observation.

        Args:
            action: The tool and its arguments.
            bound_s: Upper bound for a command's time limit, in seconds.
        """

    @abstractmethod
    def _observation(self, action: ActT, values: dict[str, Any], seconds: float) -> ObsT:
        """Return the observation of a call, and count the call in the episode.

        Args:
            action: The action of the call.
            values: Fields that the tool returned.
            seconds: Wall time of the call, seconds.
        """

    def _fault(self, action: ActT) -> Fault | None:
        """Return what is wrong with the arguments of an action; None if nothing is."""
        return fault_of(action)

    async def step_async(self, action: ActT, timeout_s: float | None = None, **kwargs: Any) -> ObsT:
        """Call one tool.

        Args:
            action: The tool and its arguments.
            timeout_s: Upper bound for a command's time limit, in seconds.
            **kwargs: Not used.

        Raises:
            NoReset: There was no reset.
            InvalidRequest: The episode is over.
            SandboxFailed: The sandbox broke; the step did not happen.
            EnvironmentFailed: What grades the episode is broken.
        """
        del kwargs
        episode, _ = self._live()
        if episode.done:
            raise InvalidRequest("the episode is over: reset to start another")
        started = time.monotonic()
        values, detection = await answered(action, self.TOOLS, self._fault, lambda it: self._use(it, timeout_s))
        return self._sent(self._observation(action, values, time.monotonic() - started), detection)

    def _sent(self, observation: ObsT, detection: Detection | None = None) -> ObsT:
        """Return an observation as it is sent: with its markers, and transformed where OpenEnv was given a transform.

        Args:
            observation: The observation.
            detection: Result of the detection on a step; None at reset.
        """
        marked = observation if detection is None else observation.with_detection(detection)
        sent: ObsT = self._apply_transform(marked)
        return sent

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

    async def forked(self, episode_id: str) -> None:
        """Become a child episode that was forked here: its own name, and no steps yet (PROTOCOL D11)."""
        episode, _ = self._live()
        episode.episode_id, episode.step_count = episode_id, 0

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(
            name=self.NAME,
            description=self.DESCRIPTION,
            version=self.VERSION,
            author=self.AUTHOR,
            readme_content=self.README.read_text("utf-8"),
        )

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

    async def _begin(self, backend: Backend, sandbox: Sandbox, episode: EpisodeT) -> None:
        """Destroy the sandbox of the last episode, if there is one, and continue with another episode.

        Args:
            backend: The backend that holds the sandbox.
            sandbox: The sandbox of the episode.
            episode: The episode.
        """
        await self._release()
        self._backend, self._sandbox, self._episode = backend, sandbox, episode

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
