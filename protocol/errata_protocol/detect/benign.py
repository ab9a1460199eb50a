"""Exit statuses that are answers, not errors: `grep` found nothing, `test` was false, `diff` found a difference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from errata_protocol.detect.action import Action, Invocation

_ANSWERS_ONE = frozenset(
    [
        "grep",
        "egrep",
        "fgrep",
        "zgrep",
        "bzgrep",
        "xzgrep",
        "rg",
        "ag",
        "ack",
        "pgrep",
        "pidof",
        "diff",
        "cmp",
        "zdiff",
        "zcmp",
        "colordiff",
        "sdiff",
        "test",
        "[",
        "[[",
        "((",
        "let",
        "expr",
        "which",
        "type",
        "hash",
        "read",
        "false",
        "compgen",
        "lsof",
        "fuser",
        "mountpoint",
        "bcmp",
    ]
)
_GIT_ANSWERS: dict[str, tuple[str, ...]] = {
    # subcommand -> the options that make status 1 an answer; empty: always
    "grep": (),
    "check-ignore": (),
    "check-attr": (),
    "diff": ("--exit-code", "--quiet", "--no-index", "--check"),
    "diff-index": ("--exit-code", "--quiet"),
    "diff-files": ("--exit-code", "--quiet"),
    "diff-tree": ("--exit-code", "--quiet"),
    "merge-base": (),
    "rev-parse": ("-q", "--quiet"),
    "show-ref": (),
    "symbolic-ref": ("-q", "--quiet"),
    "config": (),
    "cat-file": ("-e",),
    "branch": ("--contains",),
}
_GIT_VALUE_OPTIONS = ("-C", "-c", "--git-dir", "--work-tree", "--namespace")
_PYTEST = re.compile(r"(?:py\.?test)(?:-?3)?$")


def is_pytest(call: Invocation) -> bool:
    """Return whether a call runs pytest: by name, as ``python -m pytest``, or with ``coverage run -m``."""
    if _PYTEST.match(call.program):
        return True
    values = [w.value for w in call.words]
    return any(a == "-m" and _PYTEST.match(b) for a, b in pairwise(values)) and (
        call.program.startswith(("python", "pypy", "-m"))
    )


def git_subcommand(call: Invocation) -> tuple[str, tuple[str, ...]]:
    """Return git's subcommand and its arguments, without git's own options; empty ones if there is no subcommand."""
    arguments = call.arguments
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        index += 2 if arguments[index] in _GIT_VALUE_OPTIONS else 1
    return (arguments[index], arguments[index + 1 :]) if index < len(arguments) else ("", ())


def is_answer(call: Invocation, exit_code: int) -> bool:
    """Return whether ``exit_code`` is a normal answer of ``call``.

    Args:
        call: The call that decided the exit status.
        exit_code: A non-zero exit status.
    """
    xargs = call.wrapped_by("xargs")
    if xargs is not None and exit_code == 123:  # xargs' word for "some call ended in 1..125"
        exit_code = 1
    if is_pytest(call):
        return exit_code == 5
    if call.local:
        return False
    name = call.program
    if name == "jq":
        return exit_code in (1, 4) and any(re.match(r"-[a-zA-Z]*e[a-zA-Z]*$|--exit-status$", a) for a in call.arguments)
    if name == "command":
        return exit_code == 1 and any(a in ("-v", "-V", "-pv") for a in call.arguments)
    if name == "git":
        subcommand, rest = git_subcommand(call)
        if subcommand not in _GIT_ANSWERS or exit_code != 1:
            return False
        options = _GIT_ANSWERS[subcommand]
        return not options or any(a in options for a in rest)
    if name == "find" and exit_code == 1:
        values = call.arguments
        return any(a in ("-exec", "-execdir") and b in _ANSWERS_ONE for a, b in pairwise(values))
    if name == "systemctl":
        return exit_code in (1, 3, 4) and any(a.startswith("is-") for a in call.arguments)
    if name in ("shopt", "declare", "typeset", "alias", "export"):
        return exit_code == 1 and bool(call.arguments) and call.arguments[0] in ("-q", "-p", "-f", "-F", "-x")
    if name in ("kill", "pkill", "killall") and exit_code == 1:
        return name == "pkill" or call.arguments[:1] == ("-0",)
    if name == "getent":
        return exit_code == 2
    return exit_code == 1 and name in _ANSWERS_ONE


def always_succeeds(call: Invocation) -> bool:
    """Return whether a call practically cannot fail, so that a failure is one of the command before its ``&&``."""
    return not call.local and call.program in ("echo", "printf", "true", ":", "pwd", "exit", "break", "continue")


_SHELL_ABORT = re.compile(r": (?:unbound variable|bad substitution|parameter (?:null or )?not set)$")
_SHELL_PREFIX = re.compile(r"^(?:\S*/)?(?:ba|da|z|k)?sh: (?:line )?\d+: (?P<rest>.*)$")


def stopped_early(call: Invocation, stderr: Sequence[str]) -> bool:
    """Return whether the shell reports that it could not start or finish ``call``, so that its status 1 is not an
    answer.

    A failed redirection, `let` with bad arithmetic and an unset variable all end with status 1, like a negative answer.
    """
    targets = [r.target.value for r in call.simple.redirects if r.target is not None]
    quiet = call.program in ("type", "hash", "command", "which")
    for line in stderr:
        if _SHELL_ABORT.search(line) or (call.program == "git" and line.startswith(("error: ", "fatal: "))):
            return True
        match = _SHELL_PREFIX.match(line)
        if match is None:
            continue
        rest = match.group("rest")
        if any(rest.startswith(f"{t}: ") for t in targets) or (not quiet and rest.startswith(f"{call.program}: ")):
            return True
    return False


def is_answered(action: Action, exit_code: int, stderr: Sequence[str], *, silent: bool) -> bool | None:
    """Return whether a non-zero exit status is only an answer.

    Args:
        action: The parsed action.
        exit_code: Its non-zero exit status.
        stderr: Lines of standard error.
        silent: Whether both streams are empty.

    Returns:
        True for an answer, False for an error. None if the output has to decide: a command before the deciding
        ``&&`` may have failed instead, and would then have printed a message.
    """
    deciders = action.deciders
    if not deciders:
        return False
    if action.negated and exit_code == 1:
        return True
    last = deciders[0]
    spoken = any(stderr)
    if is_answer(last, exit_code):
        if stopped_early(last, stderr):
            return False
        return None if len(deciders) > 1 and spoken else True
    before = any(is_answer(call, exit_code) for call in deciders[1:])
    return before and (silent or (always_succeeds(last) and not spoken))
