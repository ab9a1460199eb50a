"""VeRL's manager of agent loop workers, with tiny workers that die."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest
import ray
from omegaconf import OmegaConf
from ray.exceptions import RayActorError
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

from errata_protocol.errors import SessionLost
from errata_trainer.recipes.verl.sampling import Lost
from errata_trainer.recipes.verl.workers import ErrataAgentLoopManager, LostRollouts

from .cpu_run import Cluster
from .tiny_workers import Prompts, TinyWorker

CONFIG = OmegaConf.create(
    {
        "actor_rollout_ref": {
            "model": {},
            "rollout": {"n": 3, "val_kwargs": {"n": 1}, "agent": {"num_workers": 2}},
        }
    }
)


@pytest.fixture
def manager(cluster: Cluster) -> ErrataAgentLoopManager:
    made = ErrataAgentLoopManager(CONFIG, "client")
    made.agent_loop_workers_class = ray.remote(num_cpus=0)(TinyWorker)
    asyncio.run(made._init_agent_loop_workers())
    return made


def found(manager: ErrataAgentLoopManager) -> Lost:
    """Return what the workers lost, all of which answer or are dead, however long they take."""
    return manager.check_workers(wait_s=600.0, fresh=True)


def kill(worker: Any) -> None:
    """Kill a worker, and wait until it is dead."""
    ray.kill(worker)
    with pytest.raises(RayActorError):
        while True:
            ray.get(worker.be_busy.remote(False))


def test_a_dead_worker_is_replaced_and_its_prompts_are_reported(manager: ErrataAgentLoopManager) -> None:
    manager.generate_sequences(Prompts(uid=["a", "b", "c", "d"]))
    assert found(manager) == Lost(rollouts={"train": Counter({"SESSION_LOST": 4})})
    manager.keep({"a", "c", "d"})
    first, second = manager.agent_loop_workers
    kill(first)
    assert found(manager) == Lost(prompts={"a": 3}, workers=1)
    begun, kept = manager.agent_loop_workers
    assert begun is not first and kept is second
    # The new one has all arguments of VeRL's workers, and plays.
    assert ray.get(begun.be_busy.remote(False)) == 4
    manager.generate_sequences(Prompts(uid=["e"]))
    assert found(manager) == Lost(rollouts={"train": Counter({"SESSION_LOST": 1})})
    kill(begun)
    assert found(manager) == Lost(prompts={"e": 3}, workers=1)


def test_a_worker_that_died_is_replaced_before_it_is_sent_prompts(manager: ErrataAgentLoopManager) -> None:
    manager.generate_sequences(Prompts(uid=["a", "b"], __rollout_n__=[5, 6]))
    found(manager)
    kill(manager.agent_loop_workers[1])
    manager.generate_sequences(Prompts(uid=["c", "d"], validate=True))
    lost = Lost(rollouts={"train": Counter({"SESSION_LOST": 2})}, prompts={"b": 6}, workers=1)
    assert found(manager) == lost
    for worker in manager.agent_loop_workers:
        kill(worker)
    assert found(manager) == Lost(prompts={"a": 5, "c": 1, "d": 1}, workers=2)


def test_a_busy_worker_is_not_a_dead_one_and_its_answer_counts_later(manager: ErrataAgentLoopManager) -> None:
    busy = manager.agent_loop_workers[1]
    found(manager)
    ray.get(busy.be_busy.remote(True))
    manager.generate_sequences(Prompts(uid=["a", "b"]))
    early = manager.check_workers(wait_s=0.0)
    assert early.workers == 0 and not early.prompts
    manager.check_workers(wait_s=0.0)  # asks nothing again of a worker that has not answered
    ray.get(busy.be_busy.remote(False))
    late = found(manager)
    assert manager.agent_loop_workers[1] is busy and not late.prompts
    assert late.rollouts["train"]["SESSION_LOST"] >= 1


def test_rollouts_of_a_batch_of_verl_are_numbered_as_its_worker_does() -> None:
    manager = ErrataAgentLoopManager(CONFIG, "client")
    batch = tu.get_tensordict({"uid": np.array(["a", "b"], dtype=object), "index": np.array([0, 1])})
    assert manager._rollouts_of(batch) == [("a", 3), ("b", 3)]
    tu.assign_non_tensor_data(batch, "validate", True)
    assert manager._rollouts_of(batch) == [("a", 1), ("b", 1)]
    numbered = tu.get_tensordict({"uid": np.array(["a", "b"], dtype=object), "__rollout_n__": np.array([5, 6])})
    assert manager._rollouts_of(numbered) == [("a", 5), ("b", 6)]


def test_a_worker_counts_what_it_loses_by_partition_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(_: Any, error: Exception, trajectory: dict[str, Any]) -> None:
        raise error

    base = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    monkeypatch.setattr(base, "__init__", lambda _: None)
    monkeypatch.setattr(base, "_run_agent_loop", failing)

    async def counted() -> list[dict[str, dict[str, int]]]:
        worker = LostRollouts()
        for error, validate in [(SessionLost("gone", reason="DISK_FULL"), False), (KeyError("x"), True)]:
            with pytest.raises(type(error)):
                await worker._run_agent_loop(error, trajectory={"validate": validate})
        return [await worker.take_lost(), await worker.take_lost()]

    assert asyncio.run(counted()) == [{"train": {"DISK_FULL": 1}, "val": {"KeyError": 1}}, {}]
