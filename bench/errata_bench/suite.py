"""Runs scenarios one after the other. One that fails does not affect the results of the others."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from .machine import allow_descriptors
from .report import ScenarioReport, figures, judged
from .scenario import Found, Plan, Scenario

SPARE_DESCRIPTORS = 200
SCENARIO_S = 3 * 3600.0
"""Time limit of a scenario in seconds."""
SMOKE_S = 60.0


async def run(scenario: Scenario, plan: Plan, command: str) -> ScenarioReport:
    """Run one scenario; its report also describes errors.

    Args:
        scenario: The scenario.
        plan: How to run it.
        command: Command that measures it again.
    """
    began, load = time.monotonic(), os.getloadavg()[0]
    reason = ""
    result = Found({})
    try:
        most = allow_descriptors()
        if plan.sessions * scenario.descriptors + SPARE_DESCRIPTORS > most:
            raise RuntimeError(f"{plan.sessions} sockets in one process need a higher limit of open files than {most}")
        async with asyncio.timeout(SMOKE_S if plan.smoke else SCENARIO_S) as limit:
            result = await scenario.run(plan)
    except TimeoutError as error:
        reason = f"it was not over after {SMOKE_S if plan.smoke else SCENARIO_S:g} s" if limit.expired() else str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    return ScenarioReport(
        name=scenario.name,
        title=scenario.title,
        command=command,
        status="failed" if reason else "partly" if result.failed else "ok",
        reason=reason,
        failed_arms=result.failed,
        seconds=round(time.monotonic() - began, 1),
        sessions=plan.sessions,
        counted=scenario.counted,
        rounds=plan.rounds,
        baseline=scenario.baseline if scenario.baseline in result.arms else None,
        load_average_before=round(load, 2),
        load_average_after=round(os.getloadavg()[0], 2),
        notes=result.notes,
        figures=figures(scenario, result.arms),
        budgets=judged(scenario, result.arms, plan.sessions, smoke=plan.smoke),
    )


def chosen(
    scenarios: Sequence[Scenario], only: Sequence[str], *, smoke: bool = False, pairs: bool = False
) -> list[Scenario]:
    """Return the named scenarios in their own order; without names all, in a smoke run those that are small.

    Args:
        scenarios: All scenarios.
        only: Their names.
        smoke: Whether it is a smoke run.
        pairs: Only those that can measure a second interpreter, or leave the stock arm out.

    Raises:
        ValueError: A name does not exist, or a named scenario cannot be measured in pairs.
    """
    known = {scenario.name for scenario in scenarios}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise ValueError(f"no scenario {', '.join(unknown)}; there are: {', '.join(s.name for s in scenarios)}")
    if pairs:
        able = [scenario for scenario in scenarios if scenario.pairs]
        refused = set(only) - {scenario.name for scenario in able}
        if refused:
            raise ValueError(
                f"{', '.join(sorted(refused))} cannot run with --against or --no-stock; "
                f"these can: {', '.join(scenario.name for scenario in able)}"
            )
        scenarios = able
    if only:
        return [scenario for scenario in scenarios if scenario.name in only]
    return [scenario for scenario in scenarios if scenario.smoke_sessions or not smoke]
