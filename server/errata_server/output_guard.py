"""Standard output and error of a command: nothing that is written to them acts on a terminal."""

from __future__ import annotations

import io
import sys
from typing import Any, TextIO, cast

from errata_protocol.printable import printable_lines


class GuardedStream:
    """A text stream that writes control characters as backslash escapes, except for line feeds and tabs.

    A carriage return at the beginning of what is written stays, because progress lines begin with one. The bytes of
    ``buffer`` are not changed.

    Args:
        stream: The stream to write to.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write text and return its length."""
        start = text[:1] if text.startswith("\r") else ""
        self.stream.write(start + printable_lines(text[len(start) :]))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def guard_output() -> None:
    """Replace standard output and error with a `GuardedStream` each, unless that was done before."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, GuardedStream):
            continue
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale may have fewer characters than a text
        setattr(sys, name, cast(TextIO, GuardedStream(stream)))


def release_output() -> None:
    """Undo `guard_output`, for programs that format their own output and print nothing of another party."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, GuardedStream):
            setattr(sys, name, stream.stream)


def write_exact(content: bytes) -> None:
    """Write bytes to standard output as they are, or as text without control characters if it is a terminal."""
    if sys.stdout.isatty():
        print(printable_lines(content.decode("utf-8", "backslashreplace")))
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
