"""What one sandbox cannot take from all others: processors and socket buffers."""

from __future__ import annotations

import asyncio
import os

import pytest

from errata_server.sandbox.base import Limits
from errata_server.sandbox.host import cgroups
from errata_server.sandbox.namespace.backend import NamespaceBackend

pytestmark = pytest.mark.sandbox

MIB = 1024**2
SPIN = """
import os, sys, time
end = time.monotonic() + 3
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        os.setsid()  # the kernel's own grouping is by session, and anyone can make more of these
        while time.monotonic() < end: pass
        os._exit(0)
try:
    while True: os.wait()
except ChildProcessError: print(sum(os.times()[2:4]))
"""
SOCKETS = """
import socket
server = socket.create_server(("127.0.0.1", 5000), backlog=100)
kept, total = [], 0
for _ in range(60):
    client = socket.create_connection(("127.0.0.1", 5000), 5)
    peer = server.accept()[0]
    client.setblocking(False)
    try:
        while True: total += client.send(bytes(1 << 16))
    except BlockingIOError: pass
    kept.append((client, peer))
print(total)
"""


@pytest.fixture
def before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands come before other work of this machine, which would leave two sandboxes little to share."""
    monkeypatch.setattr(cgroups, "_CPU_WEIGHT", {1: 8 * 1024, 2: 8 * 100})


async def test_a_hundred_busy_processes_get_no_more_than_two(
    before_others: None, namespace_backend: NamespaceBackend
) -> None:
    assert namespace_backend.cgroups is not None
    if not namespace_backend.cgroups.shares_cpu:
        pytest.skip("no writable cpu cgroup on this machine")
    boxes = [await namespace_backend.open() for _ in range(2)]
    for box in boxes:
        await box.write_file("spin.py", SPIN.encode())
    results = await asyncio.gather(
        *(box.run(f"python3 spin.py {count}") for box, count in zip(boxes, (100, 2), strict=True))
    )
    many, few = (float(result.stdout) for result in results)
    assert few > many / 3, f"{few:.2f} s of CPU time beside {many:.2f} s"


async def test_commands_come_after_the_server(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    assert (await box.run("nice; nice -n -1 true")).stdout == f"{min(19, os.nice(0) + 5)}\n"
    if (found := namespace_backend.cgroups) is not None and (place := found._cpu) is not None:
        version, default = (2, 100) if found.version == 2 else (1, 1024)
        weight = int((place / {2: "cpu.weight", 1: "cpu.shares"}[version]).read_text())
        assert weight < default


async def test_socket_buffers_are_memory_of_the_sandbox(namespace_backend: NamespaceBackend) -> None:
    assert namespace_backend.cgroups is not None
    if not namespace_backend.cgroups.version:
        pytest.skip(f"socket buffers need cgroups: {namespace_backend.cgroups.note}")
    box = await namespace_backend.open(limits=Limits(memory_bytes=64 * MIB))
    await box.write_file("s.py", SOCKETS.encode())
    result = await box.run("python3 s.py")
    assert result.limit_hit == "memory" or int(result.stdout) < 64 * MIB, result
