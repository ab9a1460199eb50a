"""Finds the failing place in an action that is Python code, which an environment ran in its own process."""

from __future__ import annotations

import ast
import re

from errata_protocol.detect.action import language
from errata_protocol.detect.python_traceback import AT_LINE, DUE, Frame, quoted_exception
from errata_protocol.detect.text import quoted
from errata_protocol.detect.turn import Turn

CODE_NAME = re.compile(
    r"<(?:string|stdin|input|console|exec|eval|code|cell|repl|script|module|unknown|agent|user[-_]?code|i?python-input-[\w-]+)>$"
)
"""Names that interpreters give to code without a file."""

MAX_CODE = 50_000
"""Characters of an action that are parsed as Python."""

Span = tuple[int, int]

_SYNTAX_LINE = re.compile(r"\((?:<[\w-]+>|[\w./-]+), line (?P<line>\d{1,9})\)$")
_MODULE = re.compile(r"(?i)\b(?:import(?:ing|s)?(?: of| from)?|modules?):? ['\"`]?(?P<module>[a-z_][\w.]*)")


def code_span(turn: Turn, frame: Frame) -> Span | None:
    """Return the span of the action's line that a traceback frame without a file refers to; None if uncertain.

    The frame's line number counts lines of this action if both of these hold:

    - The action is Python. For a syntax error, whose code did not run: the output repeats the line instead.
    - If the frame is in a function, the action defines that function up to that line. Otherwise an earlier action did,
      and the number counts that action's lines.

    None also if the action has no such line or it is blank.
    """
    span = turn.action.line_span(0, len(turn.command), frame.line)
    if span is None:
        return None
    line = turn.command[slice(*span)]
    if frame.function not in (None, "<module>") and not _defines(turn.command[: span[1]], frame.function or "", line):
        return None
    if not frame.in_code:
        return span if _is_repeated(turn, line) else None
    return span if is_python(turn.command) else None


def named_span(turn: Turn, text: str) -> Span | None:
    """Return the span of the part of the action that the message names, if it occurs exactly once: a quoted
    statement, a line, or a name.

    Args:
        turn: The turn.
        text: Message of the exception.
    """
    if any(language(c.program) for c in turn.action.invocations):
        return None
    statement = _failing_statement(turn)
    if statement is not None:
        return _only(turn.command, statement)
    parse_failure = _SYNTAX_LINE.search(text)
    if parse_failure:
        span = turn.action.line_span(0, len(turn.command), int(parse_failure["line"]))
        return span if span and _is_repeated(turn, turn.command[slice(*span)]) else None
    names = [name for name in quoted(text) if len(name) > 1]
    module = _MODULE.search(text)
    for name in [*names, *([module["module"]] if module else [])]:
        span = _only(turn.command, name, whole=True)
        if span is not None:
            return span
    return None


def is_python(code: str) -> bool:
    """Return whether a text is Python and hardly a shell command; ``ls -la`` parses as a subtraction and is not."""
    if len(code) > MAX_CODE:
        return False
    try:
        tree = ast.parse(re.sub(r"\\[^\n]", "__", code))  # an unknown escape would be a warning on our standard error
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for statement in tree.body:
        if not isinstance(statement, ast.Expr):
            return True
        nodes = list(ast.walk(statement.value))
        if any(isinstance(n, ast.Call | ast.Subscript | ast.Compare) for n in nodes):
            return True
        if not any(isinstance(n, ast.Name) for n in nodes):
            return True
    return False


def last_exception(turn: Turn) -> tuple[str, str] | None:
    """Return name and message of the exception in the last line that is not blank; None if it has none."""
    last = next((line for line in reversed(turn.lines) if line.strip()), "")
    return quoted_exception(last)


def _failing_statement(turn: Turn) -> str | None:
    """Return the statement in ``failed at line 'STATEMENT' due to ...``, which may have several lines; None without
    one."""
    text = "\n".join(turn.lines)
    start = text.rfind(AT_LINE)
    if start < 0:
        return None
    start += len(AT_LINE)
    end = text.find(DUE, start)
    return text[start:end].strip() if end > start else None


def _is_repeated(turn: Turn, line: str) -> bool:
    return any(line == printed.strip() for printed in turn.lines)


def _defines(code: str, function: str, line: str) -> bool:
    name = function.rsplit(".", 1)[-1]
    if name == "<lambda>":
        return "lambda" in line
    if name.startswith("<"):  # a comprehension
        return " for " in line
    return re.search(r"\b(?:def|class)\s+" + re.escape(name) + r"\b", code) is not None


def _only(code: str, text: str, *, whole: bool = False) -> Span | None:
    """Return the span of ``text`` if it occurs exactly once, None otherwise; with ``whole``, not as part of a longer
    name."""
    places: list[Span] = []
    at = code.find(text) if text else -1
    while at >= 0 and len(places) < 2:
        joined = whole and (_is_name(code[at - 1 : at]) or _is_name(code[at + len(text) : at + len(text) + 1]))
        if not joined:
            places.append((at, at + len(text)))
        at = code.find(text, at + 1)
    return places[0] if len(places) == 1 else None


def _is_name(char: str) -> bool:
    return bool(char) and (char.isalnum() or char == "_")
