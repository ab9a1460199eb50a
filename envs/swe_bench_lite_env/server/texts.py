"""Text operations of the file tools: ranges of lines, and exact replacement. Pure functions."""

from __future__ import annotations

from io import BytesIO
from itertools import islice

from errata_protocol.errors import InvalidRequest
from errata_server.sandbox.output import BoundedOutput

_SHOWN = 10
"""How many of the lines where a text occurs a message names."""


class ToolRefused(InvalidRequest):
    """A call that a tool refuses; the message is for the agent.

    Args:
        message: Text for the agent: what is wrong and what would be right.
        field: Field of the action at fault.
        line: Line of the file at fault, from 1; or None.
    """

    def __init__(self, message: str, field: str, line: int | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.line = line


def lines_of(content: bytes, first: int | None, last: int | None) -> bytes:
    """Return the lines ``first`` to ``last`` of a file, from 1 and inclusive, with their ends.

    Raises:
        ToolRefused: The file does not have the first of them.
    """
    if first is None and last is None:
        return content
    # Unlike `bytes.splitlines`, a carriage return ends no line: editors and compilers number lines so.
    count = content.count(b"\n") + (not content.endswith(b"\n") and bool(content))
    start = 1 if first is None else first
    if start > max(1, count):
        raise ToolRefused(f"first_line is {start}: the file has {_count(count)}", "first_line", count or None)
    return b"".join(islice(BytesIO(content), start - 1, last))


def bounded(content: bytes, keep_bytes: int) -> tuple[str, bool]:
    """Return a file as text, of a long one its head and its tail, and whether something is left out."""
    output = BoundedOutput(keep_bytes)
    output.feed(content)
    return output.text(), output.truncated


def shown(content: bytes, first: int | None, last: int | None, keep_bytes: int) -> tuple[str, bool]:
    """Return `bounded` of the lines ``first`` to ``last`` of a file.

    Raises:
        ToolRefused: The file does not have the first of them.
    """
    return bounded(lines_of(content, first, last), keep_bytes)


def replaced(content: bytes, old: str, new: str) -> bytes:
    """Return a file with the one occurrence of ``old`` replaced.

    Raises:
        ToolRefused: The text occurs not at all, or more than once.
    """
    wanted = old.encode("utf-8", "surrogatepass")
    at = content.find(wanted)
    if at < 0:
        raise _absent(content, wanted)
    lines = _lines_with(content, wanted, at)
    if len(lines) > 1:
        more = len(lines) > _SHOWN
        raise ToolRefused(
            f"old_text occurs {f'more than {_SHOWN}' if more else len(lines)} times, at lines "
            f"{', '.join(map(str, lines[:_SHOWN]))}{', ...' if more else ''}: "
            "give more of the text around the one to replace",
            "old_text",
            lines[0],
        )
    return content[:at] + new.encode("utf-8", "surrogatepass") + content[at + len(wanted) :]


def _lines_with(content: bytes, wanted: bytes, at: int) -> list[int]:
    """Return the lines of the first places of a text, from ``at`` on, which is the first: one more than are shown.

    The file and the text are an agent's, and this runs on the event loop: so the places are bounded, and no part of the
    file is counted twice.
    """
    lines: list[int] = []
    line, counted = 1, 0
    while at >= 0 and len(lines) <= _SHOWN:
        line, counted = line + content.count(b"\n", counted, at), at
        lines.append(line)
        at = content.find(wanted, at + 1)
    return lines


def _absent(content: bytes, wanted: bytes) -> ToolRefused:
    """Say that a text is not there, and where it is but for white space."""
    if b"\r\n" in content and content.replace(b"\r\n", b"\n").find(wanted) >= 0:
        return ToolRefused("old_text does not occur: the lines of this file end with \\r\\n", "old_text")
    text, sought = _bare(content), _bare(wanted.strip(b"\n"))
    at = text.find(sought) if sought.strip(b"\n") else -1
    if at >= 0:
        line = text.count(b"\n", 0, at) + 1
        return ToolRefused(
            f"old_text does not occur; line {line} differs from it in white space only: copy it as it stands",
            "old_text",
            line,
        )
    return ToolRefused("old_text does not occur in the file: read it again, and copy the text as it stands", "old_text")


def _bare(content: bytes) -> bytes:
    """Return the lines of a text without white space, each between two line feeds: one search finds whole lines."""
    return b"\n" + content.translate(None, b" \t\r\v\f") + b"\n"


def _count(lines: int) -> str:
    return f"{lines} line{'' if lines == 1 else 's'}"
