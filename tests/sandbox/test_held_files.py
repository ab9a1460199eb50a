"""Ways to keep files without a name: all count against the disk limit, whoever holds them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from errata_server.sandbox.base import Limits
from errata_server.sandbox.namespace.backend import NamespaceBackend
from errata_server.sandbox.namespace.disk_watch import Growth

from .test_diskwatch import own_disk as own_disk

pytestmark = pytest.mark.sandbox

MIB = 1024**2
LIMITS = Limits()
_PYTHON = """
import array, itertools, mmap, os, shutil, socket, sys, time, ctypes
def made(n):
    fd = os.open(str(n), os.O_RDWR | os.O_CREAT); os.unlink(str(n))
    return fd
def fill(fd):
    for _ in range(60): os.write(fd, bytes(1 << 20))
"""
PROGRAMS = {
    "in a socket": """
pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(10)]
for n in range(40):
    fd = made(n); socket.send_fds(pairs[n % 10][0], [b'x'], [fd]); fill(fd); os.close(fd)
time.sleep(30)
""",
    "in a socket, before it is written": """
a, b = socket.socketpair()
fds = [made(n) for n in range(40)]
socket.send_fds(a, [b'x'], fds)
for fd in fds: os.close(fd)
for n in range(40):
    _, ancillary, _, _ = b.recvmsg(1, socket.CMSG_LEN(4 * 253), socket.MSG_PEEK)
    found = array.array('i'); found.frombytes(ancillary[0][2])
    for at, fd in enumerate(found):
        if at != n: os.close(fd)
    fill(found[n]); os.close(found[n])
time.sleep(30)
""",
    "in a connection that nobody accepts": """
door = socket.socket(socket.AF_UNIX); door.bind('/tmp/door'); door.listen(100)
for n in range(40):
    fd = made(n)
    with socket.socket(socket.AF_UNIX) as one:
        one.connect('/tmp/door'); socket.send_fds(one, [b'x'], [fd])
    fill(fd); os.close(fd)
time.sleep(30)
""",
    "in a socket in a socket": """
top = socket.socketpair()
for n in range(40):
    a, b = socket.socketpair(); fd = made(n)
    socket.send_fds(a, [b'x'], [fd]); socket.send_fds(top[0], [b'x'], [b.fileno()])
    a.close(); b.close(); fill(fd); os.close(fd)
time.sleep(30)
""",
    "in a socket, beside sparse files": """
for n in range(3): os.truncate(os.open(f'sparse{n}', os.O_RDWR | os.O_CREAT), 60 << 20)
a, b = socket.socketpair()
for n in range(40):
    fd = made(n); socket.send_fds(a, [b'x'], [fd]); fill(fd); os.close(fd)
time.sleep(30)
""",
    "never named": """
kept = [os.open('.', os.O_TMPFILE | os.O_RDWR) for _ in range(40)]
for fd in kept: fill(fd)
time.sleep(30)
""",
    "one page mapped": """
kept = []
for n in range(40):
    fd = made(n); fill(fd); kept.append(mmap.mmap(fd, 4096)); os.close(fd)
time.sleep(30)
""",
    "by a process that may not be looked at": """
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
kept = [made(n) for n in range(40)]
for fd in kept: fill(fd)
time.sleep(30)
""",
    "by a program that may not be read": """
if len(sys.argv) == 1:
    shutil.copy(os.path.realpath('/usr/bin/python3'), 'program'); os.chmod('program', 0o111)
    os.execv('./program', ['./program', 'p.py', 'again'])
kept = [made(n) for n in range(40)]
for fd in kept: fill(fd)
time.sleep(30)
""",
}
_C = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
static char block[1 << 20];
static void padded(char *from, char *name) {
    int in = open(from, O_RDONLY), out = open(name, O_RDWR | O_CREAT, 0700), size;
    while ((size = read(in, block, sizeof block)) > 0) write(out, block, size);
    for (int i = 0; i < 55; i++) write(out, block, sizeof block);
    close(in); close(out);
}
static int hold(void *unused) {
    char name[20];
    usleep(200000);
    for (int n = 0; n < 40; n++) {
        sprintf(name, "%d", n);
        int fd = open(name, O_RDWR | O_CREAT, 0600);
        unlink(name);
        for (int i = 0; i < 60; i++) if (write(fd, block, sizeof block) < 0) _exit(3);
    }
    for (;;) pause();
}
static void *thread(void *unused) { hold(0); return 0; }
"""
C_PROGRAMS = {
    "by a thread with descriptors of its own": """
int main() {
    int flags = CLONE_VM | CLONE_SIGHAND | CLONE_THREAD | CLONE_FS | CLONE_SYSVSEM;
    clone(hold, (char *)malloc(1 << 20) + (1 << 20), flags, 0);
    sleep(30);
}
""",
    "by a thread that outlives the first": """
int main() { pthread_t t; pthread_create(&t, 0, thread, 0); syscall(SYS_exit, 0); }
""",
    "as a program that runs": """
int main(int argc, char **argv) {
    if (argc > 1) { unlink(argv[0]); sleep(30); return 0; }
    for (int n = 0; n < 40; n++) {
        char name[20];
        sprintf(name, "./e%d", n);
        padded(argv[0], name);
        if (!fork()) execl(name, name, "x", (char *)0);
        while (access(name, F_OK) == 0) usleep(500);
    }
    sleep(30);
}
""",
}
ALL = [*PROGRAMS, *C_PROGRAMS]


