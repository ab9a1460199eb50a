"""Reports of an ablation with held-out tasks: policies are the clusters, and arms are compared policy by policy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .plan import Plan
from .records import Evaluation, Run
from .statistics import censored_median, clustered, first_reached, interval


def policy(run: Run) -> int:
    """Return the cluster of a run."""
    return run.seed // 10


def last(run: Run, split: str) -> Evaluation:
    """Return a run's last evaluation on a split."""
    return [one for one in run.evaluations if one.split == split][-1]


def error_rate(one: Evaluation) -> float:
    """Return the share of turns that the terminal marked, of those in which a tool was called."""
    return one.failed / one.acted if one.acted else 1.0


def silent_rate(one: Evaluation) -> float:
    """Return the share of episodes that ended because a turn called no tool."""
    return one.marks.get("no call", 0) / one.tasks


FIGURES: Mapping[str, Callable[[Run], Any]] = {
    "held-out reward at the end": lambda run: last(run, "held_out").reward,
    "held-out reward, mean over the grid": lambda run: statistics.fmean(
        one.reward for one in run.evaluations if one.split == "held_out"
    ),
    "errors at turns with a call, at the end": lambda run: error_rate(last(run, "held_out")),
    "episodes with a turn without a call, at the end": lambda run: silent_rate(last(run, "held_out")),
    "reward on tasks without errors, at the end": lambda run: last(run, "known").reward,
    "reward in training": lambda run: run.mean("reward"),
    "environment steps": lambda run: run.costs.get("env_steps"),
    "positions in the losses": lambda run: run.costs.get("loss_tokens"),
    "wall time, s": lambda run: run.costs.get("wall_s"),
}
PAIRED = tuple(FIGURES)[:5]


def curve(runs: Sequence[Run]) -> list[tuple[float, float]]:
    """Return the mean held-out reward of runs by rollouts, at the points where all of them have an evaluation."""
    points: dict[int, list[float]] = {}
    for run in runs:
        for one in run.evaluations:
            if one.split == "held_out":
                points.setdefault(one.rollouts, []).append(one.reward)
    return [(float(x), statistics.fmean(ys)) for x, ys in sorted(points.items()) if len(ys) == len(runs)]


