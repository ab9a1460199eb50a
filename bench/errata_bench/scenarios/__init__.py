"""All scenarios, in the order in which they run."""

from __future__ import annotations

from ..scenario import Scenario
from . import (
    burst,
    constants,
    journal,
    memory,
    opens,
    plain,
    restart,
    resume,
    scale,
    state_at,
    steps,
    terminal,
    workers,
)

SCENARIOS: tuple[Scenario, ...] = (
    *opens.SCENARIOS,
    *burst.SCENARIOS,
    *steps.SCENARIOS,
    *plain.SCENARIOS,
    *scale.SCENARIOS,
    *journal.SCENARIOS,
    *memory.SCENARIOS,
    *resume.SCENARIOS,
    *restart.SCENARIOS,
    *state_at.SCENARIOS,
    *terminal.SCENARIOS,
    *workers.SCENARIOS,
    *constants.SCENARIOS,
)
