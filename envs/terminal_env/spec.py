"""What this package publishes under the entry point ``errata.environments``."""

from __future__ import annotations

from typing import Any

from errata_protocol.environment import EnvironmentSpec

from .agent_text import AGENT_TEXT_VERSION, agent_text
from .models import TerminalAction, TerminalObservation


def _tool(name: str, description: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": list(required),
            "additionalProperties": False,
        },
    }


_PATH = {"type": "string", "description": "Absolute, or relative to the shell's current directory."}

TOOLS = (
    _tool(
        "run",
        "Run a bash command and return its output. Directory, exported variables and functions carry over to the next "
        "command; background processes end with the command.",
        ("command",),
        command={"type": "string", "description": "Bash text; may have several lines."},
        timeout_s={"type": "number", "exclusiveMinimum": 0, "description": "Time limit in seconds."},
    ),
    _tool(
        "write_file",
        "Create or replace a file, parent directories included.",
        ("path", "content"),
        path=_PATH,
        content={"type": "string", "description": "The whole new content."},
    ),
    _tool("read_file", "Return the content of a file.", ("path",), path=_PATH),
    _tool("submit", "Say that the task is finished. It is then graded, and the episode is over."),
)

SPEC = EnvironmentSpec(
    name="terminal",
    factory="terminal_env.server.environment:TerminalEnvironment",
    action_cls=TerminalAction,
    observation_cls=TerminalObservation,
    agent_text=agent_text,
    agent_text_version=AGENT_TEXT_VERSION,
    tools=TOOLS,
    state_cls="terminal_env.models:TerminalState",
    sandbox=True,
    closing_tool="submit",
    unusable="terminal_env.server.tasks:unusable",
)
