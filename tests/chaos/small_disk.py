"""A file system of limited size for a server alone, that can be filled and emptied. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SmallDisk:
    """An ext4 image, mounted.

    Args:
        place: Where it is mounted.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._hog = place / "hog"

    def fill(self) -> None:
        """Take all space, also from root."""
        with self._hog.open("wb", buffering=0) as file:
            at = 0
            for piece in (1 << 28, 1 << 22, 1 << 16, 1 << 12):  # in halves it would take what is freed meanwhile, too
                try:
                    while True:
                        os.posix_fallocate(file.fileno(), at, piece)
                        at += piece
                except OSError:
                    continue

    def empty(self) -> None:
        """Give the space back."""
        self._hog.unlink(missing_ok=True)


@contextmanager
def small_disk(directory: Path, size_mib: int) -> Iterator[SmallDisk]:
    """Yield a new ext4 of ``size_mib``; its image lies in ``directory`` and takes what is written to it."""
    image, place = directory / "disk.img", directory / "disk"
    place.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    # An inode for each 4 KiB: layers are many small files.
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-i", "4096", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        yield SmallDisk(place)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        image.unlink()
