"""What the agent reads of an observation. Standard library and the kit's text only: teachers and
viewers import nothing else."""

from __future__ import annotations

from typing import Any

from errata_environment.published.agent_text import fields_of, result_text

AGENT_TEXT_VERSION = "2"
"""Version of the texts; changes whenever the text of any observation does."""


def agent_text(observation: Any) -> str:
    """Return what the agent reads (PROTOCOL B4): never a marker, a hint key or a reward.

    Args:
        observation: A `TerminalObservation`, or the decoded ``observation`` mapping of a payload.

    Returns:
        The output, then one bracketed line for each fact that the output does not show.
    """
    data = fields_of(observation)
    if data.get("tool") == "reset":
        instruction: str = data.get("instruction") or f"A shell is open in {data.get('cwd') or 'a sandbox'}."
        return instruction
    return result_text(data, _DONE)


_DONE = {"write_file": "[written]", "read_file": "[empty file]", "submit": "[submitted]"}
