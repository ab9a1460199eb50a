"""Reports of an ablation: the figures of each arm over seeds, and the differences from the first arm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .plan import Plan
from .records import Run
from .statistics import Interval, interval, seeds_needed

LAST = 0.25
"""Share of the batches that figures ``at the end`` are taken over."""

Figure = Callable[[Run], float | None]

COSTS = ("wall_s", "sampling_tokens", "loss_passes", "loss_tokens", "teacher_calls", "teacher_usd")


@dataclass(frozen=True, slots=True)
class Against:
    """The difference between an arm and the first one in one figure.

    Attributes:
        difference: Arm minus first arm, paired by seed.
        seeds_needed: Seeds that see a true effect of this size with a chance of 80 % at the 5 % level; None where no
            effect was found or there is only one seed.
    """

    difference: Interval
    seeds_needed: int | None

    @property
    def seen(self) -> bool:
        """Whether the 95 % interval excludes zero."""
        return self.difference.count > 1 and abs(self.difference.mean) > self.difference.half


@dataclass(frozen=True, slots=True)
class ArmReport:
    """The results of one arm.

    Attributes:
        name: Name of the arm.
        seeds: Seeds whose runs have finished.
        rollouts: Number of rollouts of each run, the same for all.
        lost: Number of rollouts that the machine lost, in all runs.
        figures: Means over seeds, by name.
        against: Difference from the first arm, by figure; empty for the first.
    """

    name: str
    seeds: tuple[int, ...]
    rollouts: tuple[int, ...]
    lost: int
    figures: Mapping[str, Interval]
    against: Mapping[str, Against]


def figures_of(runs: Iterable[Run]) -> dict[str, Figure]:
    """Return the figures that the runs have, by name."""
    runs = list(runs)
    turns = max((len(batch.acted) for run in runs for batch in run.batches), default=0)
    figures: dict[str, Figure] = {
        "reward": lambda run: run.mean("reward"),
        "reward at the end": lambda run: run.mean("reward", last=LAST),
    }
    for turn in range(turns):
        figures[f"errors, turn {turn + 1}"] = lambda run, turn=turn: run.mean("errors", turn)  # type: ignore[misc]
        figures[f"errors, turn {turn + 1}, at the end"] = lambda run, turn=turn: run.mean("errors", turn, last=LAST)  # type: ignore[misc]
    names = sorted({name for run in runs for row in run.losses for name in row if name.startswith("loss")})
    for name in names:
        figures[name] = lambda run, name=name: run.loss(name)  # type: ignore[misc]
    for name in COSTS:
        figures[name] = lambda run, name=name: run.costs.get(name)  # type: ignore[misc]
    return figures


def reports(plan: Plan, runs: Sequence[Run]) -> list[ArmReport]:
    """Return the results of each arm that has a finished run, in the plan's order."""
    figures = figures_of(runs)
    by_arm = {arm.name: {run.seed: run for run in runs if run.arm == arm.name} for arm in plan.arms}
    first = by_arm[plan.arms[0].name]
    found = []
    for name, own in by_arm.items():
        if not own:
            continue
        values = {figure: {seed: value(run) for seed, run in sorted(own.items())} for figure, value in figures.items()}
        kept = {figure: [one for one in of.values() if one is not None] for figure, of in values.items()}
        against = {}
        for figure, value in figures.items() if name != plan.arms[0].name else ():
            pairs = [(values[figure][seed], value(first[seed])) for seed in sorted(own) if seed in first]
            both = [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]
            if both:
                difference = interval(both)
                against[figure] = Against(difference, seeds_needed(difference))
        found.append(
            ArmReport(
                name,
                tuple(sorted(own)),
                tuple(own[seed].rollouts for seed in sorted(own)),
                sum(reward is None for run in own.values() for batch in run.batches for reward in batch.rewards),
                {figure: interval(of) for figure, of in kept.items() if of},
                against,
            )
        )
    return found


def data_of(arms: Sequence[ArmReport]) -> list[dict[str, Any]]:
    """Return reports as plain data; an interval of one seed has no width."""
    found = []
    for arm in arms:
        row = asdict(arm)
        row["figures"] = {name: _plain(one) for name, one in arm.figures.items()}
        row["against"] = {
            name: {**_plain(one.difference), "seen": one.seen, "seeds_needed": one.seeds_needed}
            for name, one in arm.against.items()
        }
        found.append(row)
    return found


def _plain(one: Interval) -> dict[str, Any]:
    known = one.count > 1
    return {
        "mean": one.mean,
        "low": one.low if known else None,
        "high": one.high if known else None,
        "deviation": one.deviation if known else None,
        "seeds": one.count,
    }


def text(arms: Sequence[ArmReport]) -> str:
    """Return the table: a row for each figure, a column for each arm, and the differences between arms."""
    if not arms:
        return "no run has finished yet\n"
    names = list(dict.fromkeys(name for arm in arms for name in arm.figures))
    head = [""] + [f"{arm.name} (n={len(arm.seeds)})" for arm in arms]
    rows = [
        [name] + [_shown(arm.figures[name]) if name in arm.figures else "-" for arm in arms]
        for name in names
        if any(arm.figures.get(name) and arm.figures[name].mean for arm in arms)
    ]
    lines = [*_table(head, rows), "", f"mean +- half of the 95 % interval over seeds (t); at the end: last {LAST:.0%}"]
    rollouts = sorted({count for arm in arms for count in arm.rollouts})
    lines.append(f"rollouts of a run: {', '.join(map(str, rollouts))}; lost: {sum(arm.lost for arm in arms)}")
    changed = [
        [f"{arm.name} - {arms[0].name}", name, _shown(one.difference), _verdict(one)]
        for arm in arms
        for name, one in arm.against.items()
        if name.startswith(("reward", "errors"))
    ]
    if changed:
        lines += ["", *_table(["paired by seed", "figure", "difference", "seen; seeds for 80 % power"], changed)]
    return "\n".join(lines) + "\n"


def _verdict(one: Against) -> str:
    needed = "unknown" if one.seeds_needed is None else str(one.seeds_needed)
    return f"{'yes' if one.seen else 'no'}; {needed}"


def _shown(one: Interval) -> str:
    half = f" +- {_number(one.half)}" if one.count > 1 else ""
    return f"{_number(one.mean)}{half}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 1 else f"{value:.3f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    ]
