"""VeRL's agent loop workers, which count the rollouts that were lost, by reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ray
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from errata_protocol.errors import ErrataError


class LostRollouts(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """A worker of VeRL that counts. Its arguments are those of VeRL's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lost: Counter[str] = Counter()

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super()._run_agent_loop(*args, **kwargs)
        except Exception as error:
            self._lost[reason_of(error)] += 1
            raise

    async def take_lost(self) -> dict[str, int]:
        """Return how many rollouts were lost since the last call, by reason."""
        lost, self._lost = self._lost, Counter()
        return dict(lost)


class ErrataAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """VeRL's manager, with workers that count. Its arguments are those of VeRL's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(LostRollouts)

    def take_lost(self) -> Counter[str]:
        """Return how many rollouts of all workers were lost since the last call, by reason."""
        lost: Counter[str] = Counter()
        for of_worker in ray.get([worker.take_lost.remote() for worker in self.agent_loop_workers]):
            lost.update(of_worker)
        return lost


def reason_of(error: Exception) -> str:
    """Return the reason to count a lost rollout by: the code of the failure, or the name of the exception's class."""
    if isinstance(error, ErrataError):
        return str(error.details.get("reason") or error.code)
    return type(error).__name__
