"""A bounded view of output: the rules read a fixed amount of it, however much a command printed.

Errors are at the beginning (the first compiler error) or at the end (the summary, the exception). So the head and the
tail of a stream are kept and the middle is dropped, and long lines are cut the same way. Lines are then short and few,
and every rule may use ordinary regular expressions.
"""

from __future__ import annotations

import re

HEAD_CHARS = 32_768
TAIL_CHARS = 98_304
HEAD_LINES = 600
TAIL_LINES = 1_800
LINE_CHARS = 1_200
MESSAGE_CHARS = 300

_ESCAPE = re.compile(r"\x1b(?:\[[0-9;:?]{0,32}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[()][A-Za-z0-9])")
_QUOTES = (
    re.compile(r"‘([^‘’\n]{1,400})’"),
    re.compile(r"“([^“”\n]{1,400})”"),
    re.compile(r"`([^`'\n]{1,400})'"),
    re.compile(r"`([^`\n]{1,400})`"),
    re.compile(r"(?<![A-Za-z0-9])'([^'\n]{1,400})'"),
    re.compile(r'"([^"\n]{1,400})"'),
)


def bounded_lines(text: str) -> tuple[str, ...]:
    """Return the lines of ``text`` that rules may read, without terminal escapes and trailing blanks.

    Args:
        text: A whole stream, of any size.

    Returns:
        At most ``HEAD_LINES + TAIL_LINES`` lines of at most ``LINE_CHARS`` characters, in order.
    """
    if len(text) > HEAD_CHARS + TAIL_CHARS:
        parts = [_lines(text[:HEAD_CHARS])[:HEAD_LINES], _lines(text[-TAIL_CHARS:])[-TAIL_LINES:]]
        return (*parts[0], *parts[1])
    lines = _lines(text)
    if len(lines) > HEAD_LINES + TAIL_LINES:
        return (*lines[:HEAD_LINES], *lines[-TAIL_LINES:])
    return tuple(lines)


def _lines(text: str) -> list[str]:
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    return [_line(line) for line in text.split("\n")]


def _line(line: str) -> str:
    line = line.rstrip()
    if "\r" in line:  # a progress bar: what the terminal shows in the end
        line = line.rsplit("\r", 1)[1]
    if len(line) > LINE_CHARS:
        half = LINE_CHARS // 2
        line = line[:half] + " ... " + line[-half + 5 :]
    return line


def quoted(line: str) -> list[str]:
    """Return the quoted parts of ``line`` in order, for the quotes of GNU, git, Python and Rust messages."""
    found: list[tuple[int, str]] = []
    taken: list[tuple[int, int]] = []
    for pattern in _QUOTES:
        for match in pattern.finditer(line):
            if not any(a < match.end() and match.start() < b for a, b in taken):
                taken.append(match.span())
                found.append((match.start(), match.group(1)))
    return [text for _, text in sorted(found)]


def message(line: str) -> str:
    """Return ``line`` as the message of a site: stripped, at most ``MESSAGE_CHARS`` characters."""
    return line.strip()[:MESSAGE_CHARS]