def summary(plan: Plan, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the figures of each arm that has a finished run, in the plan's order, compared with the first arm.

    Args:
        plan: Plan with the names of the arms.
        runs: Finished runs.
    """
    by_arm = {arm.name: [run for run in runs if run.arm == arm.name] for arm in plan.arms}
    base = plan.arms[0].name
    targets = _targets(by_arm[base])
    found: dict[str, Any] = {}
    for name, own in by_arm.items():
        if not own:
            continue
        figures = {}
        for title, figure in FIGURES.items():
            values = [(policy(run), figure(run)) for run in own if figure(run) is not None]
            if values:
                figures[title] = asdict(clustered(values))
        found[name] = {
            "runs": len(own),
            "policies": len({policy(run) for run in own}),
            "lost": sum(reward is None for run in own for batch in run.batches for reward in batch.rewards),
            "figures": figures,
            "curve": _curves(own),
            "against": {} if name == base else _against(own, by_arm[base]),
            "reaches": _reaches(own, targets),
            "losses": _losses(own),
        }
    return found


def _by_policy(runs: Sequence[Run]) -> dict[int, list[Run]]:
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(policy(run), []).append(run)
    return found


def _targets(base: Sequence[Run]) -> dict[int, float]:
    return {number: curve(own)[-1][1] for number, own in _by_policy(base).items()}


def _curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    points: dict[int, list[tuple[int, float]]] = {}
    for run in runs:
        for one in run.evaluations:
            if one.split == "held_out":
                points.setdefault(one.rollouts, []).append((policy(run), one.reward))
    return [{"rollouts": x, **asdict(clustered(own))} for x, own in sorted(points.items())]


def _against(own: Sequence[Run], base: Sequence[Run]) -> dict[str, Any]:
    """Compare runs with those of the first arm that have the same seed."""
    by_seed = {run.seed: run for run in base}
    found = {}
    for title in PAIRED:
        figure = FIGURES[title]
        differences = [(policy(run), figure(run) - figure(by_seed[run.seed])) for run in own if run.seed in by_seed]
        if differences:
            of_policies = _means(differences)
            found[title] = {**asdict(interval(of_policies)), "above": sum(one > 0 for one in of_policies)}
    return found


def _means(values: Sequence[tuple[int, float]]) -> list[float]:
    clusters: dict[int, list[float]] = {}
    for number, value in values:
        clusters.setdefault(number, []).append(value)
    return [statistics.fmean(own) for own in clusters.values()]


def _reaches(runs: Sequence[Run], targets: Mapping[int, float]) -> dict[str, Any]:
    """Return the rollouts that policies need to reach the first arm's last value; those that do not are censored."""
    times = []
    for number, own in _by_policy(runs).items():
        points = curve(own)
        if number in targets and points:
            at = first_reached(points, targets[number])
            times.append((points[-1][0] if at is None else at, at is not None))
    return {
        "policies": len(times),
        "reached": sum(reached for _, reached in times),
        "median": censored_median(times),
        "times": times,
    }


def _losses(runs: Sequence[Run]) -> dict[str, float]:
    names = sorted({name for run in runs for row in run.losses for name in row if name not in ("step", "grad_norm")})
    found = {}
    for name in names:
        values = [row[name] for run in runs for row in run.losses if name in row]
        found[name] = statistics.fmean(values)
    return found


def text(found: Mapping[str, Any], base: str) -> str:
    """Return the tables."""
    lines = []
    titles = list(FIGURES)
    lines += _table(
        ["arm", "runs", *titles],
        [
            [name, f"{own['runs']}/{own['policies']}"]
            + [_shown(own["figures"][title]) if title in own["figures"] else "-" for title in titles]
            for name, own in found.items()
        ],
    )
    lines += ["", f"minus {base}, policy by policy; in brackets the policies above it"]
    lines += _table(
        ["arm", *PAIRED],
        [
            [name]
            + [
                f"{_shown(own['against'][title])} ({own['against'][title]['above']}/{own['against'][title]['count']})"
                for title in PAIRED
            ]
            for name, own in found.items()
            if own["against"]
        ],
    )
    lines += ["", f"rollouts to the reward with which {base} ends, median over policies (Kaplan-Meier)"]
    lines += _table(
        ["arm", "reached", "median"],
        [
            [
                name,
                f"{own['reaches']['reached']} of {own['reaches']['policies']}",
                "not reached" if own["reaches"]["median"] is None else f"{own['reaches']['median']:.0f}",
            ]
            for name, own in found.items()
        ],
    )
    return "\n".join(lines) + "\n"


def _shown(one: Mapping[str, Any]) -> str:
    mean, half = one["mean"], one["half"]
    digits = 0 if abs(mean) >= 100 else 1 if abs(mean) >= 10 else 3
    return f"{mean:,.{digits}f}" + (f" +- {half:,.{digits}f}" if one["count"] > 1 else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]


def draw(found: Mapping[str, Any], path: Path, title: str) -> None:
    """Write a plot of held-out reward against rollouts, and of each arm's difference at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    for number, (name, own) in enumerate(found.items()):
        points = own["curve"]
        style = "-" if number < 10 else "--"
        xs, ys = [one["rollouts"] for one in points], [one["mean"] for one in points]
        left.plot(xs, ys, style, label=name, color=f"C{number % 10}", linewidth=2.2 if number == 0 else 1.2)
    left.set_xlabel("rollouts")
    left.set_ylabel("held-out reward, mean over policies")
    left.legend(fontsize=7)
    compared = {name: own["against"][PAIRED[0]] for name, own in found.items() if own["against"]}
    for place, (name, one) in enumerate(reversed(compared.items())):
        half = one["half"] if one["count"] > 1 else 0.0
        right.errorbar(one["mean"], place, xerr=half, fmt="o", color=f"C{list(found).index(name) % 10}")
    right.set_yticks(range(len(compared)), list(reversed(compared)))
    right.axvline(0.0, color="gray", linewidth=0.8)
    right.set_xlabel("held-out reward at the end minus grpo's, 95 % over policies")
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
