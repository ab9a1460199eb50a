"""Fields of observations and states that every environment with a shell has. On the wire fields keep this order."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ToolResult(BaseModel):
    """The fields of an observation that say what a tool did.

    List it first, before a class with the fields that come earlier on the wire: ``class MyObservation(ToolResult,
    MyTaskFields)``, where ``MyTaskFields`` is an ``ErrorMarkers`` and an ``Observation``.

    Attributes:
        tool: The tool that was called, ``reset`` at reset.
        stdout: Kept standard output; undecodable bytes as ``\\xNN``.
        stderr: Kept standard error, or why a file tool refused.
        exit_code: The command's exit status; None when it was killed at its time limit, or for another tool.
        timed_out: The command was killed at its time limit.
        time_limit_s: The time limit that ``run`` was held to, in seconds; None for another tool.
        truncated: Part of the output, or of the file, is left out.
        limit_hit: The limit that ended or broke the command.
        content: Text that ``read_file`` read.
        killed_background: Names of processes that were still running when the command ended, and were killed.
        shell_saved: The shell's directory, variables and functions carry over to the next command.
        cwd: The shell's current directory after the call.
        duration_s: Wall time of the call in seconds.
    """

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


class ShellState(BaseModel):
    """The fields of a state that every episode in a shell has; to be listed like `ToolResult`.

    Attributes:
        seed: Seed of this episode.
        cwd: The shell's current directory.
        submitted: ``submit`` was called.
        done: The episode is over.
    """

    seed: int | None = None
    cwd: str = ""
    submitted: bool = False
    done: bool = False
