"""Text operations of the file tools: ranges of lines, and exact replacement. Pure functions."""

from __future__ import annotations

from errata_protocol.errors import InvalidRequest
from errata_server.sandbox.output import BoundedOutput


class ToolRefused(InvalidRequest):
    """A call that a tool refuses; the message is for the agent.

    Args:
        message: What is wrong and what would be right.
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
    lines = _lines(content)
    start = 1 if first is None else first
    if start > max(1, len(lines)):
        raise ToolRefused(f"first_line is {start}: the file has {_count(len(lines))}", "first_line", len(lines) or None)
    return b"".join(lines[start - 1 : last])


def bounded(content: bytes, keep_bytes: int) -> tuple[str, bool]:
    """Return a file as text, of a long one its head and its tail, and whether something is left out."""
    output = BoundedOutput(keep_bytes)
    output.feed(content)
    return output.text(), output.truncated


def replaced(content: bytes, old: str, new: str) -> bytes:
    """Return a file with the one occurrence of ``old`` replaced.

    Raises:
        ToolRefused: The text occurs not at all, or more than once.
    """
    wanted = old.encode("utf-8", "surrogatepass")
    at = content.find(wanted)
    if at < 0:
        raise _absent(content, wanted)
    places = [at]
    while (at := content.find(wanted, at + 1)) >= 0:
        places.append(at)
    if len(places) > 1:
        lines = [content.count(b"\n", 0, place) + 1 for place in places]
        shown = ", ".join(map(str, lines[:10])) + (", ..." if len(lines) > 10 else "")
        raise ToolRefused(
            f"old_text occurs {len(lines)} times, at lines {shown}: give more of the text around the one to replace",
            "old_text",
            lines[0],
        )
    return content[: places[0]] + new.encode("utf-8", "surrogatepass") + content[places[0] + len(wanted) :]


def _absent(content: bytes, wanted: bytes) -> ToolRefused:
    """Say that a text is not there, and where it is but for white space."""
    if b"\r\n" in content and content.replace(b"\r\n", b"\n").find(wanted) >= 0:
        return ToolRefused("old_text does not occur: the lines of this file end with \\r\\n", "old_text")
    lines, sought = _bare(content), _bare(wanted.strip(b"\n"))
    for start in range(len(lines) - len(sought) + 1) if any(sought) else ():
        if lines[start : start + len(sought)] == sought:
            return ToolRefused(
                f"old_text does not occur; line {start + 1} differs from it in white space only: copy it as it stands",
                "old_text",
                start + 1,
            )
    return ToolRefused("old_text does not occur in the file: read it again, and copy the text as it stands", "old_text")


def _bare(content: bytes) -> list[bytes]:
    return [b"".join(line.split()) for line in content.split(b"\n")]


def _lines(content: bytes) -> list[bytes]:
    """Split into lines that keep their line feed; the last may lack one.

    Unlike `bytes.splitlines`, a carriage return ends no line: editors and compilers number lines so.
    """
    parts = content.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _count(lines: int) -> str:
    return f"{lines} line{'' if lines == 1 else 's'}"
