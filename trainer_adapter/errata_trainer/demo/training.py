"""Trains a tiny policy with all three channels on the real terminal environment, and collects results to show."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from errata_client import Episodes
from errata_server.process import ServerProcess

from ..assembly.counterfactual import CounterfactualCheck
from ..episodes.tools import PlayedEnvironment, published
from ..hints import FailedTurn, Hint, Hinter, TemplateHinter
from ..recipes.trl import TeacherPairs, ThreeChannelGRPOTrainer, environment_factory
from ..rollouts.rollout import DpoPair
from ..teachers import FakeTeacher, Prompter, TeacherPool
from . import script, warm_up

LENGTH = 480
"""Tokens of a completion at most; the longest scripted one has 200."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step, as logged: means over its rollouts.

    Attributes:
        reward: Mean reward of an episode.
        grpo: Loss of channel 1.
        sdpo: Loss of channel 2, before its weight; None if it had nothing to train on.
        dpo: Loss of channel 3, before its weight; None if it had nothing to train on.
        sites: Failing turns that were distilled, for each rollout.
        dropped: Failing turns whose hint did not help in a fork, for each rollout.
        pairs: Number of pairs in the replay buffer.
        asked: Number of forks played so far for the counterfactual check.
    """

    number: int
    reward: float
    grpo: float
    sdpo: float | None
    dpo: float | None
    sites: float
    dropped: float
    pairs: int
    asked: int


@dataclass(slots=True)
class Marked:
    """The failing turns of one hint template key.

    Attributes:
        count: Number of turns that got a hint.
        command: Command of the first such turn; the tool's name if it has none.
        hint: Hint of the first such turn.
        eid: Episode of the first such turn.
        t: Delivery that has the marker of the first such turn; None for a call that never reached the environment.
        tried: Number of times that a hint was tried in a fork.
        better: Number of times that the error was gone in the fork.
    """

    error_kind: str
    hint_template_key: str
    count: int = 0
    command: str = ""
    hint: str = ""
    eid: str | None = None
    t: int | None = None
    tried: int = 0
    better: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """A preference pair as text.

    Attributes:
        chosen: The turn that the teachers agreed on.
        rejected: The student's turn.
        eid: Episode of the first such state; None without a journal.
        t: Delivery whose payload the teachers read at the first such state.
        votes: Key of each teacher's action at the first such state, None for a teacher without one.
        states: Number of states with this pair.
    """

    chosen: str
    rejected: str
    eid: str | None
    t: int | None
    votes: dict[str, str | None]
    states: int


@dataclass(slots=True)
class Result:
    """The results of the demo.

    Attributes:
        lost: Largest share of a batch's episodes that were lost.
        teachers: Counts of the pool, as `TeacherPool.metrics` returns them.
    """

    data_dir: Path
    steps: list[Step] = field(default_factory=list)
    marked: list[Marked] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    teachers: dict[str, float] = field(default_factory=dict)
    lost: float = 0.0
    failures: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the results as JSON values."""
        return json.dumps({"ok": not self.failures, **asdict(self), "data_dir": str(self.data_dir)})


class RecordingHinter:
    """Wraps a hinter and records the turns that it was asked about."""

    def __init__(self, hinter: Hinter) -> None:
        self._hinter = hinter
        self.marked: dict[str, Marked] = {}

    def hint(self, failed: FailedTurn) -> Hint | None:
        """Return the wrapped hinter's hint."""
        hint, marker = self._hinter.hint(failed), failed.marker
        if hint is not None and marker is not None:
            found = self.marked.setdefault(hint.key, Marked(marker.error_kind, hint.key))
            if not found.count:
                found.command = str(failed.call.arguments.get("command", failed.call.name))
                found.hint, found.eid, found.t = hint.text, failed.rollout.eid, failed.call.t
            found.count += 1
        return hint


class RecordingPairs(TeacherPairs):
    """Records the pairs that were trained on."""

    def __init__(self, pool: TeacherPool, buffer: Path, **options: Any) -> None:
        super().__init__(pool, buffer, **options)
        self.drawn: dict[tuple[Any, ...], DpoPair] = {}

    def sample(self, count: int, referred: Callable[[Sequence[DpoPair]], list[DpoPair]]) -> list[DpoPair]:
        """Return the pairs drawn by the base class."""
        pairs = super().sample(count, referred)
        self.drawn.update({(pair.eid, pair.t, pair.rejected_ids): pair for pair in pairs})
        return pairs


class LogRecorder(TrainerCallback):  # type: ignore[misc]
    """Records the log of each step."""

    def __init__(self, steps: list[Step], say: Say) -> None:
        self._steps, self._say = steps, say

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Record a step's log; the summary at the end of training has no loss and is skipped."""
        if not logs or "reward" not in logs:
            return
        step = Step(
            number=state.global_step,
            reward=float(logs["reward"]),
            grpo=float(logs.get("loss/grpo", logs["loss"])),
            sdpo=_optional(logs, "loss/sdpo_kl"),
            dpo=_optional(logs, "loss/trace_replay_dpo"),
            sites=float(logs.get("sdpo/sites", 0.0)),
            dropped=float(logs.get("sdpo/not_better", 0.0)) / args.per_device_train_batch_size,
            pairs=int(logs.get("dpo/buffer", 0.0)),
            asked=int(logs.get("counterfactual/asked", 0.0)),
        )
        self._steps.append(step)
        self._say(f"step {step.number}: reward {step.reward:.2f}")


