"""A small training run: one policy, one seed, and its reward on tasks that are held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .plan import Arm, Plan
from .project_subject import ProjectSubject
from .projects import Habits, Project
from .records import Evaluation, Run
from .serving import terminal_of
from .training import train

PROJECT = 1
SEED = 0
WARM_UP = 260
WARM_UP_BATCH = 16
STEPS = 12
ROLLOUTS = 64
ARM = Arm("all", alpha_sdpo=0.1, beta_replay=0.05)
"""All three channels with the default weights."""
GRPO: Mapping[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "learning_rate": 7e-4,
    "lr_scheduler_type": "constant",
    "num_generations": 8,
    "max_completion_length": 160,
    "max_tool_calling_iterations": 2,
}


@dataclass(frozen=True, slots=True)
class Learned:
    """The results of a run.

    Attributes:
        run: Batches, losses and evaluations.
        trained_on: Ids of the tasks that training played.
        held_out: Ids of the tasks of the evaluation.
        asked: Number of resets, forks and steps that the run requested.
        played: Number of resets and steps that sandboxes made; the other answers were recorded before (`memo`).
    """

    run: Run
    trained_on: frozenset[str]
    held_out: frozenset[str]
    asked: int
    played: int

    @property
    def curve(self) -> tuple[Evaluation, ...]:
        """The evaluations on held-out tasks, in order."""
        return tuple(one for one in self.run.evaluations if one.split == "held_out")

    @property
    def known(self) -> tuple[Evaluation, ...]:
        """The evaluations on tasks that need no new knowledge: before training and at the end."""
        return tuple(one for one in self.run.evaluations if one.split == "known")

    @property
    def failures(self) -> list[str]:
        """The conditions that the run does not meet, as texts."""
        found = []
        if both := self.trained_on & self.held_out:
            found.append(f"{len(both)} tasks of the evaluation were trained on")
        if lost := sum(reward is None for batch in self.run.batches for reward in batch.rewards):
            found.append(f"{lost} rollouts were lost")
        if self.curve[-1].reward <= self.curve[0].reward:
            found.append("the reward on held-out tasks did not rise")
        return found

    def data(self) -> dict[str, Any]:
        """Return the results for JSON."""
        return {
            "ok": not self.failures,
            "curve": [asdict(one) for one in self.curve],
            "known": [asdict(one) for one in self.known],
            "training": [one.rewards for one in self.run.batches],
            "trained_on": sorted(self.trained_on),
            "held_out": sorted(self.held_out),
            "asked": self.asked,
            "played": self.played,
            "costs": dict(self.run.costs),
        }


class _Watched(ProjectSubject):
    """A project that records the tasks that training plays.

    Attributes:
        trained_on: Ids of these tasks.
    """

    evaluating = False

    def watch(self) -> set[str]:
        """Record the tasks of all further resets outside of evaluations; return the set of their ids."""
        trained_on: set[str] = set()
        reset = self.memo.reset

        def noted(task: dict[str, Any]) -> dict[str, Any]:
            if not self.evaluating:
                trained_on.add(task["task_id"])
            return reset(task)

        self.memo.reset = noted  # type: ignore[method-assign]
        return trained_on

    def evaluate(self, *args: Any, **kwargs: Any) -> Evaluation:
        """Evaluate without recording the tasks that are reset meanwhile."""
        self.evaluating = True
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self.evaluating = False


def plan() -> Plan:
    """Return the plan of the run: `ARM`, evaluated before training and four times during it."""
    grid = [STEPS * ROLLOUTS * part // 4 for part in range(5)]
    grpo = {**GRPO, "per_device_train_batch_size": ROLLOUTS, "max_steps": STEPS}
    return Plan((ARM,), (SEED,), {"family": "projects"}, grpo, {"teacher": "ema"}, evaluation={"rollouts": grid})


def learn(directory: Path, *, say: Callable[[str], None] = lambda line: None) -> Learned:
    """Teach a tiny policy, train it in the terminal, and evaluate it on held-out tasks during training.

    Args:
        directory: Directory for the policy, the tasks and the server's data.
        say: Called with each line of progress.

    Raises:
        ServiceError: The server did not start, or episodes were lost.
    """
    (directory / "policies").mkdir(parents=True, exist_ok=True)
    project = Project(PROJECT)
    with terminal_of(project, directory / "terminal") as url:
        subject = _Watched(project, Habits(), directory, url, warmup_steps=WARM_UP, warmup_batch=WARM_UP_BATCH, say=say)
        try:
            trained_on = subject.watch()
            made = train(plan(), subject, ARM, SEED, say)
        finally:
            subject.close()
    held_out = frozenset(task.task_id for task in project.tasks["held_out"])
    return Learned(made, frozenset(trained_on), held_out, subject.memo.asked, subject.memo.played)
