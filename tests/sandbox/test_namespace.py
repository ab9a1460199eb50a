"""What the namespace backend does with the machine: privileges, processes, mounts, disk, failures."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import SandboxFailed, SandboxUnavailable
from errata_server.sandbox.base import Limits, PathRefused, SandboxSnapshot
from errata_server.sandbox.base_trees.recipe import VERIFIER_DIRECTORY
from errata_server.sandbox.base_trees.tree import find_base
from errata_server.sandbox.files import as_owner
from errata_server.sandbox.files.walk import usage
from errata_server.sandbox.layers.store import MAX_CHAIN
from errata_server.sandbox.namespace.backend import NamespaceBackend
from errata_server.sandbox.namespace.runner_pool import Runner
from tests.hangs import HANGS_S

pytestmark = pytest.mark.sandbox

BUMP = "n=$(cat n 2>/dev/null || echo 0); echo $((n+1)) > n"


def disk_bytes(path: Path) -> int:
    return as_owner.call(usage, path, max_entries=10**7, max_bytes=10**12).size_bytes


def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


def lasting(seconds: int) -> str:
    """Return a time to sleep that names this test process: what is seen of the host's processes is everybody's."""
    return f"{seconds}.{os.getpid():010d}"


def processes_with(word: str) -> list[int]:
    """Return the host's processes whose command line holds ``word``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


# The three traps of a sandbox that root starts.


