"""VeRL's agent loop workers, which count the rollouts that were lost, and whose deaths a run survives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Set
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from errata_protocol.errors import ErrataError

from .sampling import TRAINING, VALIDATION, Lost, log


class LostRollouts(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """A worker of VeRL that counts. Its arguments are those of VeRL's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lost: dict[str, Counter[str]] = defaultdict(Counter)

    async def _run_agent_loop(self, *args: Any, trajectory: dict[str, Any], **kwargs: Any) -> Any:
        try:
            return await super()._run_agent_loop(*args, trajectory=trajectory, **kwargs)
        except Exception as error:
            self._lost[VALIDATION if trajectory["validate"] else TRAINING][reason_of(error)] += 1
            raise

    async def take_lost(self) -> dict[str, dict[str, int]]:
        """Return how many rollouts were lost since the last call, by partition and by reason."""
        lost, self._lost = self._lost, defaultdict(Counter)
        return {partition: dict(reasons) for partition, reasons in lost.items()}


@dataclass(frozen=True, slots=True)
class _Sent:
    """Where a prompt is played.

    Attributes:
        place: Place of its worker among the workers.
        rollouts: Number of its rollouts.
    """

    place: int
    rollouts: int


class ErrataAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """VeRL's manager, whose workers count, and are replaced when they die. Its arguments are those of VeRL's."""

    agent_loop_workers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(LostRollouts)
        self._sent: dict[str, _Sent] = {}
        self._asked: dict[Any, tuple[int, Any]] = {}
        self._found = Lost()

    def generate_sequences(self, prompts: Any) -> None:
        """Send prompts to the workers without waiting for their rollouts. A worker that died is replaced before.

        Args:
            prompts: Batch of the training or of the validation data set.

        Raises:
            RayActorError: A worker that was begun in the place of a dead one died as well.
        """
        chunks = prompts.chunk(len(self.agent_loop_workers))
        calls = [
            worker.generate_sequences.remote(chunk)
            for worker, chunk in zip(self.agent_loop_workers, chunks, strict=False)
        ]
        numbers = self._rollouts_of(prompts)
        first = 0
        for place, (call, chunk) in enumerate(zip(calls, chunks, strict=True)):
            try:
                ray.get(call)
            except RayActorError as error:
                if not _is_dead(error):
                    raise
                self._replace(place, error)
                ray.get(self.agent_loop_workers[place].generate_sequences.remote(chunk))
            for uid, rollouts in numbers[first : first + len(chunk)]:
                self._sent[uid] = _Sent(place, rollouts)
            first += len(chunk)

    def check_workers(self, *, wait_s: float = 1.0, fresh: bool = False) -> Lost:
        """Return what was lost since the last call. A worker that died is replaced.

        A worker that does not answer in time is busy, not dead: its answer counts in a later call.

        Args:
            wait_s: Longest wait for the answers of all workers, in seconds.
            fresh: Whether workers are asked that have not answered an earlier call; if not, only that answer is
                awaited.
        """
        for place, worker in enumerate(self.agent_loop_workers):
            if fresh or not any(asked is worker for _, asked in self._asked.values()):
                self._asked[worker.take_lost.remote()] = (place, worker)
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=wait_s)
        for answer in answered:
            place, worker = self._asked.pop(answer)
            try:
                self._found.add(ray.get(answer))
            except RayActorError as error:
                if _is_dead(error) and self.agent_loop_workers[place] is worker:
                    self._replace(place, error)
        found, self._found = self._found, Lost()
        return found

    def keep(self, uids: Set[str]) -> None:
        """Forget where all prompts are played but some.

        Args:
            uids: Prompts that are still played.
        """
        self._sent = {uid: sent for uid, sent in self._sent.items() if uid in uids}

    def _rollouts_of(self, prompts: Any) -> list[tuple[str, int]]:
        """Return each prompt's uid and the number of its rollouts, as VeRL's worker will find it."""
        uids = [str(uid) for uid in prompts["uid"]]
        if "__rollout_n__" in prompts:
            return list(zip(uids, map(int, prompts["__rollout_n__"]), strict=True))
        validates = "validate" in prompts and prompts["validate"]
        rollouts = self.rollout_config.val_kwargs.n if validates else self.rollout_config.n
        return [(uid, int(rollouts)) for uid in uids]

    def _replace(self, place: int, error: RayActorError) -> None:
        """Begin a worker in the place of one that died, as VeRL begins them, and note the prompts that it played."""
        prompts = {uid: sent.rollouts for uid, sent in self._sent.items() if sent.place == place}
        log.warning("an agent loop worker died with %d prompts, another one takes its place: %s", len(prompts), error)
        self._sent = {uid: sent for uid, sent in self._sent.items() if uid not in prompts}
        self._found.prompts.update(prompts)
        self._found.workers += 1
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        begun = self.agent_loop_workers_class.options(
            name=f"agent_loop_worker_{place}_{uuid4().hex[:8]}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=nodes[place % len(nodes)], soft=True),
        )
        self.agent_loop_workers[place] = begun.remote(
            self.config, self.llm_client, self.teacher_client, self.reward_loop_worker_handles
        )


def _is_dead(error: RayActorError) -> bool:
    """Return whether an actor is gone for good; one that cannot be reached now may come back."""
    return not isinstance(error, ActorUnavailableError)


def reason_of(error: Exception) -> str:
    """Return the reason to count a lost rollout by: the code of the failure, or the name of the exception's class."""
    if isinstance(error, ErrataError):
        return str(error.details.get("reason") or error.code)
    return type(error).__name__
