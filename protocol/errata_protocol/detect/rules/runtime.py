"""Rules for programs that crash; and rules of last resort, for a status that nothing explains."""

from __future__ import annotations

import re

from errata_protocol.detect.action import language
from errata_protocol.detect.interpreted import last_exception
from errata_protocol.detect.place import (
    frame_site,
    is_own,
    last_own_frame,
    relative_file,
    site,
    whole_action,
)
from errata_protocol.detect.python_traceback import Frame, find_tracebacks
from errata_protocol.detect.rules.rule import Finding, Rule
from errata_protocol.detect.rules.shell_message import read_message
from errata_protocol.detect.turn import Turn
from errata_protocol.markers import ErrorKind, ErrorSite, Severity

_SHELL_RUNTIME = re.compile(
    r"unbound variable$|parameter (?:null or )?not set$|bad substitution$|division by (?:0|zero)|readonly variable$|"
    r"is read ?only$|"
    r"maximum function nesting level exceeded|bad array subscript$|value too great for base"
)
_JQ = re.compile(r"^jq: error(?: \(at (?P<where>[^)]*)\))?: ")
_SQL = re.compile(r"^(?:Error: stepping|Runtime error|Error: near line \d+:|ERROR:  )")
_SIGNAL_TEXT = re.compile(
    r"Segmentation fault|Aborted|Bus error|Floating point exception|Illegal instruction|core dumped|"
    r"Trace/breakpoint trap|"
    r"terminate called|AddressSanitizer|UndefinedBehaviorSanitizer|Assertion .* failed|double free|stack smashing"
)
_AWK = re.compile(r"^(?:g|m)?awk: .*(?:division by zero|fatal: )")
_AWK_FILE = re.compile(r"^\w{0,2}awk: (?P<file>[^\s:]{1,300}):(?P<line>\d{1,9}): ")


def _crash(turn: Turn) -> Finding | None:
    if turn.final_tracebacks:
        traceback = turn.final_tracebacks[-1]
        frame = last_own_frame(turn, traceback.frames)
        return Finding((frame_site(turn, frame, traceback.line, traceback.text),) if frame else ())
    crash = turn.crash
    if crash is not None and turn.may_crash_in(crash.language):
        frame = last_own_frame(turn, crash.frames)
        if frame is None and crash.head is not None and is_own(turn, crash.head.file):
            frame = crash.head
        if frame is None:
            return Finding()
        where = frame_site(turn, frame, crash.line, crash.text)
        return Finding((where.model_copy(update={"column": crash.column or None}),))
    fatal = _native(turn)
    if fatal is not None:
        return fatal
    internal = _pytest_internal(turn)
    if internal is not None:
        return internal
    for line in turn.messages:
        found = _message(turn, line)
        if found is not None:
            return Finding(found)
    return None


_FATAL_FRAME = re.compile(r'^\s+File "(?P<file>[^"]{1,800})", line (?P<line>\d{1,9}) in ')
_SANITIZER = re.compile(r"^(?P<file>[^\s:]+\.\w+):(?P<line>\d+):(?P<column>\d+): runtime error: ")
_LAST_WORDS = re.compile(r"^(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:: .*)?$")


def _native(turn: Turn) -> Finding | None:
    """Return the finding for Python's report of a fatal signal (innermost frame first), a sanitizer's report, or the
    end of a traceback that was cut off."""
    frames = [Frame(m.group("file"), int(m.group("line"))) for x in turn.lines if (m := _FATAL_FRAME.match(x))]
    fatal = next((x for x in turn.lines if x.startswith("Fatal Python error: ")), None)
    if fatal is not None:
        frame = last_own_frame(turn, list(reversed(frames)))
        return Finding((frame_site(turn, frame, fatal),) if frame else ())
    for line in turn.messages:
        match = _SANITIZER.match(line)
        if match:
            where = site(line, file=relative_file(turn, match.group("file")), number=int(match.group("line")))
            return Finding((where.model_copy(update={"column": int(match.group("column"))}),))
    last = next((x for x in reversed(turn.lines) if x.strip()), "")
    if _LAST_WORDS.match(last) and any(language(c.program) == "python" for c in turn.action.invocations):
        return Finding()
    if turn.agent_files is not None and last_exception(turn):
        return Finding()
    return None


