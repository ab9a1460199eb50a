"""Trains one arm with one seed from the start, evaluates it on the way, and returns the record of the run. The controls
`ShuffledHints` and `RetryingTrainer` are here, too."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from errata_protocol.errors import InvalidRequest
from errata_trainer.assembly.counterfactual import CounterfactualCheck
from errata_trainer.assembly.pair_source import PairSource
from errata_trainer.assembly.sites import observation_of
from errata_trainer.channels.schedules import Schedule
from errata_trainer.hints import FailedTurn, Hint, TemplateHinter
from errata_trainer.recipes.trl import ChannelSettings, ThreeChannelGRPOTrainer
from errata_trainer.rollouts.rollout import Rollout

from .plan import Arm, Plan
from .records import Batch, Evaluation, Run

Reporter = Callable[[str], None]


class Subject(Protocol):
    """A policy with its tasks and its environment."""

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
"""Defaults for `GRPOConfig`. No checkpoints: a run that was killed is repeated from its start."""


class Costs:
    """Counts a model's forward passes, separately for sampling and for the losses.

    Args:
        model: The model.

    Attributes:
        sampling: The model is sampling now.
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
    """`ThreeChannelGRPOTrainer` that also records the results of each batch.

    Attributes:
        batches: Results of the batches, in order.
        costs: Costs of the policy's forward passes.
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
        runners = self._runners()
        driver, transcripts = self._driver, self.transcripts
        if runners is not None and self.model.training and driver is not None and transcripts is not None:
            self.batches.append(batch_of(driver.read(transcripts, runners)[0]))
        return batch


def batch_of(rollouts: list[Rollout]) -> Batch:
    """Return the results of a batch of rollouts."""
    counted = [rollout for rollout in rollouts if rollout.lost is None]
    turns = max((len(rollout.turns) for rollout in counted), default=0)
    acted, failed = [0] * turns, [0] * turns
    for rollout in counted:
        for turn in rollout.turns:
            acted[turn.index] += bool(turn.calls)
            failed[turn.index] += turn.failed is not None
    while acted and not acted[-1]:  # a closing text is not a turn that can fail
        acted.pop()
        failed.pop()
    return Batch(
        rewards=tuple(rollout.reward for rollout in rollouts),
        acted=tuple(acted),
        failed=tuple(failed),
        sampled_tokens=sum(sum(rollout.mask) for rollout in rollouts),
    )


class Progress(TrainerCallback):  # type: ignore[misc]
    """Reports the progress of a run after each step.

    Args:
        say: Called with each line.
        batches: Results of the batches so far; the run appends to it.
    """

    def __init__(self, say: Reporter, batches: list[Batch]) -> None:
        self._say, self._batches = say, batches

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report reward and errors of the last batch."""
        last = self._batches[-1] if self._batches else None
        if last is not None:
            self._say(f"step {state.global_step}/{state.max_steps}, {last.summary()}")


class Evaluator(TrainerCallback):  # type: ignore[misc]
    """Evaluates the policy at the plan's numbers of rollouts, and ends training at the bound of environment steps.

    Args:
        plan: Plan with the numbers of rollouts.
        subject: Subject with held-out tasks.
        arm: Arm with the bound of environment steps.
        seed: Seed of the run; evaluations at the same number of rollouts sample alike in all arms.
        trainer: Trainer of the policy.

    Attributes:
        found: Results of the evaluations.
        env_steps: Requests to the environment that training made.
    """

    def __init__(self, plan: Plan, subject: Any, arm: Arm, seed: int, trainer: RecordedTrainer) -> None:
        self._grid, self._subject, self._arm, self._seed = set(plan.evaluation["rollouts"]), subject, arm, seed
        self._trainer = trainer
        self.found: list[Evaluation] = []
        self._asked = subject.memo.asked
        self.env_steps = 0

    def _evaluate(self, rollouts: int, *, both: bool) -> None:
        self.env_steps += self._subject.memo.asked - self._asked
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        for split in ("held_out", "known"):
            if split == "known" and not both:
                continue
            found = self._subject.evaluate(model, split, 1000 * self._seed + rollouts)
            self.found.append(replace(found, rollouts=rollouts, env_steps=self.env_steps))
        self._asked = self._subject.memo.asked

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate the policy as it was taught."""
        if 0 in self._grid:
            self._evaluate(0, both=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate at the plan's numbers of rollouts, before the next ones are sampled, and at the end."""
        if state.global_step % self._trainer.num_iterations:
            return
        rollouts = sum(len(batch.rewards) for batch in self._trainer.batches)
        asked = self.env_steps + self._subject.memo.asked - self._asked
        over = self._arm.env_steps is not None and asked >= self._arm.env_steps
        if over:
            control.should_training_stop = True
        ends = over or state.global_step >= state.max_steps
        if rollouts in self._grid or ends:
            self._evaluate(rollouts, both=ends)


