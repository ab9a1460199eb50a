"""`Spool`: the bytes that copies of one owner hold in the broker, in memory or in its temporary directory."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator

from .schema import Refused

_IN_MEMORY_BYTES = 256 * 1024


class Spool:
    """Counts the bytes of all files that it gave out.

    Args:
        most_bytes: Most bytes of all files together.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """How many bytes the files have now."""
        return self._held_bytes

    @contextlib.contextmanager
    def file(self, most_bytes: int, too_large: str) -> Iterator[SpoolFile]:
        """Yield an empty file, which is deleted at the end.

        Args:
            most_bytes: Most bytes of this file.
            too_large: Message of the error if it gets more.
        """
        with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) as file:
            made = SpoolFile(self, file, most_bytes, too_large)
            try:
                yield made
            finally:
                self.count(-made.size)

    def count(self, size: int) -> None:
        """Add ``size`` bytes to those that are held.

        Raises:
            Refused: ``busy``: they would be more than allowed.
        """
        with self._lock:
            if size > 0 and self._held_bytes + size > self._most_bytes:
                raise Refused("busy", f"copies hold {self._held_bytes} bytes of {self._most_bytes}: try again later")
            self._held_bytes += size


class SpoolFile:
    """A temporary file whose bytes are counted; made by `Spool.file`."""

    def __init__(
        self, spool: Spool, file: tempfile.SpooledTemporaryFile[bytes], most_bytes: int, too_large: str
    ) -> None:
        self.size = 0
        self._spool, self._file = spool, file
        self._most_bytes, self._too_large = most_bytes, too_large
        self._total = 0

    def write(self, data: bytes) -> int:
        """Append bytes.

        Raises:
            Refused: ``too_large``: more than this file may have were written to it. ``busy``: the owner's files
                have too many, or the temporary directory is full.
        """
        self._total += len(data)
        if self._total > self._most_bytes:
            raise Refused("too_large", self._too_large)
        self._spool.count(len(data))
        self.size += len(data)
        try:
            self._file.seek(0, 2)
            return self._file.write(data)
        except OSError as error:
            raise Refused("busy", f"the broker has no room for a copy ({error.strerror}): try again later") from error

    def read_at(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes from an offset."""
        self._file.seek(offset)
        return self._file.read(size)

    def rewound(self) -> tempfile.SpooledTemporaryFile[bytes]:
        """Return the file at its beginning, for reading."""
        self._file.seek(0)
        return self._file

    def clear(self) -> None:
        """Drop the content. What was written before still counts towards this file's bound."""
        self._file.seek(0)
        self._file.truncate()
        self._spool.count(-self.size)
        self.size = 0
