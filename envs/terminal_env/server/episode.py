"""The part of an environment's state that a snapshot keeps beside the sandbox's layer."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

from errata_protocol.environment import Snapshot, SnapshotRef
from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import SandboxSnapshot

_VERSION = 1


@dataclass(slots=True)
class Episode:
    """One episode of a terminal session.

    Args:
        episode_id: Id given at reset, otherwise a random one.
        task_id: Id of the task; empty for a bare shell.
        seed: Seed of the reset.
        step_count: Number of steps since the reset.
        submitted: ``submit`` was called.
        done: The episode is over.
        cwd: The shell's current directory after the last call.
    """

    episode_id: str
    task_id: str = ""
    seed: int | None = None
    step_count: int = 0
    submitted: bool = False
    done: bool = False
    cwd: str = ""

    def saved(self, sandbox: SandboxSnapshot) -> Snapshot:
        """Return the snapshot of this episode with its files at ``sandbox``."""
        record = {
            "v": _VERSION,
            "episode_id": self.episode_id,
            "task_id": self.task_id,
            "seed": self.seed,
            "step_count": self.step_count,
            "submitted": self.submitted,
            "done": self.done,
            "cwd": self.cwd,
            "ref": [sandbox.ref.kind, sandbox.ref.id, sandbox.ref.digest],
            "shell": base64.b64encode(sandbox.shell).decode("ascii"),
        }
        return Snapshot(json.dumps(record, separators=(",", ":")).encode(), (sandbox.ref,))


def read_snapshot(snapshot: Snapshot) -> tuple[Episode, SandboxSnapshot]:
    """Return what `Episode.saved` put together.

    Raises:
        EnvironmentFailed: The state was not made by this environment.
    """
    try:
        record = json.loads(snapshot.state)
        if record["v"] != _VERSION:
            raise ValueError(f"version {record['v']}, this server reads version {_VERSION}")
        episode = Episode(
            episode_id=record["episode_id"],
            task_id=record["task_id"],
            seed=record["seed"],
            step_count=record["step_count"],
            submitted=record["submitted"],
            done=record["done"],
            cwd=record["cwd"],
        )
        return episode, SandboxSnapshot(SnapshotRef(*record["ref"]), base64.b64decode(record["shell"], validate=True))
    except (ValueError, KeyError, TypeError) as error:
        raise EnvironmentFailed(f"cannot restore a terminal session: unreadable snapshot: {error}") from error
