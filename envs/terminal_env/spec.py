"""What this package publishes under the entry point ``errata.environments``."""

from __future__ import annotations

from errata_environment.published.tools import READ_FILE, RUN, WRITE_FILE, tool
from errata_protocol.environment import EnvironmentSpec

from .agent_text import AGENT_TEXT_VERSION, agent_text
from .models import TerminalAction, TerminalObservation

TOOLS = (
    RUN,
    WRITE_FILE,
    READ_FILE,
    tool("submit", "Say that the task is finished. It is then graded, and the episode is over."),
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
