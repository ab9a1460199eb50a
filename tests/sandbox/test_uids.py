"""Each running command has a uid of the host to itself; inside, and on disk, it is always the same one."""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from errata_server.sandbox.base import Limits
from errata_server.sandbox.base_trees.tree import find_base
from errata_server.sandbox.host.cgroups import Cgroups
from errata_server.sandbox.namespace import backend as namespace_module
from errata_server.sandbox.namespace.backend import NamespaceBackend
from errata_server.sandbox.namespace.sandbox import NamespaceSandbox

pytestmark = pytest.mark.sandbox

WHO = (
    "id; whoami; umask; touch f; mkdir d; ln -s f l; stat -c '%n %u:%g %U %A' f d l . ~ / /etc/passwd /dev/null "
    "/dev/shm /proc/self /proc/1; ls -l /etc | sha256sum; cat /proc/self/loginuid; "
    "grep -E '^(Uid|Cap|Groups)' /proc/self/status"
)


class SharedUid(NamespaceBackend):
    """A backend on a kernel without id-mapped mounts."""

    def _launch_config(self) -> dict[str, Any]:
        return super()._launch_config() | {"first_uid": None}


@pytest.fixture
async def without_cgroups(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NamespaceBackend]:
    monkeypatch.setattr(
        namespace_module, "find", lambda name, _: Cgroups(name, 0, Path("/"), Path("/"), "none in this test")
    )
    backend = NamespaceBackend(data_dir)
    await backend.start()
    yield backend
    await backend.close()


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.01)


async def open_box(backend: NamespaceBackend, limits: Limits | None = None) -> NamespaceSandbox:
    box = await backend.open(limits=limits)
    assert isinstance(box, NamespaceSandbox)
    return box


async def hold(backend: NamespaceBackend, box: NamespaceSandbox, command: str) -> asyncio.Task[Any]:
    """Start a command and return when it made the file ``full``."""
    running = asyncio.create_task(box.run(command, timeout_s=100.0))
    mark = backend.live_dir / box.id / "u/workspace/full"
    await until(lambda: mark.exists() or running.done(), "the command holds what it wants")
    assert not running.done(), running.result()
    return running


async def end(running: asyncio.Task[Any]) -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def host_uids(word: str) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and word.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.add(entry.stat().st_uid)
        except OSError:
            continue
    return found


async def test_what_is_seen_inside_is_what_a_shared_uid_shows(data_dir: Path) -> None:
    seen = []
    for kind in (NamespaceBackend, SharedUid):
        backend = kind(data_dir / kind.__name__)
        info = await backend.start()
        box = await open_box(backend)
        result = await box.run(WHO)
        assert result.stderr == ""
        (made,) = (backend.live_dir / box.id / "u").glob("workspace/f")
        assert made.stat().st_uid == made.stat().st_gid == 64000
        seen.append((result.stdout, await box.merged_digest(), (await box.snapshot()).ref.digest))
        assert any("share" in note for note in info.notes) is (kind is SharedUid)
        await backend.close()
    assert seen[0] == seen[1]
    assert "uid=64000(agent) gid=64000(agent) groups=64000(agent)" in seen[0][0]


@pytest.mark.parametrize("kind", [NamespaceBackend, SharedUid])
async def test_the_output_can_be_opened_by_name(data_dir: Path, kind: type[NamespaceBackend]) -> None:
    backend = kind(data_dir)
    await backend.start()
    box = await open_box(backend)
    result = await box.run("echo a > /dev/stdout; echo b | tee /dev/stderr; cat /dev/stdin", stdin=b"c\n")
    assert (result.stdout, result.stderr) == ("a\nb\nc\n", "b\n")
    await backend.close()


async def test_two_commands_at_once_have_two_uids_of_the_host(namespace_backend: NamespaceBackend) -> None:
    boxes = [await open_box(namespace_backend) for _ in range(2)]
    # Words that no other run of this test on the machine uses.
    words = [f"3{secrets.randbelow(10**6):06}.25" for _ in boxes]
    running = [asyncio.create_task(box.run(f"sleep {word}")) for box, word in zip(boxes, words, strict=True)]
    await until(lambda: all(host_uids(word) for word in words), "both run")
    uids = [host_uids(word) for word in words]
    assert all(len(found) == 1 for found in uids) and uids[0] != uids[1]
    assert all(uid > 0x7000_0000 for found in uids for uid in found)
    for task in running:
        await end(task)


