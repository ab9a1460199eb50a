"""Rules for timeouts and exhausted resources."""

from __future__ import annotations

import re

from errata_protocol.detect.place import whole_action
from errata_protocol.detect.rules.rule import Finding, Rule
from errata_protocol.detect.turn import Turn
from errata_protocol.markers import ErrorKind

_EXHAUSTED = re.compile(
    r"no space left on device|too many open files|disk quota exceeded|cannot allocate memory|can't allocate memory|"
    r"heap out of memory|\bout of memory\b|memory exhausted|std::bad_alloc|OutOfMemoryError|file size limit exceeded|"
    r"cpu time limit exceeded|can't start new thread|unable to create (?:new )?native thread|\bEMFILE\b|\bENFILE\b|"
    r"\bENOSPC\b|\bENOMEM\b|\bEDQUOT\b|file too large$|file table overflow|memory limit exceeded|"
    r"MemoryError$|argument list too long$",
    re.IGNORECASE,
)
_NO_PROCESS = re.compile(r"resource temporarily unavailable|\bEAGAIN\b", re.IGNORECASE)
_PROCESS = re.compile(r"fork|thread|clone|spawn|process|exec|errno 11|pthread", re.IGNORECASE)
_EXHAUSTED_ERRNO = re.compile(r"\[Errno (?:11|12|23|24|27|28|122)\]")
_KILL_SIGNALS = ("KILL", "SIGKILL", "9")


def _timeout(turn: Turn) -> Finding | None:
    if turn.timed_out or turn.exit_code == 124 or (turn.exit_code == 137 and _kills_late(turn)):
        return Finding((whole_action(turn),))
    return None


def _kills_late(turn: Turn) -> bool:
    """Return whether the action has a ``timeout`` command with ``-k``, or with SIGKILL as its signal.

    Such a ``timeout`` exits with 137 instead of 124 if it sent SIGKILL.
    """
    for call in turn.action.invocations:
        words = call.wrapped_by("timeout")
        values = [w.value for w in words or ()]
        for index, value in enumerate(values[1:], start=1):
            following = values[index + 1] if index + 1 < len(values) else ""
            if value in ("-k", "--kill-after") or value.startswith(("-k", "--kill-after=")):
                return True
            if value in ("-s", "--signal") and following.upper() in _KILL_SIGNALS:
                return True
            if value.upper() in ("-SKILL", "-S9", "-SSIGKILL", "--SIGNAL=KILL", "--SIGNAL=9", "--SIGNAL=SIGKILL"):
                return True
    return False


def _resource_limit(turn: Turn) -> Finding | None:
    if turn.limit_hit is not None:
        severity = "error" if turn.failed else "warning"
        return Finding((whole_action(turn, f"{turn.limit_hit} limit"),), severity)  # type: ignore[arg-type]
    if turn.exit_code in (137, 152, 153):
        return Finding((whole_action(turn, _last(turn)),))
    if not turn.mentions(
        "memory",
        "space",
        "too many",
        "quota",
        "limit",
        "unavailable",
        "thread",
        "emfile",
        "enospc",
        "enomem",
        "eagain",
        "bad_alloc",
        "too large",
        "errno",
        "too long",
        "enfile",
        "overflow",
    ):
        return None
    for traceback in turn.final_tracebacks:
        if traceback.name == "MemoryError" or (
            _EXHAUSTED_ERRNO.match(traceback.text)
            or (traceback.name in ("RuntimeError", "error") and _EXHAUSTED.search(traceback.text))
        ):
            return Finding((whole_action(turn, traceback.line),))
    for line in turn.messages:
        if _EXHAUSTED.search(line) or (_NO_PROCESS.search(line) and _PROCESS.search(line)):
            return Finding((whole_action(turn, line),))
    return None


def _last(turn: Turn) -> str:
    return next((line for line in reversed(turn.stderr) if line.strip()), "")


RULES = (
    Rule(
        "limits.timeout",
        ErrorKind.TIMEOUT,
        "The server ended the command at its deadline, exit 124, or exit 137 under a `timeout` that sends SIGKILL.",
        "The whole action.",
        _timeout,
    ),
    Rule(
        "limits.resource",
        ErrorKind.RESOURCE_LIMIT,
        "The server says which limit was hit; exit 137, 152 or 153; or a message of exhausted memory, disk, quota, "
        "file size, descriptors, threads or processes, also as the exception that ends a traceback.",
        "The whole action.",
        _resource_limit,
    ),
)