async def hold(backend: NamespaceBackend, way: str) -> tuple[str | None, bool]:
    """Run a program that holds up to 2,400 MiB; return the limit that ended it, and whether it was timed out."""
    box = await backend.open(limits=LIMITS)
    if way in PROGRAMS:
        await box.write_file("p.py", (_PYTHON + PROGRAMS[way]).encode())
        command = "exec python3 p.py"
    else:
        await box.write_file("p.c", (_C + C_PROGRAMS[way]).encode())
        built = await box.run("gcc -O1 -w -pthread -o p p.c")
        assert built.exit_code == 0, built.stderr
        command = "exec ./p"
    result = await box.run(command, timeout_s=50.0)
    assert (await box.run("echo on")).stdout == "on\n"
    await box.destroy()
    return result.limit_hit, result.timed_out


@pytest.mark.parametrize("way", ALL)
async def test_a_file_without_a_name_counts_however_it_is_held(namespace_backend: NamespaceBackend, way: str) -> None:
    assert await hold(namespace_backend, way) == ("disk", False)


@contextmanager
def taken_from(place: Path) -> Iterator[list[int]]:
    """Yield a list that has the most space taken from the file system since, in bytes."""

    def used() -> int:
        space = os.statvfs(place)
        return (space.f_blocks - space.f_bfree) * space.f_frsize

    before, most, stop = used(), [0], threading.Event()

    def read() -> None:
        while not stop.wait(0.002):
            most[0] = max(most[0], used() - before)

    reading = threading.Thread(target=read)
    reading.start()
    try:
        yield most
    finally:
        stop.set()
        reading.join()


@pytest.mark.chaos  # alone on the machine: how much is written until the watcher looks depends on who else runs
@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of its own takes root")
@pytest.mark.parametrize("way", [way for way in ALL if "socket" in way or "connection" in way])
async def test_descriptors_in_a_socket_pass_the_cap_by_less_than_half(own_disk: Path, way: str) -> None:
    backend = NamespaceBackend(own_disk / "sandboxes")
    await backend.start()
    with taken_from(own_disk) as most:
        assert await hold(backend, way) == ("disk", False)
    await backend.close()
    assert most[0] < 1.5 * LIMITS.disk_bytes, f"{most[0] // MIB} MiB"


HONEST = """
import socket, os
a, b = socket.socketpair(); door = socket.socket(socket.AF_UNIX); door.bind('door'); door.listen()
one = socket.socket(socket.AF_UNIX); one.connect('door')
fd = os.open('f', os.O_RDWR | os.O_CREAT); os.unlink('f'); os.write(fd, bytes(1 << 20))
socket.send_fds(a, [b'x'], [fd]); socket.send_fds(one, [b'x'], [fd]); os.close(fd)
print('sent', flush=True)
socket.recv_fds(door.accept()[0], 1, 1)
open('go').read()
socket.recv_fds(b, 1, 1)
print('received')
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of its own takes root")
async def test_what_other_sandboxes_write_is_not_charged_to_one_with_descriptors_in_a_socket(own_disk: Path) -> None:
    backend = NamespaceBackend(own_disk / "sandboxes", limits=Limits(disk_bytes=32 * MIB, file_size_bytes=64 * MIB))
    await backend.start()
    honest, removed = await backend.open(), await backend.open(limits=LIMITS)
    writers = [await backend.open(limits=LIMITS) for _ in range(3)]
    await removed.run("head -c 60M /dev/zero > f")
    await honest.write_file("p.py", HONEST.encode())
    await honest.run("mkfifo go")
    running = asyncio.create_task(honest.run("exec timeout 30 python3 p.py < /dev/null", timeout_s=40.0))
    write = "for n in 1 2 3; do head -c 60M /dev/zero > f$n; sleep 0.1; done; sleep 1"
    results = await asyncio.gather(*(box.run(write) for box in writers), removed.destroy())
    assert [result.limit_hit for result in results[:3]] == [None] * 3
    assert not running.done(), running.result()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await backend.close()


async def test_known_growth_is_what_is_there(namespace_backend: NamespaceBackend) -> None:
    backend = namespace_backend
    backend.growth = Growth()
    box = await backend.open()
    await box.run("head -c 20M /dev/zero > a")
    await box.write_file("b", bytes(5 * MIB))
    await box.snapshot()
    await box.run("head -c 10M /dev/zero > c; sleep 0.7; head -c 10M /dev/zero > d; rm c")
    assert 35 <= backend.growth.known_bytes / MIB <= 36
    with pytest.raises(asyncio.TimeoutError):  # a command that is cancelled after a look
        await asyncio.wait_for(box.run("head -c 8M /dev/zero > e; sleep 30"), 1.5)
    await box.destroy()
    await backend.collect([])
    assert abs(backend.growth.known_bytes) < MIB
    assert not backend.growth._watches
