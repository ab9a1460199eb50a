"""Finds Python tracebacks in lines of output: frames, exception and message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_HEADER = re.compile(r"^(?P<margin>[\s|+*-]{0,40})(?:Exception Group )?Traceback \(most recent call last\):")
_FRAME = re.compile(
    r'^(?:[\s|*]{0,60})File "(?P<file>[^"]{1,800})", line (?P<line>\d{1,9})(?P<within>, in (?P<function>.*))?'
)
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]{0,200})(?:: ?(?P<text>.*))?$")
_SYNTAX = re.compile(r"^(?P<type>SyntaxError|IndentationError|TabError): ?(?P<text>.*)$")
_QUOTED_EXCEPTION = re.compile(r"(?:^|[\s:(])(?P<type>(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)): ")
AT_LINE, DUE = "at line '", "' due to"
"""Around the statement that an interpreter says has failed."""

_STATEMENT_LINES = 200
_CHAINED = (
    "The above exception was the direct cause",
    "During handling of the above exception",
)
MAX_TRACEBACKS = 50
_HEADLESS_LINES = 60
"""A traceback without its first line is looked for this far only: every frame of a long text may start one."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a traceback.

    ``in_code`` is False for the ``File`` line of a syntax error, where nothing ran. ``function`` is the name as
    printed, None for languages other than Python."""

    file: str
    line: int
    in_code: bool = True
    function: str | None = None


@dataclass(frozen=True, slots=True)
class Traceback:
    """A traceback, or the report of a syntax error, which has none.

    Args:
        frames: Outermost first.
        exception: Qualified name as printed.
        text: First line of the exception's message.
        first: Index of its first line.
        last: Index of its last line.
        caused_next: Whether the next traceback was raised from this one.
        of_logging: Whether logging printed it because it could not print a record. Then the program went on, and
            ``last`` is the last line of what logging says about the record.
    """

    frames: tuple[Frame, ...]
    exception: str
    text: str
    first: int
    last: int
    caused_next: bool = False
    of_logging: bool = False

    @property
    def name(self) -> str:
        """Class name of the exception, without its module."""
        return self.exception.rsplit(".", 1)[-1]

    @property
    def line(self) -> str:
        return f"{self.exception}: {self.text}" if self.text else self.exception


def find_tracebacks(lines: Sequence[str]) -> tuple[Traceback, ...]:
    """Return the tracebacks in ``lines`` in order, in time linear in the number of lines."""
    found: list[Traceback] = []
    index = 0
    while index < len(lines) and len(found) < MAX_TRACEBACKS:
        line = lines[index]
        header = _HEADER.match(line) if "Traceback (most" in line else None
        if line == "Call stack:" and (end := _end_of_record(lines, index)):
            if found:
                found[-1] = replace(found[-1], last=end - 1, of_logging=True)
            index = end
            continue
        if header:
            traceback = _read(lines, index, header.group("margin"))
        elif "File" in line and (match := _FRAME.match(line)):
            if match.group("within"):  # a traceback of which `tail` left only the end
                traceback = _read(lines, index - 1, "", _HEADLESS_LINES)
                if traceback is None:  # nor does it end within reach of the next frames, if many follow
                    index = max(index, _end_of_frames(lines, index) - _HEADLESS_LINES + 1)
            else:
                traceback = _read_syntax_error(
                    lines, index, Frame(match.group("file"), int(match.group("line")), False)
                )
        else:
            traceback = None
        if traceback is None:
            index += 1
            continue
        found.append(traceback)
        index = traceback.last + 1
    return tuple(found)


def quoted_exception(text: str) -> tuple[str, str] | None:
    """Return name and message of the last exception that ``text`` quotes (``it failed: KeyError: 'k'``), None without
    one."""
    found = None
    for found in _QUOTED_EXCEPTION.finditer(text):  # noqa: B007
        pass
    return (found["type"], text[found.end() :].strip()) if found else None


def unwrapped(traceback: Traceback, lines: Sequence[str]) -> Traceback:
    """Return the traceback with the exception that its message quotes, where an interpreter inside a server wrapped it.

    Args:
        traceback: The traceback as read.
        lines: The lines it was read from; the statement in ``failed at line 'STATEMENT' due to: ...`` may have several.
    """
    text = traceback.text
    if AT_LINE in text and DUE not in text:
        following = lines[traceback.last + 1 : traceback.last + 1 + _STATEMENT_LINES]
        text = next((line[line.index(DUE) :] for line in following if DUE in line), text)
    inner = quoted_exception(text)
    return replace(traceback, exception=inner[0], text=inner[1]) if inner else traceback


def _read(lines: Sequence[str], start: int, margin: str, limit: int = 2_000) -> Traceback | None:
    frames: list[Frame] = []
    group = "|" in margin or "+" in margin
    width = len(margin)
    index = start + 1
    while index < min(len(lines), start + limit):
        line = lines[index]
        match = _FRAME.match(line) if "File" in line else None
        if match:
            within = bool(match.group("within"))
            frames.append(Frame(match.group("file"), int(match.group("line")), within, match.group("function")))
            index += 1
            continue
        body = line[width:] if not group else line.lstrip(" |+")
        own = (line[:width] == margin or group) and body and not body[0].isspace()
        if group and line.lstrip(" ").startswith("|") and line.lstrip(" ")[1:4].startswith("  "):
            own = False
        exception = _EXCEPTION.match(body) if own else None
        if exception and (frames or index - start <= 2):
            last, caused = _after(lines, index, group)
            return Traceback(
                tuple(frames), exception.group("type"), (exception.group("text") or "").strip(), start, last, caused
            )
        if _HEADER.match(line) or (
            own and not exception and index - start > 1 and not body.startswith(("[", "~", "^"))
        ):
            return None
        index += 1
    return None


def _end_of_frames(lines: Sequence[str], start: int) -> int:
    """Return the index of the first line from ``start`` on that is no frame and not a statement of one."""
    for index in range(start, len(lines)):
        line = lines[index]
        indented = (not line or line[0].isspace()) and "Traceback (most" not in line
        if not indented and not ("File" in line and _FRAME.match(line)):
            return index
    return len(lines)


def _end_of_record(lines: Sequence[str], start: int) -> int | None:
    """Return the index after what logging prints below ``Call stack:``; None if it did not print that line.

    Its frames are those of the call that logged, and raised nothing, though ``Message: TEXT`` looks like an exception.
    """
    end = _end_of_frames(lines, start + 1)
    if end == start + 1 or end == len(lines) or not lines[end].startswith(("Message: ", "Unable to print the message")):
        return None
    return end + 2 if lines[end + 1 : end + 2] and lines[end + 1].startswith(("Arguments: ", "Use the ")) else end + 1


def _after(lines: Sequence[str], index: int, group: bool) -> tuple[int, bool]:
    """Return the index of the last line of a traceback whose exception line is ``index``, and whether it caused the
    next one."""
    last = index
    if group:
        while last + 1 < len(lines) and lines[last + 1].lstrip(" ").startswith(("|", "+")):
            last += 1
    for ahead in range(index + 1, min(index + 12, len(lines))):
        if lines[ahead].startswith(_CHAINED):
            return max(last, ahead), True
        if "Traceback (most" in lines[ahead]:
            break
    return last, False


def _read_syntax_error(lines: Sequence[str], start: int, frame: Frame) -> Traceback | None:
    for index in range(start + 1, min(start + 8, len(lines))):
        match = _SYNTAX.match(lines[index].lstrip(" *"))
        if match:
            return Traceback((frame,), match.group("type"), match.group("text").strip(), start, index)
    return None
