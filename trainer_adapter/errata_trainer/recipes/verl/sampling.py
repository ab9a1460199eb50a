"""`WatchedBuffer`: what surrounds VeRL's replay buffer, so that a run neither hangs nor goes on without rollouts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import transfer_queue as tq

from errata_protocol.errors import ServiceError

TRAINING = "train"
"""Name of the partition of VeRL's transfer queue with the rollouts of training."""

VALIDATION = "val"
"""Name of the partition with the rollouts of a validation."""

LOST_BATCHES = 3
"""Number of batches in a row of which no rollout could be used, until training stops and says so."""

WORKER_DIED = "WORKER_DIED"
"""Reason to count a rollout by whose worker process died."""

log = logging.getLogger("errata.trainer")


@dataclass(slots=True)
class Lost:
    """What agent loop workers lost.

    Attributes:
        rollouts: Number of rollouts that failed, by partition and by reason.
        prompts: Number of rollouts of each prompt, by its uid, whose worker died.
        workers: Number of workers that died.
    """

    rollouts: dict[str, Counter[str]] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    workers: int = 0

    def add(self, rollouts: Mapping[str, Mapping[str, int]]) -> None:
        """Add rollouts that failed, by partition and by reason."""
        for partition, reasons in rollouts.items():
            self.rollouts.setdefault(partition, Counter()).update(reasons)


class Workers(Protocol):
    """The agent loop workers: `errata_trainer.recipes.verl.workers.ErrataAgentLoopManager`."""

    def check_workers(self, *, wait_s: float = 1.0, fresh: bool = False) -> Lost:
        """Return what was lost since the last call. A worker that died is replaced."""
        ...

    def keep(self, uids: Set[str]) -> None:
        """Forget where all prompts are played but some."""
        ...


