"""How far a command gets beyond its disk and inode limits before it is stopped, and what it takes of the reserve.

    python bench/sandbox_quota.py [--json] [--rounds 5] [--size-mib 4096]

Needs root: it makes an ext4 image, mounts it, and reads the peak of what is used on it every 2 ms while a command
writes as fast as it can. Limits are the defaults (256 MiB, 50,000 inodes, 64 MiB a file).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from errata_protocol.errors import SandboxFailed
from errata_server.sandbox.base import Limits
from errata_server.sandbox.namespace.backend import NamespaceBackend

MIB = 1024**2
DEFAULT = Limits()
HUGE = Limits(disk_bytes=1 << 40, inodes=10**9)
_HELD = (
    "import os\n"
    "for n in range(200):\n"
    "    fd = os.open(str(n), os.O_RDWR | os.O_CREAT); os.unlink(str(n))\n"
    "    for _ in range(60): os.write(fd, bytes(1 << 20))\n"
)
_MAPPED = _HELD.replace("os.write(fd, bytes(1 << 20))", "0") + (
    "    os.truncate(fd, 60 << 20); m = mmap.mmap(fd, 60 << 20); os.close(fd); kept.append(m)\n"
    "    for at in range(0, 60 << 20, 4096): m[at] = 1\n"
)
_SENT = (
    "import os, socket\n"
    "pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(10)]\n"
    "for n in range(60):\n"
    "    fd = os.open(str(n), os.O_RDWR | os.O_CREAT); os.unlink(str(n))\n"
    "    socket.send_fds(pairs[n % 10][0], [b'x'], [fd])\n"
    "    for _ in range(60): os.write(fd, bytes(1 << 20))\n"
    "    os.close(fd)\n"
)
_UNACCEPTED = _SENT.replace(
    "pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(10)]",
    "door = socket.socket(socket.AF_UNIX); door.bind('/tmp/door'); door.listen(100)",
).replace(
    "socket.send_fds(pairs[n % 10][0], [b'x'], [fd])",
    "one = socket.socket(socket.AF_UNIX); one.connect('/tmp/door'); socket.send_fds(one, [b'x'], [fd]); one.close()",
)
COMMANDS = {
    "dd": ("for i in {1..200}; do dd if=/dev/zero of=f$i bs=1M count=60 status=none; done", DEFAULT),
    "eight dd": (
        "for k in {1..8}; do for i in {1..9}; do dd if=/dev/zero of=f$k.$i bs=1M count=60; done & done; wait",
        DEFAULT,
    ),
    "dd after 2 s": ("sleep 2; for i in {1..200}; do dd if=/dev/zero of=f$i bs=1M count=60 status=none; done", DEFAULT),
    "deleted but open": (f'python3 -c "{_HELD}"', DEFAULT),
    "deleted but mapped": (f'python3 -c "import mmap; kept = []\n{_MAPPED}"', DEFAULT),
    "deleted, in a socket": (f'python3 -c "{_SENT}"', DEFAULT),
    "in no one's connection": (f'python3 -c "{_UNACCEPTED}"', DEFAULT),
    "inodes": ("python3 -c \"for n in range(400_000): open(str(n), 'w').close()\"", DEFAULT),
    "fallocate": ("fallocate -l 1T f; truncate -s 1T g", DEFAULT),
    "full disk": ("for i in {1..2000}; do dd if=/dev/zero of=f$i bs=1M count=60 status=none; done", HUGE),
}  # fmt: skip


class Peak:
    """Reads in a thread what is used at most."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._stop = threading.Event()
        self.start = self._used()
        self.most = self.start
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _used(self) -> tuple[int, int]:
        space = os.statvfs(self._place)
        return (space.f_blocks - space.f_bfree) * space.f_frsize, space.f_files - space.f_ffree

    def _read(self) -> None:
        while not self._stop.wait(0.002):
            used = self._used()
            self.most = max(self.most[0], used[0]), max(self.most[1], used[1])

    def end(self) -> tuple[int, int]:
        self._stop.set()
        self._thread.join()
        return self.most[0] - self.start[0], self.most[1] - self.start[1]


async def once(place: Path, name: str) -> dict[str, Any]:
    command, limits = COMMANDS[name]
    backend = NamespaceBackend(place / "data", limits=limits)
    try:
        await backend.start()
        box = await backend.open()
        await box.run("true")
        peak = Peak(place)
        started = time.monotonic()
        try:
            result = await box.run(command, timeout_s=60.0)
            how = str(result.limit_hit or ("timed out" if result.timed_out else "ended"))
        except SandboxFailed:
            how = "SandboxFailed"
        took = time.monotonic() - started
        space = os.statvfs(place)
        size, inodes = peak.end()
        await box.destroy()
        least = space.f_blocks * space.f_frsize - peak.most[0]
        return {"how": how, "s": took, "taken_mib": size / MIB, "inodes": inodes, "least_free_mib": least / MIB}
    finally:
        await backend.close()


def measure(rounds: int, size_mib: int) -> dict[str, Any]:
    """Run every command on a fresh image, ``rounds`` times."""
    home = Path(tempfile.mkdtemp(prefix="errata-quota-"))
    place = home / "disk"
    place.mkdir()
    found: dict[str, Any] = {}
    try:
        for name in COMMANDS:
            rows = []
            for _ in range(rounds):
                # A name of its own: whoever unshared its mounts meanwhile still holds the last one.
                image = home / f"image-{time.monotonic_ns()}"
                with image.open("wb") as made:
                    made.truncate(size_mib * MIB)
                subprocess.run(["mkfs.ext4", "-q", "-N", "1000000", str(image)], check=True)
                subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
                try:
                    rows.append(asyncio.run(once(place, name)))
                finally:
                    subprocess.run(["umount", str(place)], check=True)
                    image.unlink()
            found[name] = {
                "how": sorted({row["how"] for row in rows}),
                **{
                    key: {"median": statistics.median(row[key] for row in rows), "max": max(row[key] for row in rows)}
                    for key in ("s", "taken_mib", "inodes")
                },
                "least_free_mib": min(row["least_free_mib"] for row in rows),
            }
    finally:
        shutil.rmtree(home)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size-mib", type=int, default=4096)
    parser.add_argument("--smoke", action="store_true", help="one round")
    arguments = parser.parse_args()
    result = measure(1 if arguments.smoke else arguments.rounds, arguments.size_mib)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{'':22} {'taken MiB':>18} {'inodes':>18} {'s':>8} {'least free':>11}  how")
    for name, row in result.items():
        taken, inodes = (f"{row[key]['median']:.0f} (max {row[key]['max']:.0f})" for key in ("taken_mib", "inodes"))
        least = f"{row['least_free_mib']:.0f} MiB"
        print(f"{name:22} {taken:>18} {inodes:>18} {row['s']['median']:8.2f} {least:>11}  {', '.join(row['how'])}")


if __name__ == "__main__":
    main()
