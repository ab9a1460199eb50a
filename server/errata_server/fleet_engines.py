"""`FleetEngine`: runs a fleet of ``errata serve`` processes on many machines; `ENGINES` finds the installed ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from errata_os.plugins import PluginGroup


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a fleet is to be.

    Args:
        environments: Targets that every process serves, as for ``errata serve``.
        options: Further options of ``errata serve``.
        nodes: Number of nodes to use; None for all that have room.
        workers: Number of processes on each node.
        data_dir: Directory below which each shard has one of its own; None for the default of each node.
        is_shared: Whether all nodes see the same files in the directory.
        token: Tokens that clients need, as ``ERRATA_TOKEN`` has them; None for none.
        is_insecure: Whether a fleet without a token may be reached from other machines.
        start_s: Longest time until all processes serve, seconds.
    """

    environments: Sequence[str]
    options: Sequence[str] = ()
    nodes: int | None = None
    workers: int = 1
    data_dir: Path | None = None
    is_shared: bool = False
    token: str | None = None
    is_insecure: bool = False
    start_s: float = 300.0


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One member of a fleet.

    Args:
        shard: Name of its data directory; None while it has none yet.
        url: Base URL of its process; None while it has none.
        node: Name of the node that it is on, or was on last.
        state: Whether it serves, as ``GET /fleet`` says it; ``starting`` while it has no shard.
        is_drained: Whether it has ended since it was drained.
        sessions: Sessions that hold an environment instance; None where it is not known.
        steps_s: Steps a second; None where it is not known.
        lag_s: Worst lateness of its event loop in the last minute, seconds; None where it is not known.
        problem: Reason why it does not serve; empty where there is none.
    """

    shard: str | None
    url: str | None
    node: str | None
    state: Literal["up", "draining", "down", "lost", "starting"]
    is_drained: bool = False
    sessions: int | None = None
    steps_s: float | None = None
    lag_s: float | None = None
    problem: str = ""


class FleetEngine(ABC):
    """Runs fleets on one kind of cluster. Each call connects to the cluster that the arguments name.

    All raise `errata_protocol.errors.ErrataError` where the cluster or the fleet is not there, or refuses.
    """

    @abstractmethod
    def up(self, cluster: str, name: str, wanted: Wanted, say: Callable[[str], None]) -> list[ShardStatus]:
        """Start a fleet, and return its members once all of them serve.

        Args:
            cluster: Address of the cluster.
            name: Name of the fleet.
            wanted: Description of the fleet.
            say: Called with each line of progress.
        """

    @abstractmethod
    def status(self, cluster: str, name: str) -> list[ShardStatus]:
        """Return the members of a fleet.

        Args:
            cluster: Address of the cluster.
            name: Name of the fleet.
        """

    @abstractmethod
    def drain(self, cluster: str, name: str, shard: str, wanted: bool) -> None:
        """Have a member end once its sessions have, or serve again.

        Args:
            cluster: Address of the cluster.
            name: Name of the fleet.
            shard: Name of the member's shard.
            wanted: Whether the member is to drain; False undoes that.
        """

    @abstractmethod
    def down(self, cluster: str, name: str, now: bool, say: Callable[[str], None]) -> None:
        """End a fleet; its data directories stay.

        Args:
            cluster: Address of the cluster.
            name: Name of the fleet.
            now: Whether the members end at once; otherwise each ends once its sessions have.
            say: Called with each line of progress.
        """


ENGINES = PluginGroup("errata.fleet_engines", FleetEngine, "engine of fleets")  # type: ignore[type-abstract]
"""The installed engines."""
