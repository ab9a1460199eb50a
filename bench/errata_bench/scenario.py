"""Scenarios: arms that are measured in turn, the figures of each arm, and the budgets for these figures."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .budgets import Budget
from .figures import Arms, Round

ACTION: dict[str, Any] = {"text": "x" * 64}
"""The action of a step in every echo environment."""

STOCK = "stock"
PLAIN = "errata, plain sockets"
MUX_1 = "errata, mux, frames of 1"
MUX_64 = "errata, mux, frames of 64"

ERRATA = "errata"
AGAINST = "against"
"""The server of the second interpreter, ``--against``."""


def arm_of(server: str, arm: str) -> str:
    """Return the name of one of `ERRATA`'s arms on another server, such as ``against, mux, frames of 1``."""
    return server + arm.removeprefix(ERRATA)


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure that a scenario gives.

    Args:
        key: Its name in the rounds.
        label: Its name for readers.
        unit: Its unit, empty for a count.
        compared: Whether its ratio to the baseline is meaningful.
    """

    key: str
    label: str
    unit: str = ""
    compared: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run a scenario.

    Args:
        sessions: Number of sessions.
        rounds: Number of times that each arm is measured.
        seconds: Duration of stepping, in each arm and round.
        sockets: Multiplexed sockets that the sessions share.
        directory: Directory on the disk that is measured; each server gets a directory of its own in it.
        smoke: Small and quick: it shows that everything runs and gives no figures.
        progress: Called with each line of progress.
        against: A second interpreter, with another version of Errata: each Errata arm is also measured with it.
        stock: Whether stock OpenEnv is measured.
    """

    sessions: int
    rounds: int
    seconds: float
    sockets: int
    directory: Path
    smoke: bool
    progress: Callable[[str], None]
    against: Path | None = None
    stock: bool = True

    @property
    def errata_servers(self) -> tuple[str, ...]:
        """The Errata servers that are measured: `ERRATA`, and `AGAINST` where there is a second interpreter."""
        return (ERRATA,) if self.against is None else (ERRATA, AGAINST)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a directory that is removed afterwards."""
        with tempfile.TemporaryDirectory(dir=self.directory, ignore_cleanup_errors=True) as made:
            yield Path(made)


@dataclass(slots=True)
class Found:
    """Results of a scenario: rounds by arm, notes for the reader, and the arms that failed, with the reasons."""

    arms: Arms
    notes: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A measurement with its arms.

    Args:
        name: Its name for ``--only``.
        title: Its name for readers.
        run: Function that measures.
        metrics: The figures, in the order of the table.
        budgets: The bounds that figures have to keep.
        sessions: Number of sessions in a whole run.
        smoke_sessions: Their number in a smoke run; 0 skips the scenario there, where others run the same code.
        seconds: Duration of stepping, in each arm and round.
        rounds: Number of times that each arm is measured in a whole run.
        baseline: The arm in the denominator of ratios.
        descriptors: Sockets that one process holds for each session.
        counted: What ``sessions`` counts.
        pairs: Whether it can measure a second interpreter, and leave the stock arm out.
    """

    name: str
    title: str
    run: Callable[[Plan], Awaitable[Found]]
    metrics: tuple[Metric, ...]
    budgets: tuple[Budget, ...] = ()
    sessions: int = 10_000
    smoke_sessions: int = 100
    seconds: float = 4.0
    rounds: int = 5
    baseline: str | None = STOCK
    descriptors: int = 1
    counted: str = "sessions"
    pairs: bool = False


async def alternate(plan: Plan, arms: Mapping[str, Callable[[], Awaitable[Round]]], notes: Sequence[str] = ()) -> Found:
    """Measure every arm in each round: in the given order, then backwards, and so on.

    An arm that fails is not measured again and its rounds are dropped; the others go on.

    Raises:
        RuntimeError: Every arm failed.
    """
    found: dict[str, list[Round]] = {arm: [] for arm in arms}
    failed: dict[str, str] = {}
    for number in range(plan.rounds):
        for arm in arms if number % 2 == 0 else reversed(list(arms)):
            if arm in failed:
                continue
            try:
                figures = await arms[arm]()
            except Exception as error:
                failed[arm] = f"{type(error).__name__}: {error}"
                plan.progress(f"round {number + 1} of {plan.rounds}: {arm} failed: {failed[arm]}")
                continue
            found[arm].append({**figures, "load_average": os.getloadavg()[0]})
            plan.progress(f"round {number + 1} of {plan.rounds}: {arm}: {summary(figures)}")
    if len(failed) == len(arms):
        raise RuntimeError("; ".join(f"{arm}: {reason}" for arm, reason in failed.items()))
    return Found({arm: rounds for arm, rounds in found.items() if arm not in failed}, list(notes), failed)


def summary(figures: Round) -> str:
    """Return the first few figures for a line of progress."""
    return ", ".join(f"{key} {value:,.4g}" for key, value in list(figures.items())[:4])
