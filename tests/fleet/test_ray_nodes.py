"""The death of a node beneath thousands of held sessions: what is lost is said, and nothing acts twice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from errata_ray.demo import Counted, play

if TYPE_CHECKING:
    from errata_ray.demo import SimulatedCluster

TARGET = "errata_environment.fleet_demo:CountEnvironment"
SESSIONS = 10_000
STEPS = 3


@pytest.mark.parametrize("is_shared", [False, True], ids=["local", "shared"])
def test_a_node_dies_beneath_ten_thousand_sessions(cluster: SimulatedCluster, tmp_path: Path, is_shared: bool) -> None:
    counted = Counted(SESSIONS, STEPS, is_shared)
    try:
        play(cluster, TARGET, tmp_path, counted, print)
    finally:
        cluster.add()
    assert not counted.failures
    assert len(counted.by_shard) == 2 and min(counted.by_shard.values()) > SESSIONS // 3, "both nodes had many"
    lost = 0 if is_shared else counted.by_shard[counted.killed]
    assert (counted.lost, counted.complete) == (lost, SESSIONS - lost)
    assert 0 < counted.killed_after < SESSIONS * STEPS
