"""What goes over the wire: action, observation, state. Nothing here may hold a gold patch, a test patch or a hint."""

from __future__ import annotations

from typing import ClassVar

from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from errata_environment.published.results import ShellState, ToolResult
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


class _Instance(ErrorMarkers, Observation):  # type: ignore[misc]  # openenv ships no types
    """The fields that come first on the wire."""

    problem_statement: str = ""
    blocked_programs: list[str] = Field(default_factory=list)
    instance_id: str = ""
    repo: str = ""


class SweObservation(ToolResult, _Instance):
    """What one tool call did.

    ``stdout``, ``stderr`` and ``content`` are bounded by the server: of a longer text its head and its tail are kept,
    and a line between them says how many bytes are left out. These and the other fields of a tool's result are those of
    `ToolResult`; ``stdout`` of ``search`` has the matches.

    Attributes:
        problem_statement: The issue to resolve, at reset only.
        blocked_programs: Programs that commands do not have under the server's profile of hardening, at reset only.
        instance_id: The instance, ``owner__name-number`` in the benchmark.
        repo: The repository, ``owner/name``.
        turns_left: Calls that the episode's budget still allows; None without such a budget.
        seconds_left: Seconds that the budget still allows; None without such a budget.
        output_bytes_left: Bytes of output that the budget still allows; None without such a budget.
        budget_spent: Name of the budget that ended the episode: ``turns``, ``seconds`` or ``output_bytes``; None while
            it goes on or when ``submit`` ended it.
    """

    VOLATILE_FIELDS: ClassVar[frozenset[str]] = frozenset(
        {"duration_s", "seconds_left", "~test_durations", "~test_seeds", "~addresses", "~temporary_paths", "~pids"}
    )

    turns_left: int | None = None
    seconds_left: float | None = None
    output_bytes_left: int | None = None
    budget_spent: str | None = None


class _InstanceState(State):  # type: ignore[misc]  # openenv ships no types
    """The fields that come first on the wire."""

    instance_id: str = ""
    repo: str = ""


class SweState(ShellState, _InstanceState):
    """State of the episode; ``episode_id`` and ``step_count`` are OpenEnv's, the fields of a shell `ShellState`'s.

    Attributes:
        instance_id: The instance.
        repo: The repository, ``owner/name``.
        turns_left: Calls that the episode's budget still allows; None without such a budget.
        output_bytes_left: Bytes of output that the budget still allows; None without such a budget.
    """

    turns_left: int | None = None
    output_bytes_left: int | None = None
