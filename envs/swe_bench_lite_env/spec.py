"""What this package publishes under the entry point ``errata.environments``."""

from __future__ import annotations

from errata_environment.published.tools import PATH, RUN, WRITE_FILE, tool
from errata_protocol.environment import EnvironmentSpec

from .agent_text import AGENT_TEXT_VERSION, agent_text
from .models import SweAction, SweObservation

SUBMIT_TIMEOUT_S = 4 * 3600.0
"""How long a client waits for a verdict. Most of it is the queue for a grading slot; a server that dies is noticed."""


TOOLS = (
    RUN,
    tool(
        "read_file",
        "Return a file, or some of its lines.",
        ("path",),
        path=PATH,
        first_line={"type": "integer", "minimum": 1, "description": "First line to return, from 1."},
        last_line={"type": "integer", "minimum": 1, "description": "Last line to return, inclusive."},
    ),
    WRITE_FILE,
    tool(
        "edit",
        "Replace a text that occurs exactly once in a file.",
        ("path", "old_text", "new_text"),
        path=PATH,
        old_text={
            "type": "string",
            "minLength": 1,
            "description": "The text as it stands in the file, with its line breaks and indentation.",
        },
        new_text={"type": "string", "description": "The text in its place; empty deletes it."},
    ),
    tool(
        "apply_patch",
        "Apply a unified diff at the root of the repository: all of it, or nothing.",
        ("patch",),
        patch={"type": "string", "description": "As git diff prints it, with a/ and b/ before the paths."},
    ),
    tool(
        "search",
        "List the lines that match a regular expression, as path:line:text.",
        ("pattern",),
        pattern={"type": "string", "minLength": 1, "description": "Extended regular expression."},
        path={**PATH, "description": "File or directory; the current directory without it."},
    ),
    tool("submit", "Say that the issue is resolved. The repository is then graded, and the episode is over."),
)

SPEC = EnvironmentSpec(
    name="swe_bench_lite",
    factory="swe_bench_lite_env.server.environment:SweBenchLiteEnvironment",
    action_cls=SweAction,
    observation_cls=SweObservation,
    agent_text=agent_text,
    agent_text_version=AGENT_TEXT_VERSION,
    tools=TOOLS,
    state_cls="swe_bench_lite_env.models:SweState",
    sandbox=True,
    closing_tool="submit",
    call_timeouts_s={"submit": SUBMIT_TIMEOUT_S},
    unusable="swe_bench_lite_env.server.offered:unusable",
)