def train(data_dir: Path, *, steps: int, rollouts: int, warm_up_steps: int, seed: int, say: Say) -> Result:
    """Run the whole demo.

    Args:
        data_dir: Directory for journal, layers and pairs; made if missing.
        steps: Number of optimizer steps, each with all three channels.
        rollouts: Number of episodes in a step.
        warm_up_steps: Number of supervised steps before the others.
        seed: Seed of weights and samples.
        say: Takes a line of progress.

    Raises:
        ServiceError: The server could not be started, or lost every episode.
    """
    result = Result(data_dir)
    environment = published("terminal")
    say("starting `errata serve terminal`")
    with ServerProcess("terminal", data_dir) as server:
        say(f"serving at {server.url}: {len(script.EPISODES)} scripted episodes are played for the warm-up")
        tokenizer, model = warm_up.taught_policy(server.url, steps=warm_up_steps, seed=seed, say=say)
        hinter, check = RecordingHinter(TemplateHinter()), CounterfactualCheck("always", episodes=Episodes(server.url))
        with _pool(server.url, environment) as pool:
            buffer = data_dir / f"pairs-{seed}.jsonl"
            buffer.unlink(missing_ok=True)  # an earlier demo's, of other weights
            pairs = RecordingPairs(pool, buffer, wait_s=30.0)
            say(f"training: {steps} steps of {rollouts} rollouts on {script.TASK}, three teachers in this process")
            trainer = ThreeChannelGRPOTrainer(
                model=model,
                processing_class=tokenizer,
                args=_config(data_dir, steps, rollouts, seed),
                train_dataset=Dataset.from_list([_ROW] * rollouts * steps),
                environment_factory=environment_factory(server.url, environment, tools=script.TOOLS),
                hinter=hinter,
                check=check,
                pairs=pairs,
                callbacks=[LogRecorder(result.steps, say)],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            pairs.close()
            result.lost = max((log.get("episodes/lost", 0.0) for log in trainer.state.log_history), default=0.0)
        result.teachers = pool.metrics()
        result.marked = sorted(hinter.marked.values(), key=lambda one: -one.count)
        for one in result.marked:
            tried = {why: n for (key, why), n in check.counts.items() if key == one.hint_template_key}
            one.tried, one.better = sum(tried.values()), tried.get("error_gone", 0)
        result.pairs = _pairs(pairs.drawn.values(), tokenizer)
    result.failures = _failures(result)
    return result


_ROW = {"prompt": [{"role": "user", "content": script.PROMPT}], "task_id": script.TASK}


def _pool(url: str, environment: PlayedEnvironment) -> TeacherPool:
    tools = tuple(
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        for tool in (environment.tools[name] for name in script.TOOLS)
    )
    teachers = [
        FakeTeacher(script.careful, name="careful"),
        FakeTeacher(script.careful, name="patient"),
        FakeTeacher(script.hasty, name="hasty"),
    ]
    return TeacherPool(teachers, Prompter(tools, environment.agent_text), episodes=Episodes(url))


def _config(data_dir: Path, steps: int, rollouts: int, seed: int) -> Any:
    return GRPOConfig(
        output_dir=str(data_dir / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=rollouts,
        num_generations=rollouts,
        max_completion_length=LENGTH,
        max_tool_calling_iterations=6,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        temperature=1.0,
        logging_steps=1,
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_completions=False,
    )


def _pairs(drawn: Iterable[DpoPair], tokenizer: Any) -> list[Pair]:
    """Return the distinct pairs as text, those of most states first."""
    found: dict[tuple[str, str], list[DpoPair]] = {}
    for pair in drawn:
        chosen, rejected = (
            tokenizer.decode(ids, skip_special_tokens=True) for ids in (pair.chosen_ids, pair.rejected_ids)
        )
        found.setdefault((chosen, rejected), []).append(pair)
    return [
        Pair(chosen, rejected, pairs[0].eid, pairs[0].t, dict(pairs[0].votes), len(pairs))
        for (chosen, rejected), pairs in sorted(found.items(), key=lambda item: -len(item[1]))
    ]


def _failures(result: Result) -> list[str]:
    failures = []
    if result.lost:
        failures.append(f"{result.lost:.0%} of a batch's episodes were lost")
    if not any(step.sdpo is not None for step in result.steps):
        failures.append("channel 2 had no error site in any step")
    if not any(step.dpo is not None for step in result.steps):
        failures.append("channel 3 had no pair in any step")
    if not sum(one.tried for one in result.marked):
        failures.append("no hint was tried in a fork")
    return failures


def _optional(logs: dict[str, float], name: str) -> float | None:
    return float(logs[name]) if name in logs else None
