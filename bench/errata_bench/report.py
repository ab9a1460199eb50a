"""Models of the results, as ``--json`` writes them. Change `SCHEMA` when a field changes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from .budgets import Budget
from .figures import Arms, Spread, ratio, spread
from .scenario import AGAINST, ERRATA, Scenario, arm_of

SCHEMA: Literal["errata-bench/2"] = "errata-bench/2"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Values(_Model):
    """Values of the rounds in their order, with median and range."""

    rounds: list[float]
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, found: Spread) -> Values:
        """Return the values, rounded to six digits."""
        return cls(
            rounds=[_short(value) for value in found.rounds],
            median=_short(found.median),
            low=_short(found.low),
            high=_short(found.high),
        )


class Figure(_Model):
    """One figure of one arm.

    Attributes:
        arm: Name of the arm: ``stock``, ``mux, frames of 1``, ...
        key: Name of the figure.
        label: Its name for readers.
        unit: Its unit, empty for a count.
        values: Its values by round.
        ratio: Ratio to the baseline arm in each round; None for the baseline itself and where it has no such figure.
        against: Ratio to the same arm on the second interpreter in each round; None where there is none.
    """

    arm: str
    key: str
    label: str
    unit: str
    values: Values
    ratio: Values | None = None
    against: Values | None = None


class Judged(_Model):
    """A budget and the measured values; ``met`` is None if the budget was not judged."""

    arm: str
    key: str
    must: str
    measured: float | None
    met: bool | None


class ScenarioReport(_Model):
    """Results of one scenario.

    Attributes:
        status: ``ok``; ``partly``: the arms in ``failed_arms`` failed, each for its reason; ``failed``: there are no
            figures, for ``reason``.
    """

    name: str
    title: str
    command: str
    status: Literal["ok", "partly", "failed"]
    reason: str = ""
    failed_arms: dict[str, str] = Field(default_factory=dict)
    seconds: float
    sessions: int
    counted: str
    rounds: int
    baseline: str | None
    load_average_before: float
    load_average_after: float
    notes: list[str] = Field(default_factory=list)
    figures: list[Figure] = Field(default_factory=list)
    budgets: list[Judged] = Field(default_factory=list)


class Interpreter(_Model):
    """The second interpreter.

    Attributes:
        executable: Its path, as given by ``--against``.
        python: Its version.
        errata: The version of Errata that it has installed.
        location: Directory of that installation.
    """

    executable: str
    python: str
    errata: str
    location: str


class Machine(_Model):
    """Description of the machine."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    versions: dict[str, str]
    data_dir: str
    file_system: str
    load_average_before: float
    load_average_after: float


class Report(_Model):
    """Results of one run."""

    schema_: Literal["errata-bench/2"] = Field(default=SCHEMA, alias="schema")
    made: str
    command: str
    smoke: bool
    machine: Machine
    against: Interpreter | None = None
    scenarios: list[ScenarioReport]


def figures(scenario: Scenario, arms: Arms) -> list[Figure]:
    """Return every figure that a scenario's rounds hold, in the order of its metrics and arms."""
    made = []
    for metric in scenario.metrics:
        for arm in arms:
            found = spread(arms, arm, metric.key)
            if found is None:
                continue
            compared = previous = None
            if scenario.baseline not in (None, arm) and metric.compared:
                compared = ratio(arms, arm, str(scenario.baseline), metric.key)
            if arm.startswith(ERRATA) and metric.compared:
                previous = ratio(arms, arm, arm_of(AGAINST, arm), metric.key)
            made.append(
                Figure(
                    arm=arm,
                    key=metric.key,
                    label=metric.label,
                    unit=metric.unit,
                    values=Values.of(found),
                    ratio=None if compared is None else Values.of(compared),
                    against=None if previous is None else Values.of(previous),
                )
            )
    return made


def judged(scenario: Scenario, arms: Arms, sessions: int, *, smoke: bool) -> list[Judged]:
    """Return a scenario's budgets with the measured values; a smoke run judges none."""
    units = {metric.key: metric.unit for metric in scenario.metrics}

    def one(budget: Budget) -> Judged:
        found = budget.measured(arms)
        return Judged(
            arm=budget.arm,
            key=budget.key,
            must=budget.text(units[budget.key]),
            measured=None if found is None else _short(found.median),
            met=None if smoke else budget.met(arms, sessions),
        )

    return [one(budget) for budget in scenario.budgets]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
