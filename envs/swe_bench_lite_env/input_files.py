"""Files of rows, recipes and predictions, opened only if they are regular, and read up to a limit."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from errata_protocol.bounded_json import decode
from errata_protocol.errors import InvalidRequest

MAX_FILE_BYTES = 1024**3
"""Largest file that is read whole, bytes: JSON that is not in lines."""

MAX_LINE_BYTES = 64 * 1024**2
"""Longest line of a file of JSON lines, bytes."""

_PART_BYTES = 1024**2


class FileRefused(InvalidRequest):
    """A file that is not read: it is not a regular file, or too large."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; anything else is refused without opening it, because a FIFO would wait.

    Raises:
        FileRefused: It is not a regular file.
        OSError: It cannot be opened.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise FileRefused(f"{path} is not a regular file: name a file")
    # It may be another file by now: then O_NONBLOCK keeps the call from waiting, and what was opened is looked at.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileRefused(f"{path} is not a regular file: name a file")
    return os.fdopen(fd, "rb")


def json_values(path: Path) -> Any:
    """Return the value in a JSON file, or the list of those in a file of JSON lines, whose name ends in ``.jsonl``.

    Raises:
        FileRefused: It is not a regular file, or too large.
        ValueError: It is not JSON within the bounds of `errata_protocol.bounded_json`.
        OSError: It cannot be read.
    """
    if path.suffix == ".jsonl":
        values = []
        for number, line in json_lines(path):
            try:
                values.append(decode(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
        return values
    content = bytearray()
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
            raise _too_large(path)
        while len(content) <= MAX_FILE_BYTES and (part := file.read(_PART_BYTES)):
            content += part
    if len(content) > MAX_FILE_BYTES:  # it grew, or is one of a file system that tells no sizes
        raise _too_large(path)
    return decode(bytes(content))


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line) for the lines of a file that are not empty.

    Raises:
        FileRefused: It is not a regular file, or a line is too long.
        OSError: It cannot be read.
    """
    with open_regular(path) as file:
        number = 1
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise FileRefused(f"{path}: line {number} is longer than {MAX_LINE_BYTES:,} bytes")
            if line.strip():
                yield number, line
            number += 1


def _too_large(path: Path) -> FileRefused:
    return FileRefused(f"{path} is larger than {MAX_FILE_BYTES:,} bytes: write JSON lines, in a file .jsonl")