class ShuffledHints:
    """A control: gives the hint of another failing turn with another right answer; None before the first one.

    Args:
        seed: Seed of the choice.
    """

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._own = TemplateHinter()
        self._seen: dict[str, Hint] = {}

    def hint(self, failed: FailedTurn) -> Hint | None:
        """Return the other turn's hint, with the key of this turn."""
        own = self._own.hint(failed)
        if own is None:
            return None
        others = [hint for text, hint in sorted(self._seen.items()) if text != own.text]
        self._seen[own.text] = own
        return replace(self._chance.choice(others), key=own.key) if others else None


class RetryingTrainer(RecordedTrainer):
    """A control without channel 2: half of each batch are failing tasks of the batch before, with hints in prompts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._failed: list[tuple[dict[str, Any], str]] = []
        self._template_hinter = TemplateHinter()
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        group = self.num_generations
        inputs = list(inputs)
        for place in range(len(inputs) // group // 2):
            if not self._failed:
                break
            row, hint = self._failed.pop(0)
            again = {**row, "prompt": [{"role": "user", "content": f"{hint}\n"}]}
            inputs[place * group : (place + 1) * group] = [dict(again) for _ in range(group)]
        batch = super()._generate_and_score_completions(inputs)
        self._remember(inputs)
        return batch

    def _remember(self, inputs: list[dict[str, Any]]) -> None:
        runners, driver, transcripts = self._runners(), self._driver, self.transcripts
        if runners is None or driver is None or transcripts is None:
            return
        failed: dict[str, tuple[dict[str, Any], str]] = {}
        for row, rollout, runner in zip(inputs, driver.read(transcripts, runners)[0], runners, strict=True):
            turn = next((turn for turn in rollout.turns if turn.failed is not None), None)
            if turn is None or turn.failed is None or "Hint for" in row["prompt"][0]["content"]:
                continue
            found = FailedTurn(rollout, turn, turn.failed, observation_of(runner, turn.failed.t))
            hint = self._template_hinter.hint(found)
            if hint is not None:
                failed.setdefault(row["task_id"], (row, hint.text))
        self._failed = list(failed.values())


def train(
    plan: Plan,
    subject: Subject,
    arm: Arm,
    seed: int,
    say: Reporter,
    *,
    trainer_class: type[RecordedTrainer] = RecordedTrainer,
) -> Run:
    """Train one arm with one seed, from the start.

    Args:
        plan: Settings that all runs share.
        subject: Policy, tasks and environment.
        arm: The arm with its weights.
        seed: Seed of sampling and of the order of tasks.
        say: Called with each line of progress.
        trainer_class: Class of the trainer; a subclass may sample in another way.

    Raises:
        InvalidRequest: The plan has a setting that the trainer does not know.
        ServiceError: All episodes of some batches in a row were lost.
    """
    channels = {**plan.channels, **arm.channels}
    if isinstance(channels.get("hint_keys"), list):
        channels["hint_keys"] = tuple(channels["hint_keys"])
    settings = {field.name: channels.pop(field.name) for field in fields(ChannelSettings) if field.name in channels}
    check = {**plan.check, **arm.check}
    pairs = None
    if arm.beta_replay:
        pairs = subject.pairs(seed) if arm.votes == "teachers" else subject.pairs(seed, at_random=True)  # type: ignore[call-arg]
    if arm.hints == "shuffled":
        channels["hinter"] = ShuffledHints(seed)
    if arm.retry:
        trainer_class = RetryingTrainer
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="errata-ablate-") as scratch:
        try:
            trainer = trainer_class(
                args=GRPOConfig(**{**DEFAULTS, **plan.grpo, **arm.grpo, "output_dir": scratch, "seed": seed}),
                alpha_sdpo=_alpha(plan, arm),
                beta_replay=arm.beta_replay,
                settings=ChannelSettings(**{"teacher": "live", **settings}),  # as in the runs that are published
                check=CounterfactualCheck(**{"seed": seed, **check}) if check else None,
                pairs=pairs,
                **channels,
                **subject.trained(seed),
            )
        except TypeError as error:
            raise InvalidRequest(f"a table of the plan does not fit: {error}") from error
        trainer.remove_callback(PrinterCallback)  # `say` gets the lines
        trainer.add_callback(Progress(say, trainer.batches))
        evaluator = Evaluator(plan, subject, arm, seed, trainer) if plan.evaluation else None
        if evaluator is not None:
            trainer.add_callback(evaluator)
        try:
            trainer.train()
        finally:
            for environment in trainer.environments or ():
                environment._runner.close()
            if pairs is not None and hasattr(pairs, "close"):
                pairs.close()
    return Run(
        arm=arm.name,
        alpha_sdpo=arm.alpha_sdpo,
        beta_replay=arm.beta_replay,
        seed=seed,
        plan=plan.digest(arm),
        batches=tuple(trainer.batches),
        losses=losses_of(trainer.state.log_history),
        costs={
            **trainer.costs.counts,
            "wall_s": time.monotonic() - began,
            **teacher_costs(trainer.state.log_history),
            **({} if evaluator is None else {"env_steps": float(evaluator.env_steps)}),
        },
        evaluations=() if evaluator is None else tuple(evaluator.found),
    )


def _alpha(plan: Plan, arm: Arm) -> float | Schedule:
    if arm.alpha_end is None:
        return arm.alpha_sdpo
    steps = {**plan.grpo, **arm.grpo}.get("max_steps")
    if not steps:
        raise InvalidRequest(f"arm {arm.name}: alpha_end needs max_steps in [grpo]")
    return Schedule(arm.alpha_sdpo, arm.alpha_end, steps - 1, "linear") if steps > 1 else arm.alpha_sdpo


KEPT = ("loss/", "sdpo/", "dpo/", "counterfactual/")


def losses_of(history: list[dict[str, Any]]) -> tuple[dict[str, float], ...]:
    """Return the total and each channel's loss of each logged step, and what the channels logged beside it."""
    kept = []
    for row in history:
        if "loss" in row:
            kept.append(
                {
                    name: float(value)
                    for name, value in row.items()
                    if name in ("loss", "step", "grad_norm") or name.startswith(KEPT)
                }
            )
    return tuple(kept)


def teacher_costs(history: list[dict[str, Any]]) -> dict[str, float]:
    """Return the costs of channel 3's teachers: calls that no cache answered, and money.

    Args:
        history: The trainer's log, with the metrics that `TeacherPairs` logs of its pool, or ``teacher_calls`` of the
            user's own source.
    """
    pool = {name: last_logged(history, f"dpo/pool/teachers/{name}") for name in ("asked", "cached", "usd")}
    calls = last_logged(history, "dpo/teacher_calls") + pool["asked"] - pool["cached"]
    return {"teacher_calls": calls, "teacher_usd": pool["usd"]}


def last_logged(history: list[dict[str, Any]], name: str) -> float:
    """Return the last value of a metric, 0 where it was never logged."""
    return float(next((row[name] for row in reversed(history) if name in row), 0.0))
