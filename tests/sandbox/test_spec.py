"""What a `SandboxSpec` refuses, and what only real files show of the sandbox that starts from one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import pytest

from errata_server.sandbox.base import Limits, SandboxSnapshot
from errata_server.sandbox.namespace.backend import NamespaceBackend
from errata_server.sandbox.shell_state import ShellState
from errata_server.sandbox.spec import MAX_ENV_BYTES, Directory, Entry, File, SandboxSpec, SpecRefused, Symlink

EPOCH_S = 1767225600
MIB = 1024**2


@pytest.mark.parametrize(
    ("workdir", "why"),
    [
        ("", "give an absolute path"),
        ("app", "give an absolute path"),
        ("./app", "give an absolute path"),
        ("/app/../etc", "without '..'"),
        ("/app/", "write '/app'"),
        ("/app//x", "write '/app/x'"),
        ("//app", "write '/app'"),
        ("/app/./x", "write '/app/x'"),
        ("/a\0b", "NUL"),
        ("/" + "x" * 256, "too long"),
        ("/x" * 2048, "too long"),
        *((path, "belongs to the kernel") for path in ("/proc", "/proc/1", "/sys/fs", "/dev", "/dev/shm/x")),
        *((path, "belongs to the system") for path in ("/", "/usr", "/usr/lib/python3", "/usr/local/bin", "/usr/src")),
        *(
            (path, "belongs to the system")
            for path in ("/bin", "/lib64/x", "/etc", "/etc/x", "/var", "/home", "/run/x")
        ),
    ],
)
def test_a_work_directory_that_cannot_be_is_refused(workdir: str, why: str) -> None:
    with pytest.raises(SpecRefused, match=why):
        SandboxSpec(workdir=workdir)


@pytest.mark.parametrize("workdir", ["/app", "/testbed", "/root", "/srv/x", "/var/www/html", "/usr/src/app", "/home/x"])
def test_a_work_directory_of_its_own_is_taken(workdir: str) -> None:
    assert SandboxSpec(workdir=workdir).workdir == workdir


@pytest.mark.parametrize("env", [{"1A": ""}, {"A-B": ""}, {"": ""}, {"A": "x\0y"}, {"A": "x" * MAX_ENV_BYTES}])
def test_variables_that_cannot_be_are_refused(env: Mapping[str, str]) -> None:
    with pytest.raises(SpecRefused, match="env: "):
        SandboxSpec(env=env)


@pytest.mark.parametrize(
    "entry",
    [
        File("x", b""),
        File("/proc/sys/x", b""),
        File("/app/../x", b""),
        File("/x", b"", 0o4755),
        File("/x", b"", owner="nobody"),  # type: ignore[arg-type]
        Directory("/"),
        Directory("/x", -1),
        Symlink("/x", ""),
        Symlink("/x", "a\0b"),
    ],
)
def test_entries_that_cannot_be_are_refused(entry: Entry) -> None:
    with pytest.raises(SpecRefused, match="entry "):
        SandboxSpec(entries=(entry,))


sandbox = pytest.mark.sandbox
rooted = pytest.mark.skipif(os.geteuid() != 0, reason="rootless, every file is the agent's; see test_rootless.py")


@sandbox
@rooted
async def test_owners_modes_and_times_are_those_of_the_spec(namespace_backend: NamespaceBackend) -> None:
    entries = (
        File("/home/x/app/run", b"#!/bin/sh\necho ran\n", 0o755, "agent"),
        File("/etc/secret", b"s", 0o600),
        Directory("/opt", 0o777),
        Directory("/data/deep/er", owner="agent"),
        Symlink("/usr/local/bin/run", "/home/x/app/run"),
    )
    spec = SandboxSpec("/home/x/app", entries=entries, mtime_s=EPOCH_S)
    box = await namespace_backend.open(spec=spec)
    paths = "/home/x /home/x/app /home/x/app/run /etc/secret /opt /data/deep /data/deep/er /usr/local/bin/run /etc"
    found = (await box.run(f"stat -c '%n %U %G %a %Y' {paths}; run")).stdout.splitlines()
    assert found == [
        f"/home/x root root 755 {EPOCH_S}",
        f"/home/x/app agent agent 755 {EPOCH_S}",
        f"/home/x/app/run agent agent 755 {EPOCH_S}",
        f"/etc/secret root root 600 {EPOCH_S}",
        f"/opt root root 777 {found[4].split()[-1]}",  # its mode changed, not what is in it
        f"/data/deep root root 755 {EPOCH_S}",
        f"/data/deep/er agent agent 755 {EPOCH_S}",
        f"/usr/local/bin/run root root 777 {EPOCH_S}",
        f"/etc root root 755 {EPOCH_S}",
        "ran",
    ]
    denied = await box.run(
        "cat /etc/secret; rm /etc/secret; touch /home/x/f; rm -r /home/x/app; touch /opt/f && ls /opt"
    )
    assert denied.stderr.count("Permission denied") == 4 and denied.stdout == "f\n"


@sandbox
async def test_what_root_owns_is_closed_to_the_agent(namespace_backend: NamespaceBackend) -> None:
    entries = (File("/etc/secret", b"s", 0o600), File("/etc/conf", b"c"), File("/etc/own", b"", 0o600, "agent"))
    box = await namespace_backend.open(spec=SandboxSpec("/app", entries=entries))
    result = await box.run("cat /etc/conf; cat /etc/secret; echo x > /etc/conf; touch /etc/new; echo mine > /etc/own")
    assert result.stdout == "c" and len(result.stderr.splitlines()) == 3
    assert "cat: /etc/secret: Permission denied" in result.stderr
    assert await box.read_file("/etc/own") == b"mine\n"


@sandbox
async def test_paths_lead_through_links_of_the_sandbox_and_not_out_of_it(namespace_backend: NamespaceBackend) -> None:
    entries = (
        File("/bin/tool", b"#!/bin/sh\necho tool\n", 0o755),
        Symlink("/app/etc", "/etc"),
        File("/app/etc/inside", b"inside"),
        Symlink("/app/hosts", "/etc/hosts"),
        File("/app/hosts", b"replaced, not written through", owner="agent"),
    )
    box = await namespace_backend.open(spec=SandboxSpec("/app", entries=entries))
    result = await box.run("tool; ls -l /usr/bin/tool | cut -c4-10; cat /etc/inside; readlink etc; cat hosts")
    assert result.stdout == "tool\nxr-xr-x\ninside/etc\nreplaced, not written through"
    assert "localhost" in (await box.run("cat /etc/hosts")).stdout
    for entry in (File("/escape/x", b""), Directory("/escape/x"), Directory("/escape")):
        with pytest.raises(SpecRefused, match="Invalid cross-device link"):
            await namespace_backend.open(spec=SandboxSpec(entries=(Symlink("/escape", "/proc/sys"), entry)))
    with pytest.raises(SpecRefused, match="belongs to the system"):
        await namespace_backend.open(spec=SandboxSpec("/var/run/x"))  # /var/run is a link to /run


@sandbox
async def test_a_command_may_find_a_path_of_the_spec(namespace_backend: NamespaceBackend) -> None:
    spec = SandboxSpec(
        "/app",
        env={"PATH": "/app/bin:/usr/bin:/bin", "LD_PRELOAD": "", "WORD": "a b\nc"},
        entries=(File("/app/bin/hello", b'#!/bin/bash\necho hello "$WORD"\n', 0o755, "agent"),),
    )
    box = await namespace_backend.open(spec=spec)
    first, second = await box.run("hello; env | sort | grep -c ."), await box.run("hello; env | sort | grep -c .")
    assert first.stdout == second.stdout and first.stdout.startswith("hello a b\nc\n")
    assert first.stderr == "" and first.shell_saved


@sandbox
async def test_a_refused_or_cancelled_start_leaves_nothing(namespace_backend: NamespaceBackend) -> None:
    with pytest.raises(SpecRefused):
        await namespace_backend.open(spec=SandboxSpec(entries=(File("/x", b""), File("/etc", b""))))
    assert not namespace_backend.live and list(namespace_backend.live_dir.iterdir()) == []


@sandbox
async def test_a_start_of_many_large_files_is_frozen_apart_from_the_limits(namespace_backend: NamespaceBackend) -> None:
    entries: tuple[Entry, ...] = tuple(File(f"/app/d{n % 7}/{n}", b"%d" % n, owner="agent") for n in range(2000))
    entries += (File("/app/large", b"x" * 100 * MIB, owner="agent"),)
    limits = Limits(inodes=100, disk_bytes=MIB)
    box = await namespace_backend.open(spec=SandboxSpec("/app", entries=entries), limits=limits)
    result = await box.run("ls d3 | wc -l; cat d4/1999 large | wc -c; echo x > new")
    assert (result.stdout, result.limit_hit) == (f"286\n{4 + 100 * MIB}\n", None)
    assert (await box.run("touch {1..200}")).limit_hit == "inodes"


@sandbox
async def test_a_layer_written_before_work_directories_is_in_the_workspace(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    await box.run("echo 1 > f")
    snapshot = await box.snapshot()
    place = namespace_backend.store.root / snapshot.ref.id / "meta"
    record = json.loads(place.read_text())
    assert record.pop("workdir") == "/workspace" and record.pop("writable") == []
    place.write_text(json.dumps(record))
    namespace_backend.store._metas.clear()
    old = await namespace_backend.restore(SandboxSnapshot(snapshot.ref))
    assert (old.workdir, (await old.run("cat f; pwd")).stdout) == ("/workspace", "1\n/workspace\n")


@sandbox
async def test_a_long_chain_and_another_server_keep_the_work_directory(
    namespace_backend: NamespaceBackend,
) -> None:
    box = await namespace_backend.open(spec=SandboxSpec("/app", entries=(Directory("/data", owner="agent"),)))
    for n in range(55):  # past the layers that are folded into one
        await box.run(f"echo {n} > f; echo {n} > /data/f")
        last = await box.snapshot()
    namespace_backend.store._metas.clear()
    namespace_backend.store._trees.clear()
    fork = await namespace_backend.restore(last)
    assert (fork.workdir, (await fork.run("cat f; echo 1 > /data/g; ls /data")).stdout) == ("/app", "54\nf\ng\n")


def test_an_old_shell_state_is_read_and_a_pristine_one_is_where_the_layer_says() -> None:
    assert ShellState.unpack(b"") == ShellState()
    assert ShellState.unpack(b"", "/app").cwd == b"/app"
    assert ShellState.unpack(b"/tmp\0\0declare -x A", "/app") == ShellState(b"/tmp", b"", b"declare -x A")
    started = ShellState.starting("/app", {}, {"PATH": "/bin"})
    assert started.pristine and ShellState.unpack(started.pack(), "/app") == started
