"""A helper of the rules: parses a message into the program that printed it, the line of its script, and the text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BASH = re.compile(r"^(?P<program>[^\s:][^:]{0,300}): (?:-c: )?line (?P<line>\d{1,9}): (?P<rest>.*)$")
_DASH = re.compile(r"^(?P<program>[^\s:][^:]{0,300}): (?P<line>\d{1,9}): (?P<rest>.*)$")
_PROGRAM = re.compile(r"^(?P<program>[\w./+-]{1,300}?(?: \[\w+\])?)(?:\[\d+\])?: ?(?P<rest>.*)$")
_SHELL = re.compile(r"^-?(?:\S*/)?(?:bash|sh|dash|zsh|ksh|ash|environment)$")
_BUILTINS = frozenset(
    [
        "cd",
        "source",
        ".",
        "pushd",
        "popd",
        "exec",
        "export",
        "unset",
        "read",
        "test",
        "[",
        "[[",
        "let",
        "eval",
        "ulimit",
        "umask",
        "trap",
        "kill",
        "wait",
        "shift",
        "exit",
        "return",
        "local",
        "declare",
        "typeset",
        "readonly",
        "printf",
        "echo",
        "type",
        "hash",
        "command",
        "set",
        "alias",
        "unalias",
        "bind",
        "fg",
        "bg",
        "jobs",
        "enable",
        "getopts",
        "history",
        "help",
        "mapfile",
        "readarray",
        "shopt",
        "suspend",
        "times",
        "true",
        "false",
        "pwd",
        "dirs",
        "disown",
        "compgen",
        "complete",
        "caller",
        "builtin",
        "break",
        "continue",
    ]
)


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Args:
        text: The whole line.
        program: Base name of the program that printed it, or of a shell builtin; empty if it is not named.
        rest: The text after the program's name.
        script: The script file that a shell was running; None for the action itself and for other programs.
        line: Line in the script or in the action; None if not given.
        from_shell: Whether a shell printed it.
    """

    text: str
    program: str
    rest: str
    script: str | None = None
    line: int | None = None
    from_shell: bool = False


def read_message(text: str) -> Message:
    """Parse one line of output into a `Message`."""
    match = _BASH.match(text) or _DASH.match(text)
    if match:
        program, rest = match.group("program"), match.group("rest")
        script = None if _SHELL.match(program) else program
        builtin = rest.split(": ", 1)[0]
        if builtin in _BUILTINS and ": " in rest:
            return Message(text, builtin, rest.split(": ", 1)[1], script, int(match.group("line")), True)
        return Message(text, "", rest, script, int(match.group("line")), True)
    match = _PROGRAM.match(text)
    if not match:
        return Message(text, "", text)
    program = match.group("program")
    return Message(text, program.rsplit("/", 1)[-1], match.group("rest"), from_shell=bool(_SHELL.match(program)))