async def test_no_process_inside_carries_the_servers_environment(
    namespace_backend: NamespaceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERRATA_CANARY", "canary-in-the-server")
    for pid in namespace_backend.runners.pids:
        assert Path(f"/proc/{pid}/environ").read_bytes() == b""
    box = await namespace_backend.open()
    result = await box.run("env; cat /proc/*/environ; cat /proc/1/environ; tr -d a < /proc/1/cmdline")
    assert "canary" not in result.stdout


async def test_the_user_inside_is_an_unprivileged_user_of_the_host(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    result = await box.run("id -u; cat /proc/self/uid_map; cat /etc/shadow; rm -f /etc/hostname; echo x > f")
    assert result.stdout.split()[0] == "64000"
    mapping = [[int(field) for field in line.split()] for line in result.stdout.splitlines()[1:]]
    (outside,) = [first + 64000 - inside for inside, first, count in mapping if inside <= 64000 < inside + count]
    assert outside >= 64000, "no user namespace that maps it to root"
    assert "cat: /etc/shadow: Permission denied" in result.stderr
    assert "cannot remove '/etc/hostname'" in result.stderr
    await box.snapshot()
    made = next((namespace_backend.data_dir / "layers").glob("*/d/workspace/f"))
    assert (made.stat().st_uid, made.stat().st_gid) == (64000, 64000)


async def test_no_zombies_pile_up(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    for _ in range(20):
        await box.run("sleep 100 & setsid sleep 100 & true")

    def zombies() -> int:
        count = 0
        for entry in Path("/proc").iterdir():
            try:
                fields = (entry / "stat").read_bytes().rsplit(b")", 1)[1].split()
            except (OSError, IndexError):
                continue
            count += fields[0] == b"Z" and int(fields[1]) in (os.getpid(), *namespace_backend.runners.pids)
        return count

    until(lambda: zombies() == 0, "all dead processes are reaped")


# Nothing of the host inside, nothing of a sandbox left outside.


async def test_host_paths_are_invisible(namespace_backend: NamespaceBackend, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("host")
    box = await namespace_backend.open()
    result = await box.run(
        f"cat {tmp_path}/file; ls / /proc/1/cwd {Path(__file__).parent}; cat /proc/self/mountinfo /proc/self/cgroup"
        "  /proc/1/cmdline /proc/1/cgroup /proc/self/maps"
    )
    for part in (str(tmp_path), str(Path(__file__).parents[2]), str(namespace_backend.data_dir), sys.prefix):
        assert part not in result.stdout
    listed = (await box.run("ls -a /")).stdout.split()
    assert set(listed) <= {path.name for path in find_base().root.iterdir()} | {".", ".."}


def verifier_files(tmp_path: Path) -> Path:
    """Make a directory to mount, with one file."""
    source = tmp_path / "verifier"
    source.mkdir()
    (source / "test.sh").write_text("secret\n")
    return source


async def test_after_a_mount_only_what_was_made_for_it_is_removed(
    namespace_backend: NamespaceBackend, tmp_path: Path
) -> None:
    source = verifier_files(tmp_path)
    box = await namespace_backend.open()
    before = await box.merged_digest()
    mounts = {
        "/mnt": source,  # exists, and is empty
        "/opt/new": source,
        "/new/deep": source,
        "/file": source / "test.sh",
        "/again/below": source,
        "/again": source,
    }
    shown = await box.run("cat /mnt/test.sh /opt/new/test.sh /new/deep/test.sh /again/test.sh /file", mounts=mounts)
    assert shown.stdout == 5 * "secret\n", shown
    left = await box.run("ls -A /mnt && ls -d /mnt /opt/new /new /file /again")
    assert left.stdout == "/mnt\n", left
    assert await box.merged_digest() == before


async def test_a_mount_on_or_below_a_writable_directory_is_seen_and_read_only(
    namespace_backend: NamespaceBackend, tmp_path: Path
) -> None:
    source = verifier_files(tmp_path)
    box = await namespace_backend.open()
    await box.run("mkdir -p kept/in; echo mine > kept/in/file")
    before = await box.merged_digest()
    mounts = {"/workspace/x": source, "/tmp/new/deep": source, "/workspace/kept/in": source}
    shown = await box.run("cat x/test.sh /tmp/new/deep/test.sh kept/in/test.sh; ls kept/in", mounts=mounts)
    assert shown.stdout == 3 * "secret\n" + "test.sh\n", shown
    written = await box.run("touch new kept/new && rm new kept/new; touch x/y", mounts=mounts)
    assert written.stderr == "touch: cannot touch 'x/y': Read-only file system\n", written
    left = await box.run("cat kept/in/file; ls; ls -d /tmp/new; cat /workspace/test.sh")
    assert left.stdout == "mine\nkept\n", left
    assert await box.merged_digest() == before
    assert (await box.run("cat /workspace/test.sh", mounts={"/workspace": source})).stdout == "secret\n"
    assert await box.merged_digest() == before


async def test_packages_of_verifiers_are_seen_by_a_command_that_mounts_them_alone(
    namespace_backend: NamespaceBackend,
) -> None:
    place = f"/{VERIFIER_DIRECTORY}"
    packages = find_base().root / VERIFIER_DIRECTORY
    assert (packages / "pytest").is_dir(), "the base tree has no packages of verifiers"
    box = await namespace_backend.open()
    for _ in range(2):
        hidden = await box.run(f"ls -A {place}; touch {place}/x; umount {place}; python3 -c 'import requests'")
        assert hidden.stdout == "", hidden.stdout
        assert "No module named 'requests'" in hidden.stderr
        with pytest.raises(PathRefused, match="No such file"):
            await box.read_file(f"{place}/pytest/__init__.py")
        graded = await box.run(f"PYTHONPATH={place} python3 -c 'import requests, pytest'", mounts={place: packages})
        assert graded.exit_code == 0, graded.stderr
    assert (await box.run(f"touch {place}/x")).exit_code == 1
    await box.destroy()


async def test_an_idle_sandbox_owns_no_process_and_no_mount(namespace_backend: NamespaceBackend) -> None:
    boxes = [await namespace_backend.open() for _ in range(50)]
    for box in boxes:
        await box.run("echo 1 > f")
    until(lambda: len(namespace_backend.runners.pids) <= 5, "only the launcher and the spare runners are left")
    assert str(namespace_backend.data_dir) not in Path("/proc/self/mountinfo").read_text()
    for directory in namespace_backend.live_dir.iterdir():
        assert disk_bytes(directory) <= 30 * 1024


async def test_a_sandbox_costs_no_disk_before_its_first_command(namespace_backend: NamespaceBackend) -> None:
    before = disk_bytes(namespace_backend.data_dir)
    for _ in range(100):
        await namespace_backend.open()
    assert disk_bytes(namespace_backend.data_dir) == before


async def test_a_thousand_forks_of_one_state_cost_no_disk(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    await box.run("head -c 1000000 /dev/urandom > big; mkdir d; touch d/{1..100}")
    snapshot, digest = await box.snapshot(), await box.merged_digest()
    before = disk_bytes(namespace_backend.data_dir)
    forks = [await namespace_backend.restore(snapshot) for _ in range(1000)]
    assert disk_bytes(namespace_backend.data_dir) == before
    for fork in forks[::250]:
        assert await fork.merged_digest() == digest
        await fork.run("echo 1 > d/1")
        assert await fork.merged_digest() != digest
    # Those four: a directory, its two parts and the overlay's work directory; the file and the directories above it.
    assert disk_bytes(namespace_backend.data_dir) - before <= 4 * 48 * 1024
    assert await box.merged_digest() == digest


async def test_nothing_of_a_destroyed_sandbox_remains_but_named_layers(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    await box.run("echo 1 > f")
    snapshot = await box.snapshot()
    await box.run("echo 2 > f; mkdir -m 000 locked")
    running = asyncio.create_task(box.run(f"sleep {lasting(98765)}"))
    await asyncio.to_thread(until, lambda: bool(processes_with(lasting(98765))), "the command runs")
    await box.destroy()
    with pytest.raises(SandboxFailed):
        await running
    assert processes_with(lasting(98765)) == []
    assert list(namespace_backend.live_dir.iterdir()) == []
    assert (await namespace_backend.collect([snapshot.ref])).layers == 0
    assert (await (await namespace_backend.restore(snapshot)).run("cat f")).stdout == "1\n"


async def test_after_close_no_process_cgroup_or_directory_is_left(data_dir: Path) -> None:
    backend = NamespaceBackend(data_dir)
    await backend.start()
    box = await backend.open()
    await box.run("echo 1 > f")
    pids, cgroups = backend.runners.pids, backend.cgroups
    assert cgroups is not None
    await backend.close()
    await backend.close()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all processes end")
    assert not any(Path(root).exists() for root in cgroups.roots)
    assert list((data_dir / "live").iterdir()) == []


async def test_a_cancelled_command_is_killed_and_the_sandbox_goes_on(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    running = asyncio.create_task(box.run(f"echo 1 > f; sleep {lasting(87654)}"))
    await asyncio.to_thread(until, lambda: len(processes_with(lasting(87654))) >= 2, "bash and its sleep run")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await box.run("cat f")).stdout == "1\n"
    assert processes_with(lasting(87654)) == []


OWNER = """
import asyncio, sys
from pathlib import Path
from errata_server.sandbox.namespace.backend import NamespaceBackend

async def main():
    backend = NamespaceBackend(Path(sys.argv[1]))
    await backend.start()
    box = await backend.open()
    await box.run("echo 1 > f; export A=1")
    snapshot = await box.snapshot()
    print(*backend.cgroups.roots, flush=True)
    print(snapshot.ref.id, snapshot.shell.hex(), *backend.runners.pids, flush=True)
    await box.run("echo 2 > f")
    await box.snapshot()
    await box.run(f"setsid sleep {sys.argv[2]} & sleep {sys.argv[2]}", timeout_s=600)

asyncio.run(main())
"""


async def test_kill_9_of_the_owner_leaves_no_process_and_its_snapshots_go_on(data_dir: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(data_dir), lasting(76543)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    cgroups = owner.stdout.readline().split()
    layer, shell, *pids = owner.stdout.readline().split()
    until(lambda: len(processes_with(lasting(76543))) >= 2, "the command runs")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    until(lambda: processes_with(lasting(76543)) == [], "the commands die with their server")
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the launcher dies with its server")
    # The directories go with the launcher, or at the next start where the kernel still calls them busy.
    assert [p for cgroup in cgroups for p in Path(cgroup).rglob("cgroup.procs") if p.read_text().strip()] == []
    backend = NamespaceBackend(data_dir)
    await backend.start()
    report = await backend.collect([SnapshotRef("layer", layer)])
    assert (report.layers, report.sandboxes) == (1, 1), "the uncommitted layer and the dead sandbox are gone"
    box = await backend.restore(SandboxSnapshot(SnapshotRef("layer", layer), bytes.fromhex(shell)))
    assert (await box.run("cat f; echo $A")).stdout == "1\n1\n"
    await backend.close()


async def test_a_stopped_launcher_of_a_dead_owner_is_killed_at_start(data_dir: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(data_dir), lasting(76543)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert [owner.stdout.readline() for _ in range(2)][1], "its sandbox is open"
    until(lambda: len(processes_with(lasting(76543))) >= 2, "the command runs")
    launcher = int((data_dir / "launcher").read_text().split()[0])
    os.kill(launcher, signal.SIGSTOP)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    backend = NamespaceBackend(data_dir)
    await backend.start()
    until(lambda: processes_with(lasting(76543)) == [], "what the dead owner ran is killed")
    await backend.close()


# Layers.


async def test_long_chains_are_flattened_and_every_state_stays(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    await box.run("mkdir -p keep/sub; echo base > keep/sub/f; echo x > moved")
    taken = []
    for step in range(2 * MAX_CHAIN + 10):
        if step == 20:
            await box.run("rm -r keep; mkdir keep; echo new > keep/g; rm moved; mkdir moved")
        if step == 30:
            await box.run("rm -r moved; echo file > moved; chmod 700 keep; ln -s g keep/link")
        await box.run(BUMP)
        taken.append((await box.snapshot(), await box.merged_digest()))
    for index in (0, 19, 20, 31, MAX_CHAIN - 1, MAX_CHAIN, MAX_CHAIN + 1, len(taken) - 1):
        snapshot, digest = taken[index]
        assert len(namespace_backend.store.lowers(snapshot.ref.id)) <= MAX_CHAIN + 1
        fork = await namespace_backend.restore(snapshot)
        assert await fork.merged_digest() == digest
        result = await fork.run("cat n; find keep moved | sort | tr '\\n' ' '; cat keep/link 2>/dev/null; true")
        kept = "keep keep/sub keep/sub/f moved" if index < 20 else "keep keep/g moved"
        kept = "keep keep/g keep/link moved" if index >= 30 else kept
        assert result.stdout == f"{index + 1}\n{kept} " + ("new\n" if index >= 30 else "")


async def test_a_restarted_backend_finds_the_same_digests(data_dir: Path) -> None:
    first = NamespaceBackend(data_dir)
    await first.start()
    box = await first.open()
    for _ in range(MAX_CHAIN + 5):
        await box.run(f"{BUMP}; rm -rf d; mkdir d; touch d/$(cat n)")
        snapshot = await box.snapshot()
    digest = await box.merged_digest()
    await first.close()
    second = NamespaceBackend(data_dir)
    await second.start()
    fork = await second.restore(snapshot)
    assert await fork.merged_digest() == digest
    assert (await fork.run("ls d; export B=2; echo more > m")).stdout == f"{MAX_CHAIN + 5}\n"
    again = await second.restore(snapshot)
    await again.run("echo more > m")
    assert await again.merged_digest() == await fork.merged_digest()
    await second.close()


async def test_a_change_back_to_what_the_base_has_folds_away(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    clean = await box.merged_digest()
    await box.run("touch /workspace; chmod 700 /workspace; echo 1 > f; mkdir d")
    changed = await box.snapshot()
    await box.run("chmod 755 /workspace; rm f; rmdir d")
    assert await box.merged_digest() == clean
    touched = await namespace_backend.restore(changed)
    await touched.run("touch f; cat f > g; mv g f")
    assert (await touched.snapshot()).ref.digest == changed.ref.digest


async def test_file_modes_and_removals_count_in_the_digest(namespace_backend: NamespaceBackend) -> None:
    seen = set()
    for command in ("true", "touch f", "touch f; chmod 600 f", "ln -s a f", "ln -s b f", "mkdir f", "mkfifo f"):
        box = await namespace_backend.open()
        await box.run(command)
        seen.add(await box.merged_digest())
    assert len(seen) == 7


# Failures of the machine are errors, never results.


async def test_a_killed_launcher_is_an_error_once_and_then_replaced(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    await box.run("echo 1 > f")
    running = asyncio.create_task(box.run(f"sleep {lasting(65432)}"))
    await asyncio.to_thread(until, lambda: bool(processes_with(lasting(65432))), "the command runs")
    os.kill(int((namespace_backend.data_dir / "launcher").read_text().split()[0]), signal.SIGKILL)
    with pytest.raises(SandboxFailed):
        await running
    assert (await box.run("cat f")).stdout == "1\n"
    assert processes_with(lasting(65432)) == []


async def test_no_command_is_sent_to_a_runner_whose_launcher_has_died(
    namespace_backend: NamespaceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runners outlive their launcher by a moment, in which they still take a request that they never end."""
    monkeypatch.setattr(Runner, "alive", property(lambda runner: True))
    box = await namespace_backend.open()
    await box.run("echo 1 > f")
    for _ in range(5):
        launcher = int((namespace_backend.data_dir / "launcher").read_text().split()[0])
        os.kill(launcher, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the pool has seen its end already
            await asyncio.to_thread(os.waitid, os.P_PID, launcher, os.WEXITED | os.WNOWAIT)
        assert (await box.run("cat f")).stdout == "1\n"


async def test_a_missing_layer_is_an_error_not_an_empty_sandbox(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    await box.run("echo 1 > f")
    snapshot = await box.snapshot()
    (namespace_backend.data_dir / "layers" / snapshot.ref.id / "d").rename(namespace_backend.data_dir / "away")
    with pytest.raises(SandboxFailed):
        await (await namespace_backend.restore(snapshot)).run("true")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = tmp_path / "disk"
    place.mkdir()
    assert libc.mount(b"small", os.fsencode(place), b"tmpfs", 0, b"size=24m") == 0
    yield place
    libc.umount2(os.fsencode(place), 2)


async def test_a_full_disk_is_an_error_and_the_sandbox_goes_on_when_there_is_room(small_disk: Path) -> None:
    backend = NamespaceBackend(small_disk / "data")
    await backend.start()
    box = await backend.open()
    await box.run("echo 1 > f")
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (23 * 1024**2 + 512 * 1024))
    with pytest.raises(SandboxFailed, match="free space"):
        await box.run("echo 2 > f")
    ballast.unlink()
    with pytest.raises(SandboxFailed, match="free space"):
        await box.run("head -c 60M /dev/zero > big")
    (backend.live_dir / box.id / "u/workspace/big").unlink()
    assert (await box.run("cat f")).stdout == "1\n"
    await backend.close()


async def test_a_second_owner_of_a_data_directory_is_refused(namespace_backend: NamespaceBackend) -> None:
    with pytest.raises(SandboxUnavailable, match="another server uses"):
        await NamespaceBackend(namespace_backend.data_dir).start()


async def test_a_missing_base_tree_is_named_in_one_line(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "no-system").mkdir()
    with pytest.raises(SandboxUnavailable) as refused:
        await NamespaceBackend(data_dir, bases={"default": tmp_path / "no-system"}).start()
    assert "/bin/bash" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("drop", "says"), [("uid", "`errata base import "), ("capability", "root lacks CAP_SYS_ADMIN")]
)
def test_without_privileges_it_refuses_in_one_line(data_dir: Path, drop: str, says: str) -> None:
    program = (
        "import asyncio, concurrent.futures.thread, ctypes, os, sys\n"
        "from pathlib import Path\n"
        "from errata_server.sandbox.namespace.backend import NamespaceBackend\n"
        "if sys.argv[2] == 'uid': os.setresuid(64000, 64000, 64000)\n"
        "else: ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())\n"
        "asyncio.run(NamespaceBackend(Path(sys.argv[1])).start())\n"
    )
    result = subprocess.run([sys.executable, "-c", program, str(data_dir), drop], capture_output=True, text=True)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert "SandboxUnavailable" in last
    assert says in last


async def test_an_overlay_as_data_directory_is_refused_with_the_way_out(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    assert libc.mount(b"overlay", os.fsencode(tmp_path / "merged"), b"overlay", 0, options.encode()) == 0
    try:
        with pytest.raises(SandboxUnavailable, match=r"overlayfs does not work in .*put the data directory on"):
            await NamespaceBackend(tmp_path / "merged/data").start()
    finally:
        libc.umount2(os.fsencode(tmp_path / "merged"), 2)


def test_nothing_is_bound_to_one_event_loop(data_dir: Path) -> None:
    backend = NamespaceBackend(data_dir)
    box = asyncio.run(backend.open(limits=Limits()))
    for count in range(3):
        assert asyncio.run(box.run(f"{BUMP}; cat n")).stdout == f"{count + 1}\n"
    snapshot = asyncio.run(box.snapshot())
    assert asyncio.run(asyncio.run(backend.restore(snapshot)).run("cat n")).stdout == "3\n"
    asyncio.run(backend.close())


@pytest.mark.skipif(os.geteuid() != 0, reason="rootless mode mounts its own /proc/sys nowhere")
def test_a_read_only_proc_sys_as_in_a_container_does_not_matter(data_dir: Path) -> None:
    """Engines mount /proc/sys read-only; a setting of each sandbox's network namespace is written there."""
    program = (
        "import asyncio, pathlib, sys\n"
        "from errata_server.sandbox.namespace.backend import NamespaceBackend\n"
        "async def main():\n"
        "    backend = NamespaceBackend(pathlib.Path(sys.argv[1]))\n"
        "    await backend.start()\n"
        "    box = await backend.open()\n"
        "    print((await box.run('echo ran')).stdout)\n"
        "    await backend.close()\n"
        "asyncio.run(main())\n"
    )
    container = (
        "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && "
        '! echo 0 2>/dev/null > /proc/sys/net/ipv4/tcp_max_tw_buckets && exec "$@"'
    )
    done = subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-c", container, "sh", sys.executable, "-c", program, str(data_dir)],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert "ran" in done.stdout, done.stderr[-2000:]