def _pytest_internal(turn: Turn) -> Finding | None:
    """Return the finding for a crash of pytest itself, most often in a hook of the agent's conftest.py."""
    prefix = "INTERNALERROR> "
    inner = [line.removeprefix(prefix) for line in turn.reported if line.startswith(prefix)]
    raised = [t for t in find_tracebacks(inner) if not t.caused_next]
    if raised:
        frame = last_own_frame(turn, raised[-1].frames)
        return Finding((frame_site(turn, frame, raised[-1].line, raised[-1].text),) if frame else ())
    return Finding((site(prefix + inner[0], "message"),)) if inner else None


def _message(turn: Turn, line: str) -> tuple[ErrorSite, ...] | None:
    message = read_message(line)
    if message.from_shell and (_SHELL_RUNTIME.search(message.rest) or _is_parameter_error(turn, message.rest)):
        if message.script is not None:
            return (site(line, file=relative_file(turn, message.script), number=message.line),)
        span = turn.action.line_span(0, len(turn.command), message.line) if message.line else None
        return (site(line, span=span),) if span else ()
    if _JQ.match(line) or _SQL.match(line):
        return ()
    if _AWK.match(line):
        script = _AWK_FILE.match(line)
        if script is None:
            return ()
        return (site(line, file=relative_file(turn, script.group("file")), number=int(script.group("line"))),)
    if _SIGNAL_TEXT.search(line):
        if message.script is not None:
            return (site(line, file=relative_file(turn, message.script), number=message.line),)
        match = re.match(r"^(?:\S+: )?(?P<file>[\w./-]+\.\w+):(?P<line>\d+): .*Assertion", line)
        return (
            (site(line, file=relative_file(turn, match.group("file")), number=int(match.group("line"))),)
            if match
            else ()
        )
    return None


def _is_parameter_error(turn: Turn, rest: str) -> bool:
    """Return whether ``${NAME:?text}`` ended the shell, with a text of the agent's choice."""
    match = re.match(r"(?P<name>[A-Za-z_]\w*): ", rest)
    return match is not None and re.search(r"\$\{" + match.group("name") + r":?\?", turn.command) is not None


def _signal(turn: Turn) -> Finding | None:
    """Return the finding for status 128+n, ended by signal n; 128 itself and git's 129 are not signals."""
    code = turn.exit_code
    if code is None or not 129 <= code <= 192:
        return None
    deciders = turn.action.deciders
    if deciders and (deciders[0].program == "git" or (deciders[0].program == "exit" and len(deciders[0].words) > 1)):
        return None
    return Finding()


def _nonzero(turn: Turn) -> Finding | None:
    if not turn.failed:
        return None
    severity: Severity = "error" if turn.action.deciders else "warning"
    line = next((x for x in reversed(turn.stderr) if x.strip()), "")
    return Finding((whole_action(turn, line),), severity)


RULES = (
    Rule(
        "runtime.crash",
        ErrorKind.RUNTIME_ERROR,
        "A Python traceback that no rule above explains (of a chain the last exception), an uncaught error of node, "
        "Go, Rust, Java, Ruby, Perl or PHP, a shell's unbound variable or division by zero, an error that jq or SQL "
        "meets while it runs, or the text of a fatal signal.",
        "The last frame inside the workspace, else the line of the code in the action.",
        _crash,
    ),
    Rule(
        "runtime.signal",
        ErrorKind.RUNTIME_ERROR,
        "Exit 129 to 192: ended by a signal, when no text explains it.",
        "None.",
        _signal,
        last_resort=True,
    ),
)
LAST_RULES = (
    Rule(
        "exit.nonzero",
        ErrorKind.NONZERO_EXIT,
        "Any other exit status than 0 that is not an answer; a warning when it is unknown which command decided it.",
        "The whole action.",
        _nonzero,
        last_resort=True,
    ),
)
