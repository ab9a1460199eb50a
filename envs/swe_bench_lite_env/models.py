"""What goes over the wire: action, observation, state. Nothing here may hold a gold patch, a test patch or a hint."""

from __future__ import annotations

from typing import ClassVar

from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from errata_protocol.markers import ErrorMarkers

TOOL_NAMES = ("run", "read_file", "write_file", "edit", "apply_patch", "search", "submit")


class SweAction(Action):  # type: ignore[misc]  # openenv ships no types
    """One call of one tool. A tool that does not exist is answered by a marked observation, not refused.

    Attributes:
        tool: One of `TOOL_NAMES`.
        command: Bash text of ``run``.
        path: File of ``read_file``, ``write_file`` and ``edit``; file or directory of ``search``. Relative to the
            shell's current directory.
        first_line: First line that ``read_file`` returns, from 1; the first of the file without it.
        last_line: Last line that ``read_file`` returns, inclusive; the last of the file without it.
        content: Text that ``write_file`` writes, as UTF-8.
        old_text: Text that ``edit`` replaces; it has to occur exactly once in the file.
        new_text: Text that ``edit`` writes in place of the old text; empty deletes the old text.
        patch: Unified diff of ``apply_patch``, with paths relative to the root of the repository.
        pattern: Extended regular expression of ``search``, as ``grep -E`` takes it.
        timeout_s: Time limit of ``run`` in seconds; the server's default without it, never above the server's maximum.
    """

    tool: str = Field(default="run", description=", ".join(TOOL_NAMES))
    command: str = Field(default="", description="run: bash text")
    path: str = Field(default="", description="absolute, or relative to the current directory")
    first_line: int | None = Field(default=None, description="read_file: first line to return, from 1")
    last_line: int | None = Field(default=None, description="read_file: last line to return, inclusive")
    content: str | None = Field(default=None, description="write_file: the whole new content; empty empties the file")
    old_text: str | None = Field(default=None, description="edit: text to replace; it must occur exactly once")
    new_text: str | None = Field(default=None, description="edit: the text in its place; empty deletes it")
    patch: str | None = Field(default=None, description="apply_patch: unified diff")
    pattern: str = Field(default="", description="search: extended regular expression")
    timeout_s: float | None = Field(default=None, description="run: time limit in seconds")


class SweObservation(ErrorMarkers, Observation):  # type: ignore[misc]  # openenv ships no types
    """What one tool call did.

    ``stdout``, ``stderr`` and ``content`` are bounded by the server: of a longer text its head and its tail are kept,
    and a line between them says how many bytes are left out.

    Attributes:
        problem_statement: The issue to resolve, at reset only.
        blocked_programs: Programs that commands do not have under the server's profile of hardening, at reset only.
        instance_id: The instance, ``owner__name-number`` in the benchmark.
        repo: The repository, ``owner/name``.
        tool: The tool that was called, ``reset`` at reset.
        stdout: Kept standard output; undecodable bytes as ``\\xNN``. For ``search``, the matches.
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
        turns_left: Calls that the episode's budget still allows; None without such a budget.
        seconds_left: Seconds that the budget still allows; None without such a budget.
        output_bytes_left: Bytes of output that the budget still allows; None without such a budget.
        budget_spent: Name of the budget that ended the episode: ``turns``, ``seconds`` or ``output_bytes``; None while
            it goes on or when ``submit`` ended it.
    """

    VOLATILE_FIELDS: ClassVar[frozenset[str]] = frozenset(
        {"duration_s", "seconds_left", "~test_durations", "~test_seeds", "~addresses", "~temporary_paths", "~pids"}
    )

    problem_statement: str = ""
    blocked_programs: list[str] = Field(default_factory=list)
    instance_id: str = ""
    repo: str = ""
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
    turns_left: int | None = None
    seconds_left: float | None = None
    output_bytes_left: int | None = None
    budget_spent: str | None = None


class SweState(State):  # type: ignore[misc]  # openenv ships no types
    """State of the episode; ``episode_id`` and ``step_count`` are OpenEnv's.

    Attributes:
        instance_id: The instance.
        repo: The repository, ``owner/name``.
        seed: Seed of this episode.
        cwd: The shell's current directory.
        submitted: ``submit`` was called.
        done: The episode is over.
        turns_left: Calls that the episode's budget still allows; None without such a budget.
        output_bytes_left: Bytes of output that the budget still allows; None without such a budget.
    """

    instance_id: str = ""
    repo: str = ""
    seed: int | None = None
    cwd: str = ""
    submitted: bool = False
    done: bool = False
    turns_left: int | None = None
    output_bytes_left: int | None = None
