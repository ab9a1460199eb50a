"""`RayEngine`: starts, shows, drains and ends fleets on a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import distribution
from typing import Any

from errata_protocol.errors import InvalidRequest, ServiceError
from errata_protocol.install_hint import DISTRIBUTION, install_hint
from errata_server.fleet_engines import FleetEngine, ShardStatus, Wanted

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as missing:
    came_from = distribution(DISTRIBUTION).read_text("direct_url.json")
    raise InvalidRequest(f"Ray is not installed: {install_hint('fleet', came_from)}") from missing

from . import cluster
from .keeper import Plan, ShardKeeper, keeper_name
from .members import Report, State
from .registry import NAMESPACE, Registry, Terms

LOOK_S = 0.5
"""Time between two looks at a fleet that starts or ends, seconds."""

LEASE_S = 10.0
"""Length of a lease of a shared directory, seconds."""

HEAD = "node:__internal_head__"
"""Resource of Ray's head node, with which the cluster ends anyway: the registry is there and dies with no other."""

PLACE_S = 60.0
"""Longest wait for room on the nodes, seconds."""

END_S = 90.0
"""Longest wait for the keepers to end, seconds."""

GIVEN_BY_THE_FLEET = ("--host", "--port", "--data-dir", "--workers", "--token", "--members", "--lease", "--insecure")
"""Options of ``errata serve`` that a keeper gives."""


