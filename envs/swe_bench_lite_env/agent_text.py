"""What the agent reads of an observation. Standard library and the kit's text only: teachers and
viewers import nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from errata_environment.published.agent_text import fields_of, result_text

AGENT_TEXT_VERSION = "1"
"""Changes whenever the text of any observation would."""

FEW_TURNS = 5
"""From so few turns left on, the text says how many there are."""


def agent_text(observation: Any) -> str:
    """Return what the agent reads (PROTOCOL B4): never a marker, a hint key or a reward.

    Args:
        observation: A `SweObservation`, or the decoded ``observation`` mapping of a payload.

    Returns:
        At reset the issue and where the repository is. Later the output as it came, then one bracketed line for each
        fact that the output does not show.
    """
    data = fields_of(observation)
    if data.get("tool") == "reset":
        return _task(data)
    return result_text(data, _DONE, _budget(data))


_DONE = {
    "write_file": "[written]",
    "read_file": "[empty file]",
    "edit": "[replaced]",
    "apply_patch": "[applied]",
    "search": "[no match]",
    "submit": "[submitted]",
}
_BUDGETS = {"turns": "no turn is left", "seconds": "the time is used up", "output_bytes": "the output is used up"}


def _task(data: Mapping[str, Any]) -> str:
    issue = str(data.get("problem_statement") or "").rstrip("\n")
    where = data.get("cwd") or "a sandbox"
    turns = data.get("turns_left")
    limit = "" if turns is None else f" You have {turns} turns."
    blocked = data.get("blocked_programs")
    without = f" These programs are blocked: {', '.join(blocked)}." if blocked else ""
    return (
        f"{issue}\n\n[The repository {data.get('repo') or ''} is in {where}. Change its code so that this issue is "
        "resolved, then submit: tests that you do not see decide, and changes of test files do not count."
        f"{limit}{without}]"
    )


def _budget(data: Mapping[str, Any]) -> str:
    spent = data.get("budget_spent")
    if spent:
        return f"[the episode is over: {_BUDGETS.get(spent, spent)}]\n"
    turns = data.get("turns_left")
    if turns is None or turns > FEW_TURNS or data.get("done") or data.get("tool") == "submit":
        return ""
    return f"[turns left: {turns}]\n"
