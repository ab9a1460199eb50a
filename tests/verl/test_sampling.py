"""The watch over VeRL's replay buffers: both of them, with a transfer queue in this process and played workers."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Set
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from errata_protocol.errors import ServiceError
from errata_trainer.recipes.verl import sampling
from errata_trainer.recipes.verl.sampling import LOST_BATCHES, Lost, WatchedBuffer

PROMPTS, ROLLOUTS = 2, 2
"""Size of a batch."""

Fate = Callable[["Run", str], None]
"""What becomes of a prompt that is played."""


class Queue:
    """In the place of the module of VeRL's transfer queue: keys with tags, by partition."""

    def __init__(self) -> None:
        self.partitions: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)

    def kv_list(self) -> dict[str, dict[str, dict[str, Any]]]:
        return {name: {key: dict(tag) for key, tag in keys.items()} for name, keys in self.partitions.items()}

    def kv_batch_put(self, *, keys: list[str], partition_id: str, tags: list[dict[str, Any]]) -> None:
        for key, tag in zip(keys, tags, strict=True):
            self.partitions[partition_id].setdefault(key, {}).update(tag)

    def kv_clear(self, *, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.partitions[partition_id].pop(key, None)


class Run:
    """A trainer and its workers, which play what was submitted in each poll.

    Args:
        queue: The transfer queue.
        buffer: VeRL's class of buffers.
        fates: Fate of each prompt, in the order of their submission; the last one is that of all others.
        **options: Other options of the buffer.
    """

    def __init__(self, queue: Queue, buffer: type[ReplayBuffer], *fates: Fate, **options: Any) -> None:
        self.queue, self._fates = queue, deque(fates)
        self.found = Lost()
        self.submitted: list[str] = []
        self.kept: list[set[str]] = []
        self.batches: list[list[str]] = []
        self.lost: Counter[str] = Counter()
        self.metrics: list[tuple[str, float]] = []
        self.checks = 0
        self.is_busy = False
        self._playing: list[tuple[str, str]] = []
        self.buffer = buffer(
            trainer_mode="sync" if buffer is ReplayBuffer else "separate_async",
            trainer_config=OmegaConf.create({}),
            max_off_policy_threshold=None,
            max_off_policy_strategy="drop",
            sampler_kwargs=OmegaConf.create({}),
            poll_interval=0.0,
            refill_fn=self.submit,
            gen_batch_size=1,
            **options,
        )
        WatchedBuffer(
            self.buffer,
            workers=lambda: self,
            resubmit=lambda: self.submit(PROMPTS),
            sampled=lambda batch: self.batches.append(batch.keys),
            count_lost=self.lost.update,
            count=lambda name, value: self.metrics.append((name, value)),
            batch_rollouts=PROMPTS * ROLLOUTS,
        )

    def submit(self, prompts: int, partition: str = "train") -> None:
        for _ in range(prompts):
            uid = f"p{len(self.submitted)}"
            self.submitted.append(uid)
            self.tag(uid, partition, is_prompt=True, status="pending", global_steps=1)
            self._playing.append((partition, uid))

    def tag(self, key: str, partition: str = "train", **tag: Any) -> None:
        self.queue.kv_batch_put(keys=[key], partition_id=partition, tags=[tag])

    def sample(self, partition: str = "train") -> Any:
        return self.buffer.sample(global_steps=1, partition_id=partition, batch_size=PROMPTS)

    # Workers

    def check_workers(self, *, wait_s: float = 1.0, fresh: bool = False) -> Lost:
        self.checks += 1
        assert self.checks < 1000, "the run hangs"
        playing, self._playing = self._playing, []
        for self.partition, uid in playing:
            fate = self._fates[0] if len(self._fates) == 1 else self._fates.popleft()
            fate(self, uid)
        if self.is_busy and not fresh:
            return Lost()
        found, self.found = self.found, Lost()
        return found

    def keep(self, uids: Set[str]) -> None:
        self.kept.append(set(uids))

    def put(self, uid: str, rollouts: int) -> None:
        for number in range(rollouts):
            self.tag(f"{uid}_{number}_0", self.partition, status="success")

    def lose(self, rollouts: int) -> None:
        self.found.add({self.partition: {"SESSION_LOST": rollouts}})


def finished(run: Run, uid: str) -> None:
    run.put(uid, ROLLOUTS)
    run.tag(uid, run.partition, status="finished")


def lost(run: Run, uid: str) -> None:
    run.lose(ROLLOUTS)
    run.tag(uid, run.partition, status="failure")


def half_lost(run: Run, uid: str) -> None:
    run.put(uid, 1)
    run.lose(ROLLOUTS - 1)
    run.tag(uid, run.partition, status="failure")


def dead(run: Run, uid: str) -> None:
    """One rollout was finished and one is being put when the worker dies."""
    run.put(uid, 1)
    run.tag(f"{uid}_1_0", run.partition)
    run.tag(uid, run.partition, status="running")
    run.found.prompts[uid] = ROLLOUTS
    run.found.workers = 1


def later(run: Run, uid: str) -> None:
    """The prompt is played in another poll."""
    run.tag(uid, run.partition, status="running")
    run._playing.append((run.partition, uid))


def finished_before_death(run: Run, uid: str) -> None:
    finished(run, uid)
    run.found.prompts[uid] = ROLLOUTS
    run.found.workers = 1


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    made = Queue()
    for module in (replay_buffer, sampling):
        monkeypatch.setattr(module, "tq", made)
    yield made


def test_a_batch_without_a_rollout_is_replaced(queue: Queue) -> None:
    run = Run(queue, ReplayBuffer, *[lost] * PROMPTS, half_lost, finished)
    run.submit(PROMPTS)
    batch, _ = run.sample()
    assert batch.keys == ["p2_0_0", "p3_0_0", "p3_1_0"] and run.batches == [batch.keys]
    assert run.lost == {"SESSION_LOST": 5}
    assert run.metrics == [("batches/lost", 1), ("workers/lost", 0)]
    assert not queue.partitions["train"].keys() & {"p0", "p1"}


def test_only_lost_batches_in_a_row_end_a_run(queue: Queue) -> None:
    few = [lost] * PROMPTS * (LOST_BATCHES - 1)
    run = Run(queue, ReplayBuffer, *few, finished, finished, *few, finished)
    for _ in range(2):
        run.submit(PROMPTS)
        assert len(run.sample()[0].keys) == PROMPTS * ROLLOUTS
    assert [value for name, value in run.metrics if name == "batches/lost"] == [LOST_BATCHES - 1] * 2


def test_three_lost_batches_end_a_run_and_name_the_reasons(queue: Queue) -> None:
    run = Run(queue, ReplayBuffer, lost)
    run.submit(PROMPTS)
    with pytest.raises(ServiceError, match=r"3 batches in a row, 12 rollouts were lost \(12 by SESSION_LOST\)"):
        run.sample()
    assert len(run.submitted) == PROMPTS * LOST_BATCHES and run.lost.total() == 12


def test_workers_that_are_busy_are_asked_again_for_the_reasons(queue: Queue) -> None:
    run = Run(queue, ReplayBuffer, lost)
    run.is_busy = True
    run.submit(PROMPTS)
    with pytest.raises(ServiceError, match="12 by SESSION_LOST"):
        run.sample()


def test_batches_with_a_rollout_do_not_end_a_run(queue: Queue) -> None:
    run = Run(queue, ReplayBuffer, half_lost)
    for _ in range(3 * LOST_BATCHES):
        run.submit(PROMPTS)
        assert len(run.sample()[0].keys) == PROMPTS
    assert len(run.submitted) == 3 * LOST_BATCHES * PROMPTS


def test_another_failure_of_the_buffer_is_not_replaced(queue: Queue) -> None:
    run = Run(queue, ReplayBuffer, finished, lost, filter_groups_metric="unknown", train_batch_size=PROMPTS)
    run.submit(PROMPTS)
    queue.kv_batch_get = lambda **_: {"extra_fields": [{}] * ROLLOUTS}  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="missing DAPO metric"):
        run.sample()
    assert len(run.submitted) == PROMPTS


