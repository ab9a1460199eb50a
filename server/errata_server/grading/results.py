"""Reads the result that a program of the grader prints: one line of JSON with a nonce that the agent cannot know."""

from __future__ import annotations

import json
from typing import Any

from errata_server.sandbox.base import CommandResult


class NoVerdict(Exception):
    """A run ended without a verdict; the text says how."""


def ended(result: CommandResult) -> str:
    """Return how a command ended, in words."""
    return "was killed at its time limit" if result.timed_out else f"ended with {result.exit_code}"


def nonced(result: CommandResult, nonce: str) -> dict[str, Any]:
    """Return the last JSON object on standard output whose ``nonce`` is the one that was handed in.

    Raises:
        NoVerdict: There is none.
    """
    for line in reversed(result.stdout.splitlines()):
        if nonce in line:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict) and value.get("nonce") == nonce:
                return value
    raise NoVerdict(f"it {ended(result)} without a verdict: {result.stderr[-500:]}")