class WatchedBuffer:
    """Takes the place of methods of one of VeRL's replay buffers, to see to what is lost while it waits for rollouts.

    VeRL's synchronous buffer fails where each rollout of a batch was lost, and its other one replaces such groups for
    ever; neither sees that a worker died. Here such a batch is replaced, the prompts of a dead worker fail, and a
    run that only loses rollouts ends.

    Args:
        buffer: VeRL's replay buffer; its methods are replaced.
        workers: Function that returns the agent loop workers, which are made after the buffer.
        resubmit: Function that submits another batch of training.
        sampled: Function that is given each batch of training.
        count_lost: Function that counts lost rollouts of training, by reason.
        count: Function that records a metric of a batch, by its name.
        batch_rollouts: Number of rollouts of a step.
    """

    def __init__(
        self,
        buffer: Any,
        *,
        workers: Callable[[], Workers],
        resubmit: Callable[[], None],
        sampled: Callable[[Any], None],
        count_lost: Callable[[Counter[str]], None],
        count: Callable[[str, float], None],
        batch_rollouts: int,
    ) -> None:
        self._buffer, self._workers, self._resubmit, self._sampled = buffer, workers, resubmit, sampled
        self._count_lost, self._count, self._batch_rollouts = count_lost, count, batch_rollouts
        self._lost: Counter[str] = Counter()  # of training, since a group was finished or a batch was sampled
        self._lost_in_validation: Counter[str] = Counter()
        self._lost_batches = self._lost_workers = 0
        self._finished: set[str] = set()
        self._sample, self._wait = buffer.sample, buffer._wait_for_next_poll
        self._sync = buffer._sync_metadata_from_transfer_queue
        buffer.sample, buffer._wait_for_next_poll = self.sample, self._wait_for_next_poll
        buffer._sync_metadata_from_transfer_queue = self._sync_metadata

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        """Return a batch and VeRL's metrics of it.

        Args:
            global_steps: Number of the step.
            partition_id: Partition of the transfer queue.
            batch_size: Number of prompts.

        Raises:
            ServiceError: No group of `LOST_BATCHES` batches in a row was finished; or every rollout of a batch of
                validation was lost.
        """
        if partition_id == VALIDATION:
            return self._validation(global_steps, batch_size)
        while True:
            try:
                batch, metrics = self._sample(
                    global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
                )
                break
            except RuntimeError:
                barren = self._barren(partition_id)
                if len(barren) < batch_size:
                    raise
            self._check(fresh=True)
            self._lost_batches += 1
            if self._lost_batches >= LOST_BATCHES:
                raise self._failure()
            log.warning("every rollout of the batch was lost (%s): another one is played", _named(self._lost))
            self._buffer._clear_groups(partition_id, barren)
            self._resubmit()
        self._check(fresh=True)
        self._count("batches/lost", self._lost_batches)
        self._count("workers/lost", self._lost_workers)
        self._lost_batches = self._lost_workers = 0
        self._lost.clear()
        self._sampled(batch)
        return batch, metrics

    def _validation(self, global_steps: int, batch_size: int) -> Any:
        self._lost_in_validation.clear()
        batch, metrics = self._sample(global_steps=global_steps, partition_id=VALIDATION, batch_size=batch_size)
        self._check(fresh=True)
        reasons = _named(self._lost_in_validation)
        if not batch.keys:
            raise ServiceError(f"every rollout of a batch of the validation was lost ({reasons}): look at the server")
        if reasons:
            log.warning("the validation goes on without rollouts that were lost (%s)", reasons)
        return batch, metrics

    def _barren(self, partition_id: str) -> set[str]:
        """Return the prompts that have ended without a rollout."""
        buffer = self._buffer
        ended: set[str] = buffer.finished_keys[partition_id] | buffer.failure_keys[partition_id]
        return ended - {_uid_of(key) for key in buffer.partitions[partition_id]}

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        """Wait as VeRL does, then see to the workers.

        Raises:
            ServiceError: No group of `LOST_BATCHES` batches in a row was finished.
        """
        time: float = self._wait(partition_id, last_debug_time)
        self._check()
        if self._lost.total() >= LOST_BATCHES * self._batch_rollouts:
            raise self._failure()
        return time

    def _sync_metadata(self) -> None:
        """Read the transfer queue as VeRL does, then see which groups were finished, and which are still played."""
        self._sync()
        finished: set[str] = set(self._buffer.finished_keys[TRAINING])
        if finished - self._finished:
            self._lost.clear()
        self._finished = finished
        self._workers().keep({uid for partition in self._partitions() for uid in self._played(partition)})

    def _check(self, *, fresh: bool = False) -> None:
        """Count what the workers lost, and have the prompts fail whose worker died.

        Args:
            fresh: Whether each worker is asked anew, and has longer to answer.
        """
        found = self._workers().check_workers(wait_s=5.0 if fresh else 1.0, fresh=fresh)
        for partition, reasons in found.rollouts.items():
            self._note(partition, reasons)
        self._lost_workers += found.workers
        if found.prompts:
            self._sync_metadata()
            for partition in self._partitions():
                self._give_up(partition, found.prompts)

    def _give_up(self, partition: str, prompts: Mapping[str, int]) -> None:
        """Have those of a partition's prompts fail that are still played, and count the rollouts that they lack.

        Args:
            partition: Partition of the transfer queue.
            prompts: Number of rollouts of each prompt, by its uid.
        """
        uids = sorted(self._played(partition) & prompts.keys())
        if not uids:
            return
        tags = {key: tag for key, tag in self._buffer.partitions[partition].items() if _uid_of(key) in uids}
        torn = [key for key, tag in tags.items() if tag.get("status") != "success"]  # the worker died as it put them
        if torn:
            tq.kv_clear(keys=torn, partition_id=partition)
        played = {key.rsplit("_", 1)[0] for key in tags.keys() - set(torn)}
        count = sum(prompts[uid] for uid in uids) - len(played)
        self._note(partition, Counter({WORKER_DIED: count} if count > 0 else {}))
        tq.kv_batch_put(keys=uids, partition_id=partition, tags=[{"status": "failure"} for _ in uids])

    def _note(self, partition: str, reasons: Counter[str]) -> None:
        if partition == VALIDATION:
            self._lost_in_validation.update(reasons)
        else:
            self._lost.update(reasons)
            self._count_lost(reasons)

    def _partitions(self) -> list[str]:
        return sorted({*self._buffer.pending_keys, *self._buffer.running_keys})

    def _played(self, partition: str) -> set[str]:
        played: set[str] = self._buffer.pending_keys[partition] | self._buffer.running_keys[partition]
        return played

    def _failure(self) -> ServiceError:
        return ServiceError(
            f"no group of rollouts was finished in {LOST_BATCHES} batches in a row, {self._lost.total()} rollouts were "
            f"lost ({_named(self._lost)}): look at the server, then resume from the last checkpoint"
        )


def _named(reasons: Counter[str]) -> str:
    return ", ".join(f"{number} by {reason}" for reason, number in reasons.most_common())


def _uid_of(key: str) -> str:
    """Return the prompt of a rollout's key, as VeRL finds it."""
    return key.split("_")[0]
