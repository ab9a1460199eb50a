"""The tools that every environment with a shell has: checks of their arguments, and what they do in a sandbox."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from errata_protocol import detect
from errata_protocol.markers import NOTHING_WRONG, Detection, ErrorKind, ErrorSite
from errata_server.environments.detecting import detected
from errata_server.sandbox.base import PathRefused, Sandbox

Answer = tuple[dict[str, Any], Detection]
"""Fields of an observation, and what went wrong."""
Fault = tuple[str, str]
"""The field of an action that is wrong, and what is wrong with it."""

READ_BYTES = 64 * 1024
"""Bytes of a file that one ``read_file`` returns at most."""


class ShellAction(Protocol):
    """The fields of an action that the tools of a shell use."""

    tool: str
    command: str
    path: str
    content: str | None
    timeout_s: float | None


ActionT = TypeVar("ActionT", bound=ShellAction)


async def answered(
    action: ActionT,
    tools: Collection[str],
    fault: Callable[[ActionT], Fault | None],
    use: Callable[[ActionT], Awaitable[Answer]],
) -> Answer:
    """Check an action and do what it says; what the agent got wrong is an answer, never an exception.

    Args:
        action: The action.
        tools: Names of the tools that there are.
        fault: Function that returns what is wrong with the arguments of an action, or None.
        use: Function that runs the tool.
    """
    if action.tool not in tools:
        message = f"no tool {action.tool[:80]!r}: there are {', '.join(tools)}"
        return {"stderr": message}, detect.tool_not_found(action.tool, list(tools))
    wrong = fault(action)
    if wrong is not None:
        field, message = wrong
        site = ErrorSite(action_field=field, source="action", message=message)
        return {"stderr": message}, Detection.of(ErrorKind.INVALID_ARGUMENTS, site)
    try:
        return await use(action)
    except PathRefused as refusal:
        return {"stderr": str(refusal)}, detect.path_refused(action.path, refusal.reason, refusal.message)


def fault_of(action: ShellAction, path_tools: Collection[str] = ("write_file", "read_file")) -> Fault | None:
    """Return what is wrong with the arguments of ``run`` or of a tool that takes a path; None if nothing is.

    Args:
        action: The action.
        path_tools: Names of the tools that need a path.
    """
    tool, limit = action.tool, action.timeout_s
    if tool == "run":
        if not action.command.strip():
            return "command", "run needs a command"
        if "\0" in action.command:
            return "command", "command: a NUL character cannot be part of a command"
        if limit is not None and (math.isnan(limit) or limit <= 0):
            return "timeout_s", f"timeout_s must be above 0, not {limit:g}"
    elif tool in path_tools and not action.path:
        return "path", f"{tool} needs a path"
    elif tool == "write_file" and action.content is None:
        return "content", "write_file needs content; empty content empties the file"
    return None


async def run(
    sandbox: Sandbox, command: str, *, before: str, limit_s: float, mounts: Mapping[str, Path] | None = None
) -> Answer:
    """Run a command in the session's shell.

    Args:
        sandbox: The session's sandbox.
        command: Shell text.
        before: Current directory of the shell before the command; empty if unknown.
        limit_s: Time limit of the command, seconds.
        mounts: Directories of the host to mount read-only, by path in the sandbox.
    """
    result = await sandbox.run(command, timeout_s=limit_s, mounts=mounts)
    detection = await detected(
        command,
        result.exit_code,
        result.stdout,
        result.stderr,
        timed_out=result.timed_out,
        limit_hit=result.limit_hit,
        cwd=before or None,
        workdir=sandbox.workdir,
    )
    if detection.error_kind is None and result.truncated:
        detection = detect.output_truncated()
    values = {
        "stdout": result.stdout,
        "stderr": result.stderr,
        "exit_code": result.exit_code,
        "timed_out": result.timed_out,
        "time_limit_s": limit_s,
        "truncated": result.truncated,
        "limit_hit": result.limit_hit,
        "killed_background": list(result.killed_background),
        "shell_saved": result.shell_saved,
        "cwd": sandbox.cwd,
    }
    return values, detection


async def write_file(sandbox: Sandbox, path: str, content: str) -> Answer:
    """Create or replace a file.

    Raises:
        PathRefused: The agent may not write there.
    """
    await sandbox.write_file(path, content.encode("utf-8", "surrogatepass"))
    return {}, NOTHING_WRONG


async def read_file(sandbox: Sandbox, path: str) -> Answer:
    """Return the first `READ_BYTES` of a file.

    Raises:
        PathRefused: There is no such file, or the agent may not read it.
    """
    content = await sandbox.read_file(path, max_bytes=READ_BYTES + 1)
    truncated = len(content) > READ_BYTES
    text = content[:READ_BYTES].decode("utf-8", "backslashreplace")
    return {"content": text, "truncated": truncated}, detect.output_truncated() if truncated else NOTHING_WRONG
