"""The plot of an ablation: rewards, errors, the channels' losses and costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .plan import Plan
from .records import Run
from .statistics import interval

_LOSSES = ("loss", "loss/sdpo_kl", "loss/trace_replay_dpo")


def draw(plan: Plan, runs: Sequence[Run], path: Path, title: str) -> None:
    """Write a PNG: reward, errors of each turn and the losses by batch, and costs, each with 95 % intervals over seeds.

    Args:
        plan: Plan with the names and the order of the arms.
        runs: Finished runs.
        path: Path of the image.
        title: Title of the image.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    turns = max((len(batch.acted) for run in runs for batch in run.batches), default=0)
    panels = ["reward", *[f"errors, turn {n + 1}" for n in range(turns)], *_LOSSES, "wall time, s", "loss tokens"]
    columns = 3
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4.5 * columns, 3.0 * lines), squeeze=False)
    arms = [arm.name for arm in plan.arms if any(run.arm == arm.name for run in runs)]
    for place, name in enumerate(panels):
        axis = axes[place // columns][place % columns]
        axis.set_title(name, fontsize=9)
        for number, arm in enumerate(arms):
            own = [run for run in runs if run.arm == arm]
            if name in ("wall time, s", "loss tokens"):
                key = "wall_s" if name == "wall time, s" else "loss_tokens"
                found = interval([run.costs.get(key, 0.0) for run in own])
                axis.bar(number, found.mean, yerr=found.half if len(own) > 1 else None, color=f"C{number}")
                axis.set_xticks(range(len(arms)), arms, fontsize=7, rotation=20)
                continue
            curves = [_curve(run, name) for run in own]
            _band(axis, curves, arm, f"C{number}")
        if place == 0:
            axis.legend(fontsize=7)
    for place in range(len(panels), lines * columns):
        axes[place // columns][place % columns].axis("off")
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curve(run: Run, name: str) -> list[float | None]:
    if name == "reward":
        return run.curve("reward")
    if name.startswith("errors"):
        return run.curve("errors", int(name.rsplit(" ", 1)[1]) - 1)
    return [row.get(name) for row in run.losses]


def _band(axis: Any, curves: Sequence[Sequence[float | None]], label: str, color: str) -> None:
    """Draw the mean over seeds of a running mean of five, and its interval."""
    steps, means, lows, highs = [], [], [], []
    for step in range(max(map(len, curves), default=0)):
        values = []
        for curve in curves:
            near = [value for value in curve[max(0, step - 4) : step + 1] if value is not None]
            if near:
                values.append(statistics.fmean(near))
        if values:
            found = interval(values)
            half = found.half if len(values) > 1 else 0.0
            steps.append(step + 1)
            means.append(found.mean)
            lows.append(found.mean - half)
            highs.append(found.mean + half)
    if steps:
        axis.ticklabel_format(useOffset=False)
        axis.plot(steps, means, label=label, color=color, linewidth=1.2)
        axis.fill_between(steps, lows, highs, color=color, alpha=0.15, linewidth=0)