@pytest.mark.parametrize("buffer", [ReplayBuffer, ReplayBufferAsync])
def test_the_prompts_of_a_dead_worker_fail_and_the_run_goes_on(queue: Queue, buffer: type[ReplayBuffer]) -> None:
    run = Run(queue, buffer, dead, finished)
    run.submit(PROMPTS)
    batch, _ = run.sample()
    # The synchronous buffer keeps what was finished in the group; the other one has replaced it.
    others = ["p2_0_0", "p2_1_0"] if buffer is ReplayBufferAsync else ["p0_0_0"]
    assert sorted(batch.keys) == sorted(["p1_0_0", "p1_1_0", *others])
    assert run.lost == {"WORKER_DIED": 1}
    assert run.metrics == [("batches/lost", 0), ("workers/lost", 1)]
    assert "p0_1_0" not in queue.partitions["train"]


def test_a_prompt_that_was_finished_before_its_worker_died_is_kept(queue: Queue) -> None:
    run = Run(queue, ReplayBufferAsync, finished_before_death, later, finished)
    run.submit(PROMPTS)
    assert len(run.sample()[0].keys) == PROMPTS * ROLLOUTS
    assert not run.lost and len(run.submitted) == PROMPTS
    assert not queue.partitions["train"].keys() & {"p0", "p1"}


