"""Types of the wire: action, observation, state."""

from __future__ import annotations

from typing import ClassVar

from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from errata_environment.published.results import ShellState, ToolResult
from errata_protocol.markers import ErrorMarkers

TOOL_NAMES = ("run", "write_file", "read_file", "submit")


class TerminalAction(Action):  # type: ignore[misc]  # openenv ships no types
    """One call of one tool. A tool that does not exist is answered by a marked observation, not refused.

    Attributes:
        tool: ``run``, ``write_file``, ``read_file`` or ``submit``.
        command: Bash text of ``run``.
        path: File of ``write_file`` and ``read_file``; relative to the shell's current directory.
        content: Text that ``write_file`` writes, as UTF-8.
        timeout_s: Time limit of ``run`` in seconds; the server's default without it, never above the server's maximum.
    """

    tool: str = Field(default="run", description="run, write_file, read_file or submit")
    command: str = Field(default="", description="run: bash text")
    path: str = Field(default="", description="write_file, read_file: absolute, or relative to the current directory")
    content: str | None = Field(default=None, description="write_file: the whole new content; empty empties the file")
    timeout_s: float | None = Field(default=None, description="run: time limit in seconds")


class _Task(ErrorMarkers, Observation):  # type: ignore[misc]  # openenv ships no types
    """The fields that come first on the wire."""

    instruction: str = ""
    task_id: str = ""


class TerminalObservation(ToolResult, _Task):
    """The result of one tool call: the task, and the fields of `ToolResult`.

    Attributes:
        instruction: The task, at reset only.
        task_id: The task, empty for a bare shell.
    """

    VOLATILE_FIELDS: ClassVar[frozenset[str]] = frozenset({"duration_s"})


class _TaskState(State):  # type: ignore[misc]  # openenv ships no types
    """The field that comes first on the wire."""

    task_id: str = ""


class TerminalState(ShellState, _TaskState):
    """State of the episode; ``episode_id`` and ``step_count`` are OpenEnv's, the fields of a shell `ShellState`'s.

    Attributes:
        task_id: The task, empty for a bare shell.
    """
