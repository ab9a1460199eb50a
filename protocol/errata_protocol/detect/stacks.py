"""Finds uncaught errors of node, Go, Rust, Java, Ruby, Perl and PHP in lines of output."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from errata_protocol.detect.python_traceback import Frame

_NODE_ERROR = re.compile(
    r"^(?:Uncaught )?(?P<type>(?:[A-Z]\w*)?(?:Error|Exception))(?: \[(?P<code>\w+)\])?(?:: (?P<text>.*))?$"
)
_NODE_FRAME = re.compile(
    r"^\s+at (?:.*\()?(?P<file>(?:file://)?[^():\s][^():]*|node:[\w/:]+):(?P<line>\d+):(?P<column>\d+)\)?$"
)
_NODE_HEADER = re.compile(
    r"^(?P<file>(?:file://)?(?:/|\.{0,2}/|\[)[^:]{1,400}|undefined|evalmachine[^:]*):(?P<line>\d+)$"
)
_GO_PANIC = re.compile(r"^(?:panic: |fatal error: )(?P<text>.*)$")
_GO_FRAME = re.compile(r"^\s+(?P<file>\S+\.go):(?P<line>\d+)(?: \+0x[0-9a-f]+)?$")
_RUST_PANIC = re.compile(
    r"^thread '[^']*'(?: \(\d+\))? panicked at (?:'(?P<text>.*)', )?(?P<file>[^\s:]+\.rs):(?P<line>\d+):"
    r"(?P<column>\d+):?$"
)
_JAVA = re.compile(r'^Exception in thread "[^"]*" (?P<type>[\w.$]+)(?:: (?P<text>.*))?$')
_JAVA_FRAME = re.compile(r"^\s+at (?P<class>[\w.$<>/]+)\((?P<file>[\w$]+\.(?:java|kt|scala)):(?P<line>\d+)\)$")
_RUBY = re.compile(
    r"^(?:\s*from )?(?P<file><internal:[^>]{1,200}>|"
    r"[^\s:][^:]{0,300}):(?P<line>\d+):in [`'](?P<where>[^']*)': (?P<text>.*) \((?P<type>[A-Z][\w:]*)\)$"
)
_RUBY_TOP = re.compile(r"^(?P<file>[^\s:][^:]{0,300}):(?P<line>\d+): (?P<text>.*) \((?P<type>[A-Z][\w:]*)\)$")
_RUBY_FRAME = re.compile(r"^\s*from (?P<file>[^\s:][^:]{0,300}):(?P<line>\d+):in ")
_RAKE = re.compile(r"^(?P<type>[A-Z]\w*(?:::\w+)*): (?P<text>.*)$")
_RAKE_FRAME = re.compile(r"^(?P<file>[^\s:][^:]{0,300}):(?P<line>\d+):in ")
_PERL = re.compile(r"^(?P<text>.*) at (?P<file>\S{1,300}) line (?P<line>\d{1,9})(?:\.|,.*)$")
_PHP = re.compile(
    r"^(?:PHP )?(?P<type>Fatal error|Parse error|Warning):\s+(?P<text>.*?)(?: in (?P<file>\S+)(?: on line |"
    r":)(?P<line>\d+))?$"
)


@dataclass(frozen=True, slots=True)
class Crash:
    """An uncaught error of a program.

    Args:
        language: node, go, rust, java, ruby, perl or php.
        exception: Class name or heading.
        text: Its message.
        line: The line of output with the error.
        frames: Innermost last, as in a Python traceback.
        column: Column in the last frame, 0 if not printed.
        head: File and line of a header before the error (node prints where it was thrown, or could not be parsed).
        index: Index of ``line`` in the lines of output.
    """

    language: str
    exception: str
    text: str
    line: str
    frames: tuple[Frame, ...]
    column: int | None = None
    head: Frame | None = None
    index: int = 0


def find_crash(lines: Sequence[str], is_plausible: Callable[[str], bool]) -> Crash | None:
    """Return the last plausible uncaught error in ``lines``, else the last one, None if there is none.

    Of several in a row in Perl's form the first counts.

    Args:
        lines: Lines of output.
        is_plausible: Returns whether a crash may be of a program in this language.
    """
    found: Crash | None = None
    for index, line in enumerate(lines):
        crash = _at(lines, index, line)
        if crash is None or (found and found.language == crash.language == "perl"):
            continue
        if found is None or is_plausible(crash.language) or not is_plausible(found.language):
            found = replace(crash, index=index)
    return found


def _at(lines: Sequence[str], index: int, line: str) -> Crash | None:
    if index and lines[index - 1].endswith(" aborted!") and (match := _RAKE.match(line)):  # rake, rails
        frames = _frames(lines, index + 1, _RAKE_FRAME)
        return Crash("ruby", match.group("type"), match.group("text"), line, frames)
    if "Error" in line or "Exception" in line:
        match = _NODE_ERROR.match(line)
        if match:
            return _node(lines, index, match)
        java = _JAVA.match(line)
        if java:
            return _java(lines, index, java)
    if line.startswith(("panic: ", "fatal error: ")) and (match := _GO_PANIC.match(line)):
        stack = any(x.startswith("goroutine ") for x in lines[index + 1 : index + 12])
        if stack:
            return Crash("go", "panic", match.group("text"), line, _frames(lines, index + 1, _GO_FRAME))
    if "panicked at" in line and (match := _RUST_PANIC.match(line)):
        frame = Frame(match.group("file"), int(match.group("line")))
        return Crash("rust", "panic", match.group("text") or "", line, (frame,), int(match.group("column")))
    if line.endswith(")") and ":" in line:
        ruby = _RUBY.match(line) or _RUBY_TOP.match(line)
        if ruby:
            frame = Frame(ruby.group("file"), int(ruby.group("line")))
            outer = _frames(lines, index + 1, _RUBY_FRAME)
            return Crash("ruby", ruby.group("type"), ruby.group("text"), line, (*outer, frame))
    if " line " in line and " at " in line and not line[0].isspace() and (match := _PERL.match(line)):
        frame = Frame(match.group("file"), int(match.group("line")))
        return Crash("perl", "die", match.group("text"), line, (frame,))
    match = _PHP.match(line) if line.startswith(("PHP ", "Fatal error:", "Parse error:")) else None
    if match and match.group("type") != "Warning" and match.group("file"):
        frame = Frame(match.group("file"), int(match.group("line")))
        return Crash("php", match.group("type"), match.group("text"), line, (frame,))
    return None


def _frames(lines: Sequence[str], start: int, pattern: re.Pattern[str], limit: int = 60) -> tuple[Frame, ...]:
    found = [
        Frame(m.group("file"), int(m.group("line")))
        for line in lines[start : start + limit]
        if (m := pattern.match(line))
    ]
    return tuple(reversed(found))


def _node(lines: Sequence[str], index: int, match: re.Match[str]) -> Crash | None:
    frames: list[Frame] = []
    column = None
    for line in lines[index + 1 : index + 40]:
        frame = _NODE_FRAME.match(line)
        if frame:
            frames.append(Frame(frame.group("file"), int(frame.group("line"))))
            column = column or int(frame.group("column"))
        elif line.startswith("Node.js v") or (frames and not line.startswith((" ", "}", "-", "R"))):
            break
    head = None
    for line in reversed(lines[max(0, index - 7) : index]):
        header = _NODE_HEADER.match(line)
        if header:
            head = Frame(header.group("file"), int(header.group("line")))
            break
    if not frames and head is None and not any(x.startswith("Node.js v") for x in lines[index + 1 : index + 40]):
        return None
    return Crash(
        "node", match.group("type"), match.group("text") or "", lines[index], tuple(reversed(frames)), column, head
    )


def _java(lines: Sequence[str], index: int, match: re.Match[str]) -> Crash:
    found = []
    for line in lines[index + 1 : index + 60]:
        frame = _JAVA_FRAME.match(line)
        if frame and not frame.group("class").startswith(("java.", "javax.", "jdk.", "sun.", "java/", "kotlin.")):
            found.append(Frame(frame.group("file"), int(frame.group("line"))))
    return Crash(
        "java", match.group("type").rsplit(".", 1)[-1], match.group("text") or "", lines[index], tuple(reversed(found))
    )