def test_a_dead_worker_of_a_validation_counts_there(queue: Queue) -> None:
    run = Run(queue, ReplayBuffer, dead, finished)
    run.submit(PROMPTS, "val")
    assert len(run.sample("val")[0].keys) == ROLLOUTS + 1
    assert not run.lost and not run.batches


def test_prompts_are_forgotten_that_are_no_longer_played(queue: Queue) -> None:
    run = Run(queue, ReplayBuffer, finished)
    run.submit(PROMPTS)
    run.sample()
    assert run.kept[0] == {"p0", "p1"} and run.kept[-1] == set()


@pytest.mark.parametrize(
    ("buffer", "options"), [(ReplayBufferAsync, {}), (ReplayBuffer, {"sync_refill_failed_groups": True})]
)
def test_a_buffer_that_refills_for_ever_ends(queue: Queue, buffer: type[ReplayBuffer], options: dict[str, Any]) -> None:
    run = Run(queue, buffer, finished, finished, finished, lost, **options)
    run.submit(PROMPTS)
    assert len(run.sample()[0].keys) == PROMPTS * ROLLOUTS
    run.submit(PROMPTS)
    with pytest.raises(ServiceError, match=r"3 batches in a row, 12 rollouts were lost \(12 by SESSION_LOST\)"):
        run.sample()


def test_a_buffer_that_refills_goes_on_while_groups_are_finished(queue: Queue) -> None:
    many = [lost] * (PROMPTS * LOST_BATCHES - 1)
    run = Run(queue, ReplayBufferAsync, *many, finished, *many, finished)
    run.submit(1)
    run.submit(1)
    assert len(run.sample()[0].keys) == PROMPTS * ROLLOUTS
    assert run.lost.total() == 2 * len(many) * ROLLOUTS


def test_a_validation_without_an_episode_says_why(queue: Queue) -> None:
    run = Run(queue, ReplayBuffer, half_lost, lost, lost)
    run.submit(PROMPTS, "val")
    assert run.sample("val")[0].keys == ["p0_0_0"]
    run.submit(PROMPTS, "val")
    with pytest.raises(ServiceError, match=r"of the validation was lost \(4 by SESSION_LOST\)"):
        run.sample("val")
    assert not run.lost and not run.metrics
