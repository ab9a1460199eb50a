"""What an agent reads of a tool's result. Standard library only, so that teachers and viewers import nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def fields_of(observation: Any) -> Mapping[str, Any]:
    """Return the fields of an observation.

    Args:
        observation: An observation, or the decoded ``observation`` mapping of a payload.
    """
    found: Mapping[str, Any] = observation if isinstance(observation, Mapping) else observation.model_dump(mode="json")
    return found


def result_text(data: Mapping[str, Any], done: Mapping[str, str], *notices: str) -> str:
    """Return the text of a tool's result, never a marker, a hint key or a reward (PROTOCOL B4).

    Args:
        data: The fields of a `errata_environment.published.results.ToolResult`.
        done: The text for a tool that succeeded without output, by the tool's name.
        *notices: Further lines at the end; empty ones are left out.

    Returns:
        The output as it came, then one bracketed line for each fact that the output does not show.
    """
    parts = [block(data.get("stdout")), block(data.get("content"))]
    if data.get("stderr"):
        parts.append("[stderr]\n" + block(data.get("stderr")))
    background = data.get("killed_background")
    ended = data.get("exit_code") is not None and not data.get("limit_hit")
    if data.get("truncated"):
        parts.append("[truncated: part of the text is left out]\n")
    if data.get("shell_saved") is False and ended:
        parts.append("[directory, variables and functions are as before this command]\n")
    if data.get("limit_hit"):
        parts.append(f"[limit reached: {data.get('limit_hit')}]\n")
    if background:
        parts.append(f"[killed when the command ended: {', '.join(background)}]\n")
    if data.get("timed_out"):
        limit_s = data.get("time_limit_s")
        parts.append("[killed: time limit]\n" if limit_s is None else f"[killed: time limit of {limit_s:g} s]\n")
    elif data.get("exit_code") is not None:
        parts.append(f"[exit {data.get('exit_code')}]\n")
    elif not any(parts) and data.get("tool") in done:
        parts.append(done[str(data.get("tool"))])
    return "".join(block(part) for part in (*parts, *notices)).rstrip("\n")


def block(text: str | None) -> str:
    """Return ``text`` ending in a newline, so that a notice after it starts a line; empty stays empty."""
    if not text or text.endswith("\n"):
        return text or ""
    return text + "\n"
