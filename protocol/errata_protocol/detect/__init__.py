"""Detectors: from a command and its output they find the kind of error and its site. Pure, deterministic, bounded in
time.

`detect` reads one turn. `server_side` makes the markers that only a server can give. ``docs/detectors.md`` lists the
rules, what makes each fire and what its site is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from errata_protocol.detect.agent_sites import agent_sites
from errata_protocol.detect.benign import is_answered
from errata_protocol.detect.interpreted import last_exception
from errata_protocol.detect.rules import RULES, Finding, Rule
from errata_protocol.detect.rules.tests import hides_failure
from errata_protocol.detect.server_side import output_truncated, path_refused, tool_not_found
from errata_protocol.detect.turn import Turn
from errata_protocol.markers import NOTHING_WRONG, Detection, ErrorKind

Limit = Literal["memory", "pids", "file_size", "disk", "inodes", "cpu", "output"]

__all__ = ["RULES", "Limit", "Rule", "detect", "output_truncated", "path_refused", "tool_not_found"]

_IN_HIDDEN_RUN = (ErrorKind.SYNTAX_ERROR, ErrorKind.IMPORT_ERROR, ErrorKind.TEST_FAILURE)


def detect(
    command: str,
    exit_code: int | None,
    stdout: str,
    stderr: str,
    *,
    timed_out: bool = False,
    limit_hit: Limit | None = None,
    cwd: str | None = None,
    workdir: str | None = None,
    is_host_file: Callable[[str], bool] | None = None,
) -> Detection:
    """Return what went wrong in one command, and where.

    Args:
        command: The action as the agent wrote it; spans count its code points.
        exit_code: Its exit status; None if the server killed it.
        stdout: Standard output, of any size: only a bounded head and tail are read.
        stderr: Standard error, of any size: only a bounded head and tail are read.
        timed_out: Whether the server ended it at its deadline.
        limit_hit: The limit that ended it, None if none did.
        cwd: Absolute directory it ran in, if known; relative names in messages are resolved against it.
        workdir: Absolute directory that holds the task, if known; files in it are the agent's, and are named
            relative to it.
        is_host_file: For a command that ran on the server's own machine without a sandbox: returns whether a path is a
            file of the server. With it, a site is reported only if it is certainly in the agent's code, and messages
            contain no other path.

    Returns:
        `NOTHING_WRONG`, or the first kind in order of precedence that fits. Severity is ``"warning"`` if the only
        evidence is on standard output, or if it is unknown which command decided the exit status.
    """
    if exit_code is not None and exit_code < 0:  # Python's way of saying "ended by signal n"
        exit_code = 128 - exit_code
    turn = Turn.of(
        command,
        exit_code,
        stdout,
        stderr,
        timed_out=timed_out,
        limit_hit=limit_hit,
        cwd=cwd,
        workdir=workdir,
        is_host_file=is_host_file,
    )
    found = _detected(turn)
    return found if turn.agent_files is None else agent_sites(turn, found, turn.agent_files)


def _detected(turn: Turn) -> Detection:
    """Return the detection by the rules, before it is restricted to the agent's files."""
    exit_code = turn.exit_code
    if not turn.timed_out and turn.limit_hit is None:
        if exit_code == 0:
            return _hidden_failure(turn)
        if exit_code is not None:
            silent = not any(turn.stderr) and not any(turn.stdout)
            answered = is_answered(turn.action, exit_code, turn.stderr, silent=silent) and not _raised(turn)
            if answered or (answered is None and _first(turn, last_resorts=False) is None):
                return _hidden_failure(turn)
    found = _first(turn, last_resorts=False)
    if found is None and any(turn.stdout) and not turn.action.shows_data and not turn.action.merges_stderr:
        # A script or a runner that sends its errors to standard output: believed only when nothing else speaks.
        found = _first(turn.trusting_stdout(), last_resorts=False)
        if found is not None:
            return _detection(found[0], Finding(found[1].sites, "warning"))
    found = found or _first(turn, last_resorts=True)
    return _detection(*found) if found else NOTHING_WRONG


def _raised(turn: Turn) -> bool:
    """Return whether an exception ended an action that an environment ran in its own process.

    Then the action is not a shell command, and its status is an error: ``test = 1/0`` does not call the program `test`.
    """
    return turn.agent_files is not None and bool(turn.tracebacks or last_exception(turn))


def _first(turn: Turn, *, last_resorts: bool) -> tuple[Rule, Finding] | None:
    """Return the first rule that fires and its finding; rules of last resort only with ``last_resorts``."""
    for rule in RULES:
        if rule.last_resort and not last_resorts:
            continue
        finding = rule.find(turn)
        if finding is not None:
            return rule, finding
    return None


def _hidden_failure(turn: Turn) -> Detection:
    """Return the detection of a failing test run whose exit status a pipe, ``|| true`` or a later command hid.

    Returns `NOTHING_WRONG` if there was none.
    """
    if not hides_failure(turn):
        return NOTHING_WRONG
    for rule in RULES:
        if rule.kind in _IN_HIDDEN_RUN:
            finding = rule.find(turn)
            if finding is not None:
                return _detection(rule, finding)
    return NOTHING_WRONG


def _detection(rule: Rule, finding: Finding) -> Detection:
    return Detection.of(rule.kind, *finding.sites, severity=finding.severity)
