"""Records of runs: one JSON file for each, written when the run has finished."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from errata_protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Batch:
    """Results of a batch of rollouts.

    Attributes:
        rewards: Reward of each rollout; None for one that the machine lost.
        acted: For each turn, the number of rollouts that called a tool in it.
        failed: For each turn, the number of rollouts in which it had an error.
        sampled_tokens: Tokens that the policy sampled.
    """

    rewards: tuple[float | None, ...]
    acted: tuple[int, ...]
    failed: tuple[int, ...]
    sampled_tokens: int

    def summary(self) -> str:
        """Return a short text of the results."""
        counted = [reward for reward in self.rewards if reward is not None]
        reward = f"{sum(counted) / len(counted):.2f}" if counted else "none"
        errors = f"{sum(self.failed) / sum(self.acted):.2f}" if sum(self.acted) else "none"
        return f"reward {reward}, errors {errors}"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a policy reaches on tasks of a split, each played once.

    Attributes:
        split: Split of the family's tasks.
        reward: Mean reward over tasks.
        acted: Number of turns in which a tool was called.
        failed: Number of turns that were marked.
        marks: Number of marks by hint template key; ``no call`` are turns without a call.
        tasks: Number of tasks.
        rollouts: Number of rollouts that the run had trained on before.
        env_steps: Number of requests that it had made to the environment before.
    """

    split: str
    reward: float
    acted: int
    failed: int
    marks: Mapping[str, int]
    tasks: int
    rollouts: int = 0
    env_steps: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One arm and one seed.

    Attributes:
        arm: Name of the arm.
        alpha_sdpo: Weight of channel 2.
        beta_replay: Weight of channel 3.
        seed: Seed of the run.
        plan: Digest of the settings that all runs share.
        batches: Results of its batches, in order.
        losses: Losses of each step, by name.
        evaluations: Evaluations at the rollouts that the plan gives, in order.
        costs: ``wall_s``, ``teacher_calls``, and forward passes and positions of sampling and of the losses.
    """

    arm: str
    alpha_sdpo: float
    beta_replay: float
    seed: int
    plan: str
    batches: tuple[Batch, ...]
    losses: tuple[Mapping[str, float], ...] = ()
    costs: Mapping[str, float] = field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()

    @property
    def rollouts(self) -> int:
        """Number of rollouts that were played."""
        return sum(len(batch.rewards) for batch in self.batches)

    def curve(self, name: str, turn: int = 0) -> list[float | None]:
        """Return a figure batch by batch: ``reward``, or ``errors`` of a turn; None where there is none."""
        found: list[float | None] = []
        for batch in self.batches:
            if name == "reward":
                counted = [reward for reward in batch.rewards if reward is not None]
                found.append(sum(counted) / len(counted) if counted else None)
            else:
                acted = batch.acted[turn] if turn < len(batch.acted) else 0
                found.append(batch.failed[turn] / acted if acted else None)
        return found

    def mean(self, name: str, turn: int = 0, *, last: float = 1.0) -> float | None:
        """Return the mean of a curve over its last share of batches; None where it has no value there."""
        curve = self.curve(name, turn)
        values = [value for value in curve[len(curve) - max(1, round(last * len(curve))) :] if value is not None]
        return sum(values) / len(values) if values else None

    def loss(self, name: str) -> float | None:
        """Return the mean of a logged loss over the steps that have it."""
        values = [row[name] for row in self.losses if name in row]
        return sum(values) / len(values) if values else None


def path_of(directory: Path, arm: str, seed: int) -> Path:
    """Return the path of a run's record."""
    return directory / "runs" / f"{arm}-seed{seed}.json"


def write(run: Run, directory: Path) -> None:
    """Write the record of a finished run; a process that is killed meanwhile leaves no record."""
    path = path_of(directory, run.arm, run.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(run), indent=1) + "\n")
    part.replace(path)


def read(directory: Path, arm: str, seed: int, plan: str) -> Run | None:
    """Return the record of a finished run; None if there is none.

    Raises:
        InvalidRequest: The record is of another plan.
    """
    path = path_of(directory, arm, seed)
    if not path.exists():
        return None
    kept: dict[str, Any] = json.loads(path.read_text())
    if kept["plan"] != plan:
        raise InvalidRequest(
            f"{path} is a run of another plan ({kept['plan']}, now {plan}): name another --out, or run it again "
            "with --no-resume"
        )
    batches = tuple(Batch(**{name: _tuple(value) for name, value in one.items()}) for one in kept.pop("batches"))
    evaluations = tuple(Evaluation(**one) for one in kept.pop("evaluations", ()))
    return Run(batches=batches, losses=tuple(kept.pop("losses")), evaluations=evaluations, **kept)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def compact(runs: Sequence[Run]) -> str:
    """Return runs as JSON, one a line, without what each step logged."""
    lines = []
    for run in runs:
        kept = asdict(run)
        kept["batches"] = [
            {"rewards": one["rewards"], "acted": one["acted"], "failed": one["failed"]} for one in kept["batches"]
        ]
        kept["losses"] = [{name: round(value, 5) for name, value in row.items()} for row in kept["losses"][::5]]
        lines.append(json.dumps(kept, separators=(",", ":")))
    return "[\n" + ",\n".join(lines) + "\n]\n"
