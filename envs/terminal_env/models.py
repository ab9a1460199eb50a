"""Types of the wire: action, observation, state."""

from __future__ import annotations

from typing import ClassVar

from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

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


class TerminalObservation(ErrorMarkers, Observation):  # type: ignore[misc]  # openenv ships no types
    """The result of one tool call.

    Attributes:
        instruction: The task, at reset only.
        task_id: The task, empty for a bare shell.
        tool: The tool that was called, ``reset`` at reset.
        stdout: Kept standard output; undecodable bytes as ``\\xNN``.
        stderr: Kept standard error, or the reason why a file tool refused.
        exit_code: The command's exit status; None when it was killed at its time limit, or for another tool.
        timed_out: The command was killed at its time limit.
        time_limit_s: The time limit that ``run`` was held to, in seconds; None for another tool.
        truncated: Part of the output, or of the file, is left out.
        limit_hit: The limit that ended or broke the command.
        content: Text that ``read_file`` read; otherwise None.
        killed_background: Names of processes that were still running when the command ended, and were killed.
        shell_saved: The shell's directory, variables and functions carry over to the next command.
        cwd: The shell's current directory after the call.
        duration_s: Wall time of the call in seconds.
    """

    VOLATILE_FIELDS: ClassVar[frozenset[str]] = frozenset({"duration_s"})

    instruction: str = ""
    task_id: str = ""
    tool: str = ""
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    time_limit_s: float | None = None
    truncated: bool = False
    limit_hit: str | None = None
    content: str | None = None
    killed_background: list[str] = Field(default_factory=list)
    shell_saved: bool = True
    cwd: str = ""
    duration_s: float = 0.0


class TerminalState(State):  # type: ignore[misc]  # openenv ships no types
    """State of the episode; ``episode_id`` and ``step_count`` are OpenEnv's.

    Attributes:
        task_id: The task, empty for a bare shell.
        seed: Seed of this episode.
        cwd: The shell's current directory.
        submitted: ``submit`` was called.
        done: The episode is over.
    """

    task_id: str = ""
    seed: int | None = None
    cwd: str = ""
    submitted: bool = False
    done: bool = False
