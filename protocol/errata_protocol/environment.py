"""What an environment publishes about itself; snapshots; and recovery classes (PROTOCOL B4, E1, E2)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

MAX_STATE_BYTES = 64 * 1024
"""Upper bound of `Snapshot.state`; larger things belong in a sandbox layer and are named by a ref."""


class Recovery(StrEnum):
    """What can be done with a session after a crash of its server."""

    SNAPSHOT = "snapshot"
    """`restore` on a fresh instance continues at the last committed t."""
    REEXECUTE = "reexecute"
    """The journaled requests are run again; semantic digests must match."""
    NONE = "none"
    """The session ends in SESSION_LOST; its episodes stay readable."""


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """A reference to durable data outside the journal that a snapshot needs.

    Args:
        kind: ``"layer"`` (a frozen sandbox layer and its ancestors) or ``"base"`` (a read-only base tree).
        id: Id that the backend gave it, URL-safe.
        digest: Digest of its content and its ancestors', ``sha256:<hex>``; empty if the backend computes none.
    """

    kind: str
    id: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The complete state of a recoverable environment, as one journal row stores it.

    Args:
        state: Opaque to the server, at most `MAX_STATE_BYTES`.
        refs: Data that must be kept as long as the row; garbage collection reads these and never ``state``.

    Raises:
        ValueError: ``state`` is too large.
    """

    state: bytes
    refs: tuple[SnapshotRef, ...] = ()

    def __post_init__(self) -> None:
        if len(self.state) > MAX_STATE_BYTES:
            raise ValueError(
                f"snapshot state is {len(self.state)} bytes, at most {MAX_STATE_BYTES}: "
                "keep large content in files of the sandbox"
            )


@runtime_checkable
class Recoverable(Protocol):
    """An environment with ``snapshot`` and ``restore`` (PROTOCOL E1); both may also be synchronous."""

    async def snapshot(self) -> Snapshot:
        """Return the state after the last mutating call."""
        ...

    async def restore(self, snapshot: Snapshot) -> None:
        """Continue from ``snapshot``; called on a new instance instead of reset."""
        ...


def default_agent_text(observation: Any) -> str:
    """Return canonical JSON of an observation without ``metadata``: the text for agents of an environment without
    its own.

    Args:
        observation: A Pydantic model, or the decoded ``observation`` mapping of a payload.
    """
    data = observation.model_dump(mode="json") if hasattr(observation, "model_dump") else dict(observation)
    data.pop("metadata", None)
    return json.dumps(data, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """What an environment package publishes under the entry point group ``errata.environments``.

    Args:
        name: Mount path, Task API name and the trainer's argument, e.g. ``terminal``.
        factory: ``"module:attribute"`` of a callable that makes one instance; kept as text so that importing the
            spec never imports server code.
        action_cls: The Pydantic action class.
        observation_cls: The Pydantic observation class.
        agent_text: Pure function from an observation (model or decoded mapping) to what the agent reads. It never
            shows a marker or a hint key.
        agent_text_version: Changes whenever the text of any observation would.
        tools: JSON-schema tool descriptions an agent may be given, by name.
        state_cls: ``"module:attribute"`` of the state class, empty for OpenEnv's own.
        sandbox: It runs commands in sandboxes: a server on a machine that has none refuses to start.
        deterministic: The same requests from a reset on, with the same seed, give the same observations: without
            ``snapshot``/``restore`` its sessions are then continued by running them again (`Recovery.REEXECUTE`).
            The environment class can say so itself with ``DETERMINISTIC = True``.
        closing_tool: One of ``tools`` that ends an episode and has it graded, without arguments: a trainer calls
            it for an agent that stopped before its episode was over. None where the episode's rewards are complete
            without.
        call_timeouts_s: How long a call of a tool may take, in seconds, where that can be longer than the server's step
            deadline, as ``{"submit": 14400.0}`` where submissions queue. It is the server's deadline of that call,
            and clients wait as long, whatever their ``message_timeout_s``.
        unusable: ``"module:attribute"`` of a function that returns why parts of what it offers cannot be used, such as
            tasks, by name; empty without one. ``/ready`` says it. The function may read files.
    """

    name: str
    factory: str
    action_cls: type[Any]
    observation_cls: type[Any]
    agent_text: Callable[[Any], str] = default_agent_text
    agent_text_version: str = "1"
    tools: tuple[dict[str, Any], ...] = field(default=())
    state_cls: str = ""
    sandbox: bool = False
    deterministic: bool = False
    closing_tool: str | None = None
    call_timeouts_s: Mapping[str, float] = field(default_factory=dict)
    unusable: str = ""


def tool_of(*names: Any) -> str:
    """Return the tool that an action calls: the first of ``names`` that is a text, else empty.

    Args:
        names: The action's ``tool`` and ``tool_name``.
    """
    return next((name for name in names if isinstance(name, str)), "")
