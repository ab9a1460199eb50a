"""One run: an arm and a seed, trained from the start, and the record of what came of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Protocol

import torch
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from errata_protocol.errors import InvalidRequest
from errata_trainer.counterfactual import CounterfactualCheck
from errata_trainer.driver import PairSource
from errata_trainer.recipes.trl import ChannelSettings, ThreeChannelGRPOTrainer
from errata_trainer.rollout import Rollout

from .plan import Arm, Plan
from .records import Batch, Run

Told = Callable[[str], None]


class Subject(Protocol):
    """What is trained."""

    def trained(self, seed: int) -> dict[str, Any]:
        """Return a new policy and its tasks, as arguments of a trainer: ``model``, ``train_dataset`` and so on."""
        ...

    def pairs(self, seed: int) -> PairSource:
        """Return a new source of pairs for channel 3.

        Raises:
            InvalidRequest: There is none.
        """
        ...


DEFAULTS: Mapping[str, Any] = {
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}
"""Of `GRPOConfig`, where a plan says nothing else: a run that was killed is repeated from its start."""


class Costs:
    """Counts a model's forward passes, apart for sampling and for the losses.

    Args:
        model: Whose passes.

    Attributes:
        sampling: It samples now.
        counts: ``passes`` and ``tokens`` (positions computed, padding included) of ``sampling_`` and ``loss_``.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.sampling = False
        self.counts = {f"{what}_{unit}": 0 for what in ("sampling", "loss") for unit in ("passes", "tokens")}
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named.get("input_ids")
        if ids is None:
            ids = given[0] if given else named["inputs_embeds"][..., 0]
        what = "sampling" if self.sampling else "loss"
        self.counts[f"{what}_passes"] += 1
        self.counts[f"{what}_tokens"] += ids.numel()


class RecordedTrainer(ThreeChannelGRPOTrainer):
    """`ThreeChannelGRPOTrainer` that keeps what each of its batches came to, and changes nothing.

    Attributes:
        batches: In order.
        costs: Of the policy's forward passes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.batches: list[Batch] = []
        super().__init__(*args, **kwargs)
        model = self.accelerator.unwrap_model(self.model)
        self.costs = Costs(model.get_base_model() if hasattr(model, "get_base_model") else model)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self.costs.sampling = True
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            self.costs.sampling = False

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        seats = self._seats()
        driver, transcripts = self._driver, self.transcripts
        if seats is not None and self.model.training and driver is not None and transcripts is not None:
            self.batches.append(batch_of(driver.read(transcripts, seats)[0]))
        return batch


def batch_of(rollouts: list[Rollout]) -> Batch:
    """Return what is kept of a batch of rollouts."""
    counted = [rollout for rollout in rollouts if rollout.lost is None]
    turns = max((len(rollout.turns) for rollout in counted), default=0)
    acted, failed = [0] * turns, [0] * turns
    for rollout in counted:
        for turn in rollout.turns:
            acted[turn.index] += bool(turn.calls)
            failed[turn.index] += turn.failed is not None
    while acted and not acted[-1]:  # closing words are no turn that could fail
        acted.pop()
        failed.pop()
    return Batch(
        rewards=tuple(rollout.reward for rollout in rollouts),
        acted=tuple(acted),
        failed=tuple(failed),
        sampled_tokens=sum(sum(rollout.mask) for rollout in rollouts),
    )


class Progress(TrainerCallback):  # type: ignore[misc]
    """Says after each step how far a run is.

    Args:
        say: Is told.
        batches: Grows as the run goes on.
    """

    def __init__(self, say: Told, batches: list[Batch]) -> None:
        self._say, self._batches = say, batches

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell reward and errors of the last batch."""
        last = self._batches[-1] if self._batches else None
        if last is not None:
            self._say(f"step {state.global_step}/{state.max_steps}, {last.told()}")


def train(
    plan: Plan,
    subject: Subject,
    arm: Arm,
    seed: int,
    say: Told,
    *,
    trainer_class: type[RecordedTrainer] = RecordedTrainer,
) -> Run:
    """Train one arm with one seed, from the start.

    Args:
        plan: What all runs share.
        subject: What is trained.
        arm: The weights.
        seed: Of sampling and the order of tasks.
        say: Is told of progress.
        trainer_class: A subclass may sample in another way.

    Raises:
        InvalidRequest: The plan asks for what a trainer does not know.
        ServiceError: All episodes of some batches in a row were lost.
    """
    channels = dict(plan.channels)
    settings = {field.name: channels.pop(field.name) for field in fields(ChannelSettings) if field.name in channels}
    check = dict(plan.check)
    pairs = subject.pairs(seed) if arm.beta_replay else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="errata-ablate-") as scratch:
        try:
            trainer = trainer_class(
                args=GRPOConfig(**{**DEFAULTS, **plan.grpo, "output_dir": scratch, "seed": seed}),
                alpha_sdpo=arm.alpha_sdpo,
                beta_replay=arm.beta_replay,
                settings=ChannelSettings(**{"teacher": "live", **settings}),  # as in the runs that are published
                check=CounterfactualCheck(**{"seed": seed, **check}) if check else None,
                pairs=pairs,
                **channels,
                **subject.trained(seed),
            )
        except TypeError as error:
            raise InvalidRequest(f"a table of the plan does not fit: {error}") from error
        trainer.remove_callback(PrinterCallback)  # `say` is told
        trainer.add_callback(Progress(say, trainer.batches))
        try:
            trainer.train()
        finally:
            for environment in trainer.environments or ():
                environment._seat.close()
            if pairs is not None and hasattr(pairs, "close"):
                pairs.close()
    return Run(
        arm=arm.name,
        alpha_sdpo=arm.alpha_sdpo,
        beta_replay=arm.beta_replay,
        seed=seed,
        plan=plan.digest(),
        batches=tuple(trainer.batches),
        losses=losses_of(trainer.state.log_history),
        costs={
            **trainer.costs.counts,
            "wall_s": time.monotonic() - began,
            **teacher_costs(trainer.state.log_history),
        },
    )


def losses_of(history: list[dict[str, Any]]) -> tuple[dict[str, float], ...]:
    """Return the total and each channel's loss of each logged step, and what the channels logged beside it."""
    kept = []
    for row in history:
        if "loss" in row:
            kept.append(
                {
                    name: float(value)
                    for name, value in row.items()
                    if name in ("loss", "step", "grad_norm") or name.startswith(("loss/", "sdpo/", "dpo/"))
                }
            )
    return tuple(kept)


def teacher_costs(history: list[dict[str, Any]]) -> dict[str, float]:
    """Return what channel 3 asked of teachers: calls that no cache answered, and money.

    Args:
        history: Of the trainer's log: what `TeacherPairs` tells of its pool, or a source of one's own as
            ``teacher_calls``.
    """
    pool = {name: last_logged(history, f"dpo/pool/teachers/{name}") for name in ("asked", "cached", "usd")}
    calls = last_logged(history, "dpo/teacher_calls") + pool["asked"] - pool["cached"]
    return {"teacher_calls": calls, "teacher_usd": pool["usd"]}


def last_logged(history: list[dict[str, Any]], name: str) -> float:
    """Return the last value of a metric, 0 where it was never logged."""
    return float(next((row[name] for row in reversed(history) if name in row), 0.0))
