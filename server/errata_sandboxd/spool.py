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
        file = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115 - closed below
        made = SpoolFile(self, file, most_bytes, too_large)
        try:
            yield made
        finally:
            self.count(-made.size)
            with contextlib.suppress(OSError):  # of bytes that were not written yet, and are deleted
                file.close()

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
    """A temporary file whose bytes are counted; made by `Spool.file`.

    Every method raises `Refused` (``busy``) if the temporary directory is full, or cannot be used for another reason.
    """

    def __init__(
        self, spool: Spool, file: tempfile.SpooledTemporaryFile[bytes], most_bytes: int, too_large: str
    ) -> None:
        self.size = 0
        self._spool, self._file = spool, file
        self._most_bytes, self._too_large = most_bytes, too_large
        self._total = 0
        self._failure: OSError | None = None

    @contextlib.contextmanager
    def _storage(self) -> Iterator[tempfile.SpooledTemporaryFile[bytes]]:
        """Yield the file, converting its errors. After the first one its state is undefined, so it is not used again.

        Seeking writes what is buffered, so that every operation can find the directory full.
        """
        if self._failure is None:
            try:
                yield self._file
                return
            except OSError as error:
                self._failure = error
        why = self._failure.strerror
        raise Refused("busy", f"the broker has no room for a copy ({why}): try again later") from self._failure

    def write(self, data: bytes) -> int:
        """Append bytes.

        Raises:
            Refused: ``too_large``: more than this file may have were written to it. ``busy``: the owner's files
                have too many.
        """
        self._total += len(data)
        if self._total > self._most_bytes:
            raise Refused("too_large", self._too_large)
        self._spool.count(len(data))
        self.size += len(data)
        with self._storage() as file:
            file.seek(0, 2)
            return file.write(data)

    def read_at(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes from an offset."""
        with self._storage() as file:
            file.seek(offset)
            return file.read(size)

    def rewound(self) -> tempfile.SpooledTemporaryFile[bytes]:
        """Return the file at its beginning, for reading."""
        with self._storage() as file:
            file.rollover()  # here, where its errors are converted: `requests` asks for a descriptor, which does it
            file.seek(0)
            return file

    def clear(self) -> None:
        """Drop the content. What was written before still counts towards this file's bound."""
        with self._storage() as file:
            file.seek(0)
            file.truncate()
        self._spool.count(-self.size)
        self.size = 0
