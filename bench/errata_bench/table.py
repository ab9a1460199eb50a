"""The report as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from .report import Figure, Judged, Report, ScenarioReport, Values
from .scenario import AGAINST

Row = tuple[str, ...]
"""Widths of the columns: name, median, range, ratio, its range, ratio to the second interpreter, its range, budget."""


def text(report: Report) -> str:
    """Return the whole report."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    machine = report.machine
    yield f"{report.command}   ({report.made})"
    yield (
        f"{machine.cores} cores ({machine.cpu}), {machine.memory_gib:g} GiB, Linux {machine.kernel}, "
        f"Python {machine.python}; load average {machine.load_average_before:g} before, "
        f"{machine.load_average_after:g} after"
    )
    yield f"data directory {machine.data_dir} on {machine.file_system}; " + ", ".join(
        f"{name} {version}" for name, version in machine.versions.items()
    )
    if report.against is not None:
        yield (
            f"against {report.against.location}: Errata {report.against.errata} under {report.against.executable}, "
            f"Python {report.against.python}"
        )
    if report.smoke:
        yield "SMOKE RUN: shows that everything runs; small, short, and no measurement"
    for scenario in report.scenarios:
        yield ""
        yield from scenario_lines(scenario)


def scenario_lines(scenario: ScenarioReport) -> Iterator[str]:
    """Yield the lines of one scenario: a row for each figure and arm."""
    yield f"{scenario.name}: {scenario.title}"
    yield (
        f"  $ {scenario.command}   {scenario.sessions:,} {scenario.counted}, {scenario.rounds} rounds, "
        f"{scenario.seconds:.0f} s, load average {scenario.load_average_before:g} to {scenario.load_average_after:g}"
    )
    for note in scenario.notes:
        yield f"  {note}"
    if scenario.status == "failed":
        yield f"  FAILED: {scenario.reason}"
        return
    for arm, reason in scenario.failed_arms.items():
        yield f"  FAILED: {arm}: {reason}"
    against = f"to {scenario.baseline}" if scenario.baseline else ""
    rows: list[Row] = [("", "median", "rounds", against, "rounds", f"to {AGAINST}", "rounds", "")]
    label = ""
    for figure in scenario.figures:
        if figure.label != label:
            label = figure.label
            rows.append((f"{label}{f', {figure.unit}' if figure.unit else ''}", *[""] * 7))
        rows.append(_row(figure, scenario.budgets))
    if not any(figure.against for figure in scenario.figures):
        rows = [row[:5] + row[7:] for row in rows]
    if not scenario.baseline:
        rows = [row[:3] + row[5:] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        yield f"  {row[0]:<{widths[0]}}  {'  '.join(cells)}  {row[-1]}".rstrip()


def _row(figure: Figure, budgets: list[Judged]) -> Row:
    own = [budget for budget in budgets if (budget.arm, budget.key) == (figure.arm, figure.key)]
    must = "; ".join(f"must {budget.must}: {_verdict(budget)}" for budget in own)
    return (
        f"    {figure.arm}",
        number(figure.values.median),
        _range(figure.values),
        *("" if figure.ratio is None else f"{number(figure.ratio.median)} x", _range(figure.ratio)),
        *("" if figure.against is None else f"{figure.against.median:.3f} x", _range(figure.against)),
        must,
    )


def _verdict(budget: Judged) -> str:
    return "not judged" if budget.met is None else "met" if budget.met else "MISSED"


def _range(values: Values | None) -> str:
    if values is None or len(values.rounds) == 1:
        return ""
    return f"{number(values.low)} to {number(values.high)}"


def number(value: float) -> str:
    """Return a number with three or four significant digits."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.2g}"
