"""The scripted turns of the demo: one task, four good turns and four bad ones, and its two teachers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..teachers import Answer, Prompt, says

TASK = "file-permissions"
"""A task that ships with the terminal environment; what is played here is worth 0, 0.5 or 1."""

PROMPT = "You have a shell. "

TOOLS = ("run", "submit")

Turn = tuple[str, dict[str, Any]]
"""What the assistant does in one turn: the name of the tool that it calls, and the arguments."""


def run(command: str) -> Turn:
    """Return a call of the shell tool."""
    return "run", {"command": command}


LOOK = run("cd site && ls")
REPAIR = run(
    "find . -type f -exec chmod 640 {} + && find . -name '*.sh' -type f -exec chmod 750 {} + && "
    "find conf/secrets -type f -exec chmod 600 {} + && find . -depth -type d -exec chmod 750 {} +"
)
SUBMIT: Turn = ("submit", {})

WRONG_PATH = run("cd /workspace/sites && ls")
WRONG_COMMAND = run("list site")
UNFINISHED = run("find . -type f -exec chmod 640")
CARELESS = run("find . -name '*.sh' -exec chmod 750 {} + && find . -depth -type d -exec chmod 750 {} +")
"""No error: it ends with status 0, with the plain files forgotten and half of the reward."""

BETTER: dict[str, Turn] = {
    WRONG_PATH[1]["command"]: LOOK,
    WRONG_COMMAND[1]["command"]: LOOK,
    UNFINISHED[1]["command"]: REPAIR,
}
"""For each command that fails, what the student is shown behind its hint."""

EPISODES: tuple[tuple[Turn, ...], ...] = (
    (LOOK, REPAIR, SUBMIT),
    (LOOK, CARELESS, SUBMIT),
    (LOOK, UNFINISHED, REPAIR, SUBMIT),
    (WRONG_PATH, LOOK, REPAIR, SUBMIT),
    (WRONG_PATH, LOOK, UNFINISHED, CARELESS, SUBMIT),
    (WRONG_COMMAND, LOOK, CARELESS, SUBMIT),
)
"""Shown as often as each other: a student that has learned them errs in every second episode or so."""

LAST_WORDS = "Done."


def turn_text(turn: Turn) -> str:
    """Return the assistant's part of a turn, its tool call, as the tiny policy's chat template writes it.

    The text has neither the tool's answer nor the token that ends the turn.
    """
    name, arguments = turn
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def careful(prompt: Prompt) -> Answer:
    """Return the answer of a teacher that knows the task: it looks first, and repairs what it has seen."""
    name, arguments = REPAIR if _has_looked(prompt.messages) else LOOK
    return says(name, **arguments)


def hasty(prompt: Prompt) -> Answer:
    """Return the answer of a teacher that does not know the task."""
    name, arguments = CARELESS
    return says(name, **arguments)


def _has_looked(messages: tuple[Mapping[str, Any], ...]) -> bool:
    return any(message["role"] == "tool" and "conf" in str(message["content"]).split() for message in messages)
