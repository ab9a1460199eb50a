"""What the agent reads of an observation. Standard library only, so that teachers and viewers import nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AGENT_TEXT_VERSION = "2"
"""Version of the texts; changes whenever the text of any observation does."""


def agent_text(observation: Any) -> str:
    """Return what the agent reads (PROTOCOL B4): never a marker, a hint key or a reward.

    Args:
        observation: A `TerminalObservation`, or the decoded ``observation`` mapping of a payload.

    Returns:
        The output, then one bracketed line for each fact that the output does not show.
    """
    data: Mapping[str, Any] = observation if isinstance(observation, Mapping) else observation.model_dump(mode="json")

    def field(name: str) -> Any:
        return data.get(name)

    tool = field("tool")
    if tool == "reset":
        return field("instruction") or f"A shell is open in {field('cwd') or 'a sandbox'}."
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
    return "".join(parts).rstrip("\n")


_DONE = {"write_file": "[written]", "read_file": "[empty file]", "submit": "[submitted]"}


def _block(text: str | None) -> str:
    """Return ``text`` ending in a newline, so that a notice after it starts a line; empty stays empty."""
    if not text or text.endswith("\n"):
        return text or ""
    return text + "\n"
