"""Rules for commands that do not exist."""

from __future__ import annotations

import re

from errata_protocol.detect.place import relative_file, site, written_span
from errata_protocol.detect.rules.rule import Finding, Rule
from errata_protocol.detect.rules.shell_message import Message, read_message
from errata_protocol.detect.text import quoted
from errata_protocol.detect.turn import Turn
from errata_protocol.markers import ErrorKind, ErrorSite

_NOT_FOUND = re.compile(r"^(?P<command>.{1,400}?): (?:command )?not found$")
_ZSH = re.compile(r"command not found: (?P<command>\S+)$")
_FISH = re.compile(r"(?:unknown command:? |command ')['\"]?(?P<command>[^\s'\"]+)['\"]?(?: not found|$)", re.IGNORECASE)
_NO_FILE = re.compile(
    r"^(?P<command>.{1,400}?): (?:No such file or directory|cannot execute: required file not found)$"
)
_INTERPRETER = re.compile(r"^(?P<command>.{1,400}?): (?P<program>\S+): bad interpreter: No such file or directory$")
_LAUNCHERS = frozenset(
    [
        "env",
        "xargs",
        "timeout",
        "nohup",
        "nice",
        "stdbuf",
        "setsid",
        "time",
        "sudo",
        "strace",
        "exec",
        "ionice",
        "watch",
        "chroot",
        "unshare",
        "taskset",
    ]
)
_LAUNCH = re.compile(
    r"(?:failed to (?:run command|execute)|cannot run|can't execute|unable to execute|command not found|not found|"
    r"No such file or directory)",
    re.IGNORECASE,
)


def _not_found(turn: Turn) -> Finding | None:
    found: list[ErrorSite] = []
    for line in turn.messages:
        message = read_message(line)
        command = _command_of(turn, message)
        if command is not None:
            looks_at_calls = message.script is not None or message.program == "env"
            if not turn.spend(1 + (len(turn.action.invocations) // 4 if looks_at_calls else 0)):
                return Finding()  # the last one that failed is unknown
            found.append(_site(turn, message, command))
    if found:
        placed = [s for s in found if s.action_span is not None]
        first = (placed or found)[-1]
        first = next(s for s in found if s.action_span == first.action_span and s.file == first.file)
        return Finding((first, *(s for s in found if s is not first))[:20])
    if turn.exit_code == 127 and not any(turn.stderr):
        calls = [c for c in turn.action.deciders if c.words]
        span = (calls[0].words[0].start, calls[0].words[0].end) if len(calls) == 1 else None
        return Finding((site("", "action", span=span),) if span else ())
    return None


def lacks_command(turn: Turn) -> bool:
    """Return whether a message says that a command does not exist."""
    return any(_command_of(turn, read_message(line)) is not None for line in turn.messages)


def _command_of(turn: Turn, message: Message) -> str | None:
    """Return the command that ``message`` reports as missing, None if it is another message."""
    if message.program in ("type", "hash", "command") and message.from_shell:
        return None
    if message.from_shell or message.program in ("sudo", "exec"):
        match = _NOT_FOUND.match(message.rest) or _INTERPRETER.match(message.rest)
        if match:
            return match.group("command")
        match = _NO_FILE.match(message.rest)
        if match and (turn.exit_code in (126, 127) or "required file" in message.rest) and message.line is not None:
            command = match.group("command")
            if turn.words.program_span(command, message.line) is not None or "required file" in message.rest:
                return command
    if message.text.endswith("command not found"):
        return message.text.removesuffix(": command not found").rsplit(": ", 1)[-1]
    match = _ZSH.search(message.text)
    if match:
        return match.group("command")
    if message.program in ("fish", "Command") or message.text.startswith("Command '"):
        match = _FISH.search(message.text)
        if match:
            return match.group("command")
    if (
        message.program == "find"
        and (names := quoted(message.rest))
        and message.rest.endswith("No such file or directory")
    ):
        return names[-1] if turn.words.program_span(names[-1], None) is not None else None
    if message.program in _LAUNCHERS and _LAUNCH.search(message.rest):
        names = quoted(message.rest) or [message.rest.split(": ", 1)[0].split()[-1]]
        name = names[-1].replace("\\r", "")
        known = turn.words.program_span(name, None) is not None or turn.words.calls_path
        if turn.exit_code in (126, 127) or known:
            return names[-1]
    return None


def _site(turn: Turn, message: Message, command: str) -> ErrorSite:
    span = turn.words.program_span(command, message.line if message.script is None else None)
    if span is None and message.script is not None:
        written = written_span(turn, message.script, message.line or 0)
        at = turn.command.find(command, *written) if written else -1
        span = (at, at + len(command)) if at >= 0 else written
        return site(message.text, span=span, file=relative_file(turn, message.script), number=message.line)
    if span is None and message.program == "env":  # the `#!/usr/bin/env X` line of a script that the action starts
        scripts = [c for c in turn.action.invocations if c.words and "/" in c.words[0].value]
        span = scripts[-1].words[0].inner if scripts else None
    return site(message.text, span=span)


RULES = (
    Rule(
        "commands.missing",
        ErrorKind.COMMAND_NOT_FOUND,
        "`command not found` of a shell, a launcher (env, xargs, timeout, sudo ...) that finds no program, a script "
        "path or interpreter that does not exist at exit 127, or exit 127 without another explanation.",
        "The command word in the action; for a script of the agent its line.",
        _not_found,
    ),
)