async def test_a_session_reads_its_files_under_every_uid_it_gets(data_dir: Path) -> None:
    backend = NamespaceBackend(data_dir, spare=1)
    await backend.start()
    box = await open_box(backend)
    await box.run("mkdir -m 700 d; echo mine > d/f; chmod 600 d/f")
    snapshot = await box.snapshot()
    forks = [await backend.restore(snapshot) for _ in range(3)]
    look = "(cat /proc/self/uid_map; cat d/f && echo more >> d/f && stat -c %u d/f) > seen 2>&1; touch full; sleep 300"
    running = [await hold(backend, fork, look) for fork in forks]  # all at once, so that each has a uid of its own
    seen = [(backend.live_dir / fork.id / "u/workspace/seen").read_text() for fork in forks]
    for one in running:
        await end(one)
    assert all(text.endswith("mine\n64000\n") for text in seen), seen
    assert len(set(seen)) == 3, "each ran under another uid"
    for fork in forks:
        await fork.run("rm seen full")
    assert len({await fork.merged_digest() for fork in forks}) == 1
    assert await box.read_file("d/f") == b"mine\n"
    await backend.close()
    shared = SharedUid(data_dir)
    await shared.start()
    assert (await (await shared.restore(snapshot)).run("cat d/f; echo x >> d/f")).stdout == "mine\n"
    await shared.close()


async def test_inotify_instances_of_one_sandbox_are_not_taken_from_another(namespace_backend: NamespaceBackend) -> None:
    take = (
        "import ctypes\n"
        "n = 0\n"
        "while ctypes.CDLL(None).inotify_init1(0) >= 0: n += 1\n"
        "print(n)\n"
        "open('full', 'w'); import time; time.sleep({})\n"
    )
    first, second = [await open_box(namespace_backend) for _ in range(2)]
    running = await hold(namespace_backend, first, f'python3 -c "{take.format(300)}"')
    bound = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    result = await second.run(f'python3 -c "{take.format(0)}"')
    assert int(result.stdout) == min(bound, 1024 - 3), result
    libc = ctypes.CDLL(None, use_errno=True)
    ours = libc.inotify_init1(os.O_CLOEXEC)
    assert ours >= 0, "nor from the server's user"
    os.close(ours)
    await end(running)


async def test_pipe_buffers_of_one_sandbox_are_not_taken_from_another(namespace_backend: NamespaceBackend) -> None:
    take = (
        "import fcntl, os, time\n"
        "for _ in range(200):\n"
        "    r, w = os.pipe()\n"
        "    try: fcntl.fcntl(w, 1031, 1 << 20)\n"
        "    except PermissionError: break\n"
        "else: raise SystemExit('no end of pipe buffers')\n"
        "open('full', 'w'); time.sleep(300)\n"
    )
    first, second = [await open_box(namespace_backend) for _ in range(2)]
    running = await hold(namespace_backend, first, f'python3 -c "{take}"')
    size = "import fcntl, os; print(fcntl.fcntl(os.pipe()[1], 1032))"
    assert (await second.run(f'python3 -c "{size}"')).stdout == "65536\n"
    await end(running)


async def test_ptys_of_one_sandbox_are_bounded(namespace_backend: NamespaceBackend) -> None:
    box = await open_box(namespace_backend)
    script = "import os\\nn = 0\\ntry:\\n  while True: os.openpty(); n += 1\\nexcept OSError: print(n)"
    assert (await box.run(f"printf '{script}' | python3")).stdout == "64\n"


