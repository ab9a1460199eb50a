"""What an environment keeps of an episode beside its sandbox, and the snapshot that both are saved in."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Self

from errata_protocol.environment import Snapshot, SnapshotRef
from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import SandboxSnapshot

_VERSION = 1


@dataclass(slots=True)
class SavedEpisode:
    """Base class of an episode's record. Its fields are saved in their order, and a snapshot that lacks one is refused.

    Attributes:
        ADDED_LATER: Names of fields, each with a default, that snapshots of earlier versions lack.
    """

    ADDED_LATER: ClassVar[frozenset[str]] = frozenset()

    def saved(self, sandbox: SandboxSnapshot) -> Snapshot:
        """Return the snapshot of this episode with its files at ``sandbox``."""
        record = {
            "v": _VERSION,
            **asdict(self),
            "ref": [sandbox.ref.kind, sandbox.ref.id, sandbox.ref.digest],
            "shell": base64.b64encode(sandbox.shell).decode("ascii"),
        }
        return Snapshot(json.dumps(record, separators=(",", ":")).encode(), (sandbox.ref,))

    @classmethod
    def read(cls, snapshot: Snapshot, what: str) -> tuple[Self, SandboxSnapshot]:
        """Return what `saved` put together.

        Args:
            snapshot: The snapshot.
            what: Name of what is restored, for the error message.

        Raises:
            EnvironmentFailed: The state was not made by this environment.
        """
        try:
            record = json.loads(snapshot.state)
            if record["v"] != _VERSION:
                raise ValueError(f"version {record['v']}, this server reads version {_VERSION}")
            names = [item.name for item in fields(cls) if item.name in record or item.name not in cls.ADDED_LATER]
            episode = cls(**{name: record[name] for name in names})
            return episode, SandboxSnapshot(
                SnapshotRef(*record["ref"]), base64.b64decode(record["shell"], validate=True)
            )
        except (ValueError, KeyError, TypeError) as error:
            raise EnvironmentFailed(f"cannot restore {what}: unreadable snapshot: {error}") from error


@dataclass(slots=True, kw_only=True)
class TaskEpisode(SavedEpisode):
    """One episode on a task.

    Args:
        episode_id: Name of the episode: the one given at reset, or one made up then.
        task_id: Name of the task; empty for a bare shell.
        seed: Seed of the reset.
        step_count: Number of steps since reset.
        submitted: Whether ``submit`` was called.
        done: Whether the episode is over.
        cwd: The shell's current directory after the last call.
    """

    episode_id: str
    task_id: str
    seed: int | None
    step_count: int = 0
    submitted: bool = False
    done: bool = False
    cwd: str
