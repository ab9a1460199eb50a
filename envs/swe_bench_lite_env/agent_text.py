"""What the agent reads of an observation. Standard library only, so that teachers and viewers import nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    data: Mapping[str, Any] = observation if isinstance(observation, Mapping) else observation.model_dump(mode="json")

    def field(name: str) -> Any:
        return data.get(name)

    tool = field("tool")
    if tool == "reset":
        return _task(data)
    parts = [_block(field("stdout")), _block(field("content"))]
    if field("stderr"):
        parts.append("[stderr]\n" + _block(field("stderr")))
    background = field("killed_background")
    ended = field("exit_code") is not None and not field("limit_hit")
    if field("truncated"):
        parts.append("[truncated: part of the text is left out]\n")
    if field("shell_saved") is False and ended:
        parts.append("[directory, variables and functions are as before this command]\n")
    if field("limit_hit"):
        parts.append(f"[limit reached: {field('limit_hit')}]\n")
    if background:
        parts.append(f"[killed when the command ended: {', '.join(background)}]\n")
    if field("timed_out"):
        limit_s = field("time_limit_s")
        parts.append("[killed: time limit]\n" if limit_s is None else f"[killed: time limit of {limit_s:g} s]\n")
    elif field("exit_code") is not None:
        parts.append(f"[exit {field('exit_code')}]\n")
    elif not any(parts) and tool in _DONE:
        parts.append(_DONE[tool])
    parts.append(_budget(data))
    return "".join(_block(part) for part in parts).rstrip("\n")


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


def _block(text: str | None) -> str:
    """Return ``text`` ending in a newline, so that a notice after it starts a line; empty stays empty."""
    if not text or text.endswith("\n"):
        return text or ""
    return text + "\n"
