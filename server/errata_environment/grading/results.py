"""Parses the result that a grader's program prints: a line of JSON with a nonce that the agent cannot know."""

from __future__ import annotations

import json
from typing import Any

from errata_server.sandbox.base import CommandResult


class NoVerdict(Exception):
    """A grading run ended without a verdict; the message says how."""


def ended(result: CommandResult) -> str:
    """Describe how a command ended: by its time limit or with which exit code."""
    return "was killed at its time limit" if result.timed_out else f"ended with {result.exit_code}"


def nonced(result: CommandResult, nonce: str) -> dict[str, Any]:
    """Return the last line of standard output that is a JSON object with this ``nonce``.

    Raises:
        NoVerdict: There is no such line.
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