class RayEngine(FleetEngine):
    """Fleets on Ray: a detached registry actor, and a detached keeper actor for each shard, in a placement group."""

    def up(self, cluster_address: str, name: str, wanted: Wanted, say: Callable[[str], None]) -> list[ShardStatus]:
        """See `FleetEngine.up`."""
        for option in wanted.options:
            if option.partition("=")[0] in GIVEN_BY_THE_FLEET:
                raise InvalidRequest(f"{option} is given by the fleet itself: leave it out")
        cluster.connect(cluster_address)
        self._refuse_second(name)
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= wanted.workers]
        count = len(nodes) if wanted.nodes is None else wanted.nodes
        if not 1 <= count <= len(nodes):
            raise InvalidRequest(
                f"{len(nodes)} nodes of the cluster have {wanted.workers} CPUs or more, one for each worker, and "
                f"{max(1, count)} are wanted: add nodes, or lower --nodes or --workers"
            )
        loopback = all(str(node["NodeManagerAddress"]).startswith("127.") for node in nodes)
        if wanted.token is None and not (wanted.is_insecure or loopback):
            raise InvalidRequest(
                "the processes can be reached from other machines and no token is set: set ERRATA_TOKEN, or give "
                "--insecure"
            )
        say(f"{count} nodes with {wanted.workers} workers each")
        started = time.monotonic()
        group = placement_group([{"CPU": float(wanted.workers)}] * count, "SPREAD", name=name, lifetime="detached")
        try:
            self._start(group, name, wanted, count, started, say)
        except BaseException:
            self._remove(name, count * wanted.workers, group)
            raise
        return self.status(cluster_address, name)

    def _start(
        self, group: Any, name: str, wanted: Wanted, count: int, started: float, say: Callable[[str], None]
    ) -> None:
        if not group.wait(PLACE_S):
            raise ServiceError(
                f"the cluster has had no room for {count} nodes with {wanted.workers} free CPUs each within "
                f"{PLACE_S:.0f} s: other jobs have them (ray status shows which); end those, or lower --nodes"
            )
        slots = count * wanted.workers
        registry = (
            ray.remote(Registry)
            .options(name=cluster.registry_name(name), max_concurrency=1000, resources={HEAD: 0.001}, **_DETACHED)
            .remote(Terms(slots, wanted.is_shared, LEASE_S))
        )
        plan = Plan(
            environments=tuple(wanted.environments),
            options=tuple(wanted.options),
            data_dir=wanted.data_dir,
            is_shared=wanted.is_shared,
            lease_s=LEASE_S,
            token=wanted.token,
            name=name,
        )
        for slot in range(slots):
            ray.remote(ShardKeeper).options(
                name=keeper_name(name, slot),
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, slot % count),
                **{**_DETACHED, "num_cpus": 1},
            ).remote(plan, slot, registry)
        shown = -1
        while True:
            found: list[tuple[State, Report]] = cluster.asked(registry.reports, most_s=wanted.start_s)
            up = sum(state == "up" for state, _ in found)
            if up != shown:
                say(f"{up} of {slots} shards serve")
                shown = up
            if up == slots:
                return
            problems = [report.problem for _, report in found if report.problem]
            if any(problem.startswith("it ended") for problem in problems):
                raise InvalidRequest(f"a server process did not start: {problems[0]}")
            if time.monotonic() - started > wanted.start_s:
                raise ServiceError(
                    f"{slots - up} of {slots} shards do not serve after {wanted.start_s:.0f} s"
                    + (f": {problems[0]}" if problems else "")
                )
            time.sleep(LOOK_S)

    @staticmethod
    def _refuse_second(name: str) -> None:
        try:
            cluster.registry_of(name)
        except InvalidRequest:
            return
        raise InvalidRequest(
            f"the cluster has a fleet {name} already: errata fleet down --ray ends it, --name gives another name"
        )

    def status(self, cluster_address: str, name: str) -> list[ShardStatus]:
        """See `FleetEngine.status`."""
        cluster.connect(cluster_address)
        registry = cluster.registry_of(name)
        found: list[tuple[State, Report]] = cluster.asked(registry.reports)
        _, records = cluster.asked(registry.watch, None, 0.0)
        addresses = {node["NodeID"]: f"{node['NodeManagerAddress']} {node['NodeID'][:8]}" for node in ray.nodes()}
        drained = {one.shard for one in records if one.is_drained and one.state == "down"}
        live = [
            ShardStatus(
                shard=report.shard,
                url=report.url,
                node=addresses.get(report.node, report.node[:8] or None),
                state=state if report.url is not None else "starting",
                is_drained=report.shard in drained,
                sessions=report.sessions,
                steps_s=report.steps_s,
                lag_s=report.lag_s,
                problem=report.problem if state == "down" else "",
            )
            for state, report in found
        ]
        lost = [
            ShardStatus(one.shard, one.url, addresses.get(one.node, one.node[:8]), "lost")
            for one in records
            if one.state == "lost"
        ]
        return [*live, *lost]

    def drain(self, cluster_address: str, name: str, shard: str, wanted: bool) -> None:
        """See `FleetEngine.drain`."""
        others = [one for one in self.status(cluster_address, name) if one.state == "up" and one.shard != shard]
        if wanted and not others:
            raise InvalidRequest(f"{shard} is the last shard that takes new sessions: errata fleet down --ray ends all")
        if not cluster.asked(cluster.registry_of(name).drain, shard, wanted):
            raise InvalidRequest(f"the fleet {name} has no shard {shard}, or it is lost")

    def down(self, cluster_address: str, name: str, now: bool, say: Callable[[str], None]) -> None:
        """See `FleetEngine.down`."""
        cluster.connect(cluster_address)
        registry = cluster.registry_of(name)
        terms: Terms = cluster.asked(registry.terms)
        shown: dict[str | None, int | None] = {}
        while not now:
            left = {
                one.shard: one.sessions
                for one in self.status(cluster_address, name)
                if one.state in ("up", "draining") and not one.is_drained
            }
            if left != shown:
                say(f"shards that serve: {len(left)}; sessions left: {sum(one or 0 for one in left.values())}")
                shown = left
            if not left:
                break
            for shard in left:
                cluster.asked(registry.drain, shard, True)
            time.sleep(LOOK_S)
        self._remove(name, terms.slots, ray.util.get_placement_group(name))
        say("the fleet has ended; its data directories are kept")

    @staticmethod
    def _remove(name: str, slots: int, group: Any) -> None:
        """End the keepers with their processes, then the registry."""
        keepers = _actors([keeper_name(name, slot) for slot in range(slots)])
        if keepers:
            ray.wait([keeper.end.remote() for keeper in keepers], num_returns=len(keepers), timeout=END_S)
        for actor in [*keepers, *_actors([cluster.registry_name(name)])]:
            ray.kill(actor, no_restart=True)
        remove_placement_group(group)


_DETACHED: dict[str, Any] = {
    "namespace": NAMESPACE,
    "lifetime": "detached",
    "num_cpus": 0,
    "max_restarts": -1,
    "max_task_retries": 0,
}


def _actors(names: Sequence[str]) -> list[Any]:
    found = []
    for name in names:
        try:
            found.append(ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:
            continue
    return found
