"""What the reports of storms have to say. Each storm has a file of its own, so that they run side by side."""

from __future__ import annotations

import os

from .storm import Report

COUNTERS = "tests.chaos.environments:"
SEED = {"seed": int(os.environ["ERRATA_CHAOS_SEED"])} if "ERRATA_CHAOS_SEED" in os.environ else {}


def check(report: Report) -> None:
    print(report.as_json())
    assert report.broken == {}, report
    full = ("No space left", "disk is full", "kept for the journal")
    told = [line for line in report.log if not any(words in line for words in full)]
    assert told == [], "an operator is told of a full disk, and of nothing else"
    assert report.least_steps > 0 and report.compared > 0 and report.resumes > report.plan.sessions
