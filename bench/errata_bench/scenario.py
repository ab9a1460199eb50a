"""What a scenario is: arms that are measured in turn, the figures they give, the budgets these are held to."""

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
"""What a step says in every echo environment."""

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
        label: In words.
        unit: Its unit, empty for a count.
        compared: Whether its ratio to the baseline says anything.
    """

    key: str
    label: str
    unit: str = ""
    compared: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """How a scenario is to run.

    Args:
        sessions: How many.
        rounds: How often each arm is measured.
        seconds: Of stepping, in each arm and round.
        sockets: Multiplexed sockets that the sessions share.
        directory: On the disk that is measured; each server gets a directory of its own in it.
        smoke: Small and quick: shows that it runs, measures nothing.
        progress: Takes one line.
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
        """Give a directory that is gone afterwards."""
        with tempfile.TemporaryDirectory(dir=self.directory, ignore_cleanup_errors=True) as made:
            yield Path(made)


@dataclass(slots=True)
class Found:
    """What a scenario found: rounds by arm, what a reader has to know, and which arms failed and why."""

    arms: Arms
    notes: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something that is measured.

    Args:
        name: For ``--only``.
        title: In words.
        run: Measures.
        metrics: The figures, in the order of the table.
        budgets: What has to be reached.
        sessions: How many, in a whole run; a smoke run has `smoke_sessions`.
        smoke_sessions: How many in a smoke run; 0 leaves it out, where other scenarios run the same code.
        seconds: Of stepping, in each arm and round.
        rounds: How often each arm is measured in a whole run.
        baseline: The arm that ratios are taken to.
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

    An arm that fails is measured no more and its rounds are dropped; the others go on.

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
