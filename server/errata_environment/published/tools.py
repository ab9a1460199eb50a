"""Descriptions of tools for agents, as `errata_protocol.environment.EnvironmentSpec.tools` lists them."""

from __future__ import annotations

from typing import Any


def tool(name: str, description: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """Return the description of a tool.

    Args:
        name: Name of the tool.
        description: Text about the tool for the agent.
        required: Names of the arguments that have to be given.
        **properties: JSON schema of each argument, by its name.
    """
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


PATH = {"type": "string", "description": "Absolute, or relative to the shell's current directory."}
"""Schema of an argument that is a path."""

RUN = tool(
    "run",
    "Run a bash command and return its output. Directory, exported variables and functions carry over to the next "
    "command; background processes end with the command.",
    ("command",),
    command={"type": "string", "description": "Bash text; may have several lines."},
    timeout_s={"type": "number", "exclusiveMinimum": 0, "description": "Time limit in seconds."},
)

READ_FILE = tool("read_file", "Return the content of a file.", ("path",), path=PATH)

WRITE_FILE = tool(
    "write_file",
    "Create or replace a file, parent directories included.",
    ("path", "content"),
    path=PATH,
    content={"type": "string", "description": "The whole new content."},
)