async def test_without_cgroups_the_uid_bounds_processes(without_cgroups: NamespaceBackend) -> None:
    info = await without_cgroups.start()
    assert "pids" in info.enforces and "memory_bytes" not in info.enforces
    limits = Limits(pids=48)
    first, second = [await open_box(without_cgroups, limits) for _ in range(2)]
    running = await hold(without_cgroups, first, "for i in {1..46}; do sleep 300 & done; touch full; wait")
    count = (
        "import os, time\nfor n in range(100):\n    if os.fork() == 0: time.sleep(300)\n    print(n + 1, flush=True)\n"
    )
    for _ in range(2):
        bomb = await second.run(f'python3 -c "{count}"', timeout_s=60.0)
        assert bomb.limit_hit == "pids" and bomb.stdout.split()[-1] in ("46", "47"), bomb
    fine = await second.run("for i in {1..40}; do sleep 0.1 & done; wait; echo fine")
    assert (fine.stdout, fine.limit_hit) == ("fine\n", None)
    await end(running)


async def test_the_agents_root_is_nobody(namespace_backend: NamespaceBackend) -> None:
    """Its namespace also knows the host's root, which owns the base; nothing may make it that."""
    box = await open_box(namespace_backend)
    result = await box.run(
        "cp /usr/bin/python3 p; chmod 6755 p; ./p -c 'import os; print(os.geteuid()); os.setuid(0)'; "
        "touch /etc/x; chmod 777 /etc; kill -9 1; echo 0 0 1 > /proc/self/uid_map; "
        "echo 1 > /proc/sys/kernel/ns_last_pid; grep Cap /proc/self/status"
    )
    assert result.stdout.startswith("64000\n")
    assert result.stderr.count("not permitted") + result.stderr.count("denied") >= 6, result.stderr
    assert all(set(line.split()[1]) == {"0"} for line in result.stdout.splitlines()[1:]), result.stdout


async def test_a_base_on_a_file_system_without_id_maps_still_works_and_says_so(data_dir: Path, tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={find_base().root},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    assert libc.mount(b"overlay", os.fsencode(tmp_path / "merged"), b"overlay", 0, options.encode()) == 0
    backend = NamespaceBackend(data_dir, bases={"default": tmp_path / "merged"})
    try:
        info = await backend.start()
        assert any("id-mapped" in note for note in info.notes), info
        box = await open_box(backend)
        assert (await box.run("touch f; stat -c %U f")).stdout == "agent\n"
    finally:
        await backend.close()
        libc.umount2(os.fsencode(tmp_path / "merged"), 2)


async def test_host_directories_look_as_on_the_host(namespace_backend: NamespaceBackend, tmp_path: Path) -> None:
    secret = tmp_path / "verifier/secret"
    secret.parent.mkdir()
    secret.write_text("verdict")
    secret.chmod(0o600)
    os.chown(secret, 64000, 64000)
    box = await open_box(namespace_backend)
    result = await box.run(
        "cat /verifier/secret; stat -c %u /verifier /verifier/secret; touch /verifier/x",
        mounts={"/verifier": secret.parent},
    )
    assert result.stdout == "verdict0\n64000\n"
    assert "Read-only file system" in result.stderr or "denied" in result.stderr
    assert not (await box.run("ls -d /verifier")).stdout


OWNER = """
import asyncio, sys
from pathlib import Path
from errata_server.sandbox.namespace.backend import NamespaceBackend

async def main():
    backend = NamespaceBackend(Path(sys.argv[1]))
    await backend.start()
    box = await backend.open()
    await box.run("exec sleep " + sys.argv[2], timeout_s=600)

asyncio.run(main())
"""


async def test_no_process_of_any_uid_outlives_a_killed_server(data_dir: Path) -> None:
    word = f"3{secrets.randbelow(10**6):06}.25"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(data_dir), word])
    # Its launcher's command line does not hold the word; the owner's does, as root.
    await until(lambda: bool(host_uids(word) - {0}), "the command runs")
    (uid,) = host_uids(word) - {0}
    owner.send_signal(signal.SIGKILL)
    owner.wait()

    def left() -> list[str]:
        return [p.name for p in Path("/proc").iterdir() if p.name.isdigit() and p.exists() and p.stat().st_uid == uid]

    def gone() -> bool:
        try:
            return left() == []
        except OSError:
            return False

    await until(gone, "no process of its uid is left")
    assert str(data_dir) not in Path("/proc/self/mountinfo").read_text()
