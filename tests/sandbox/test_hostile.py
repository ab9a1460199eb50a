"""Commands that try to get out, to stay, or to take the machine down; each has one asserted outcome."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
from pathlib import Path

import pytest

from errata_server.sandbox.base import CommandResult, Limits, PathRefused
from errata_server.sandbox.namespace.backend import NamespaceBackend
from errata_server.sandbox.namespace.sandbox import NamespaceSandbox

pytestmark = pytest.mark.sandbox

MIB = 1024**2
SMALL = Limits(memory_bytes=256 * MIB, pids=64, file_size_bytes=16 * MIB, disk_bytes=48 * MIB, inodes=5_000)
COMPILE = "cat > p.c && gcc -o p p.c && ./p"


@pytest.fixture
async def box(namespace_backend: NamespaceBackend) -> NamespaceSandbox:
    made = await namespace_backend.open(limits=SMALL)
    assert isinstance(made, NamespaceSandbox)
    return made


async def still_works(box: NamespaceSandbox) -> None:
    """The next command answers, and no process of the last one is left."""
    result = await box.run("echo ok; ls -d /proc/[0-9]* | wc -l")
    assert result.exit_code == 0, result
    assert result.stdout.startswith("ok\n")
    # init, bash, ls, wc
    assert int(result.stdout.split()[1]) <= 4, result.stdout


async def needs(backend: NamespaceBackend, limit: str) -> None:
    info = await backend.start()
    if limit not in info.enforces:
        pytest.skip(f"{limit} is not held here: {'; '.join(info.notes)}")


async def test_01_a_fork_bomb_meets_the_pids_limit(namespace_backend: NamespaceBackend, box: NamespaceSandbox) -> None:
    await needs(namespace_backend, "pids")
    # The first shell forks once, before the bomb goes off, and then needs no process: a shell that meets the limit
    # retries its fork after 1, 2, 4 and 8 s before it gives up.
    bomb = ":(){ :|:& }; : & for ((i = 0; i < 200000; i++)); do ((1)); done"
    result = await box.run(bomb, timeout_s=90.0)
    assert (result.limit_hit, result.timed_out) == ("pids", False), result
    await still_works(box)


async def test_02_a_large_file_is_cut(box: NamespaceSandbox) -> None:
    result = await box.run("head -c 100M /dev/zero > big")
    assert (result.exit_code, result.limit_hit) == (153, "file_size")
    assert (await box.run("stat -c %s big; rm big")).stdout == f"{SMALL.file_size_bytes}\n"
    python = await box.run("python3 -c \"open('big', 'wb').write(b'x' * 20_000_000)\"")
    assert (python.exit_code, python.limit_hit) == (1, "file_size")


async def test_03_many_large_files_meet_the_quota(box: NamespaceSandbox) -> None:
    command = "for i in $(seq 100); do dd if=/dev/zero of=/tmp/x$i bs=1M count=8 status=none; sleep 0.05; done"
    result = await box.run(command)
    assert (result.limit_hit, result.exit_code) == ("disk", 137)
    assert (await box.run("rm /tmp/x*")).limit_hit is None
    shared = await box.run("dd if=/dev/zero of=/dev/shm/x bs=1M count=100")
    assert "No space left on device" in shared.stderr or shared.limit_hit in ("memory", "file_size"), shared


async def test_04_symlinks_stay_inside(box: NamespaceSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    result = await box.run(f"ln -s {secret} s; cat s; ln -s ../../../../.. e; ls e; ln -s /etc/shadow h; cat h")
    assert "host secret" not in result.stdout
    assert "workspace" in result.stdout
    assert "cat: h: Permission denied" in result.stderr
    for path in ("s", f"e{secret}", str(secret), f"e/../..{secret}"):
        with pytest.raises(PathRefused) as refused:
            await box.read_file(path)
        assert refused.value.reason == "ENOENT"
    with pytest.raises(PathRefused) as refused:
        await box.read_file("h")
    assert refused.value.reason == "EACCES"
    with pytest.raises(PathRefused):
        await box.write_file("s", b"mine")
    await box.run(f"mkdir -p {tmp_path}")
    await box.write_file("s", b"mine")
    assert secret.read_text() == "host secret"


@pytest.mark.parametrize("path", ["/proc/self/exe", "/proc/self/maps", "/proc/1/environ", "/dev/zero", "/dev/null"])
async def test_04_no_file_call_reads_proc_or_devices(box: NamespaceSandbox, path: str) -> None:
    with pytest.raises(PathRefused):
        await box.read_file(path)
    await box.run(f"ln -s {path} link")
    with pytest.raises(PathRefused):
        await box.read_file("link")


async def test_04_a_fifo_or_socket_is_refused_at_once(box: NamespaceSandbox) -> None:
    await box.run("mkfifo pipe; python3 -c \"import socket; socket.socket(1).bind('sock')\"")
    for path in ("pipe", "sock"):
        for call in (box.read_file(path), box.write_file(path, b"x")):
            with pytest.raises(PathRefused):
                await asyncio.wait_for(call, 60.0)


async def test_05_a_setuid_copy_gains_nothing(box: NamespaceSandbox) -> None:
    result = await box.run(
        "cp /bin/bash b; chmod 4755 b; ./b -p -c 'id -u; grep -E \"^(Cap|NoNew)\" /proc/self/status'"
    )
    assert result.stdout.splitlines()[0] == "64000"
    for line in result.stdout.splitlines()[1:]:
        assert int(line.split()[1], 16) == (1 if line.startswith("NoNewPrivs") else 0), line


async def test_06_init_shows_nothing_of_the_host(box: NamespaceSandbox) -> None:
    result = await box.run("ls /proc/1/root; cat /proc/1/environ; tr '\\0' ' ' < /proc/1/cmdline; ls /proc/1/fd")
    assert result.stdout.strip("\0 ") == "init"
    assert "Permission denied" in result.stderr


async def test_07_endless_output_ends_at_the_time_limit(box: NamespaceSandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    result = await box.run("yes", timeout_s=3.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert (result.timed_out, result.truncated) == (True, True)
    assert len(result.stdout) < 2 * SMALL.keep_bytes
    assert result.stdout_bytes < 200 * MIB
    assert after.ru_maxrss - before.ru_maxrss < 32 * 1024  # KiB
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


async def test_07_output_beyond_its_budget_ends_the_command(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open(limits=Limits(output_bytes=4 * MIB))
    result = await box.run("yes >&2")
    assert (result.exit_code, result.limit_hit, result.timed_out) == (137, "output", False)


async def test_08_a_line_of_five_megabytes_is_cut(box: NamespaceSandbox) -> None:
    result = await box.run("head -c 5000000 /dev/zero | tr '\\0' x")
    assert result.truncated
    assert result.stdout_bytes == 5_000_000
    assert len(result.stdout) < SMALL.keep_bytes + 100


async def test_09_random_bytes_become_valid_json_that_loses_nothing(box: NamespaceSandbox) -> None:
    await box.run("head -c 2000 /dev/urandom > r")
    result = await box.run("cat r")
    assert json.loads(json.dumps(result.stdout)) == result.stdout
    assert "�" not in result.stdout
    expected = (await box.read_file("r")).decode("utf-8", "backslashreplace").replace("\0", "\\x00")
    assert result.stdout == expected


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("exec 0<&-; cat", ()),
        ("setsid sleep 999 &", ("sleep",)),
        ("nohup sleep 999 > /dev/null 2>&1 &", ("sleep",)),
        ("sleep 1000 &", ("sleep",)),
        ("(setsid sh -c 'trap \"\" TERM HUP; sleep 999; sleep 999' &)", ("sh", "sleep")),
    ],
)
async def test_10_to_12_what_stays_behind_is_killed_and_named(
    box: NamespaceSandbox, command: str, left: tuple[str, ...]
) -> None:
    there = "until grep -qsx sleep /proc/[0-9]*/comm; do :; done" if left else "true"
    result = await box.run(f"{command}\n{there}")
    assert not result.timed_out
    assert tuple(sorted(result.killed_background)) == left
    await still_works(box)


async def test_13_killing_everything_reaches_only_itself(box: NamespaceSandbox) -> None:
    result = await box.run("kill -9 -1; echo alive")
    # The shell's own kill spares itself; another program's does not.
    assert result.exit_code in (0, 137)
    result = await box.run("python3 -c 'import os; os.kill(-1, 9)'")
    assert result.exit_code in (0, 137)
    await still_works(box)


async def test_14_no_process_outside_its_own_tree_can_be_traced(box: NamespaceSandbox) -> None:
    source = b"""
        #include <sys/ptrace.h>
        #include <errno.h>
        #include <stdio.h>
        int main(void) { long r = ptrace(PTRACE_ATTACH, 1, 0, 0); printf("%ld %d\\n", r, r ? errno : 0); return 0; }"""
    assert (await box.run(COMPILE, stdin=source)).stdout == "-1 1\n"


async def test_15_no_device_can_be_made(box: NamespaceSandbox) -> None:
    result = await box.run("mknod c c 1 3; mknod b b 8 0; mknod w c 0 0; ls")
    assert result.stdout == ""
    assert result.stderr.count("Operation not permitted") == 3


async def test_16_nothing_can_be_mounted(box: NamespaceSandbox) -> None:
    source = b"""
        #include <sys/mount.h>
        #include <errno.h>
        #include <stdio.h>
        int main(void) {
            int a = mount("t", "/tmp", "tmpfs", 0, 0) ? errno : 0, b = mount("/etc", "/tmp", 0, MS_BIND, 0) ? errno : 0;
            printf("%d %d %d\\n", a, b, umount2("/proc", 0) ? errno : 0);
            return 0;
        }"""
    assert (await box.run(COMPILE, stdin=source)).stdout == "1 1 1\n"


async def test_17_only_listed_variables_are_there(box: NamespaceSandbox) -> None:
    result = await box.run("env; tr '\\0' '\\n' < /proc/self/environ; cat /proc/*/environ | tr '\\0' '\\n'")
    names = {line.split("=")[0] for line in result.stdout.splitlines() if line}
    allowed = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TERM", "PYTHONHASHSEED", "PWD", "SHLVL", "_"}
    assert names <= allowed | {"OLDPWD", "BASH_ENV"}, names


async def test_18_there_is_no_network_but_its_own_loopback(box: NamespaceSandbox) -> None:
    connect = "import socket, sys; s = socket.socket(); s.settimeout(3); s.connect((sys.argv[1], 80))"
    await box.write_file("c.py", connect.encode())
    result = await box.run(
        "python3 c.py 127.0.0.1; python3 c.py 1.1.1.1; python3 c.py example.com; ls /sys/class/net; cat /proc/net/dev"
    )
    assert "ConnectionRefusedError" in result.stderr
    assert "Network is unreachable" in result.stderr
    assert "socket.gaierror" in result.stderr
    devices = [line.split(":")[0].strip() for line in result.stdout.splitlines() if ":" in line]
    assert devices == ["lo"]
    other = await box.run("python3 -c 'import socket; socket.socket(40, 1)'")
    assert "Address family not supported" in other.stderr, "AF_VSOCK reaches the hypervisor from any namespace"


async def test_19_a_process_that_ignores_signals_ends_at_the_time_limit(box: NamespaceSandbox) -> None:
    result = await box.run("trap '' TERM INT HUP; while :; do sleep 1; done", timeout_s=1.0)
    assert (result.exit_code, result.timed_out, result.killed_background) == (None, True, ())
    assert result.duration_s >= 1.0
    await still_works(box)


async def test_20_escape_sequences_stay_text_and_nul_reaches_no_argument(box: NamespaceSandbox) -> None:
    result = await box.run(r"printf '\e[31mred\e]0;title\a\0end'")
    assert result.stdout == "\x1b[31mred\x1b]0;title\x07\\x00end"
    refused = await box.run("echo a\0b")
    assert (refused.exit_code, refused.stderr) == (126, "/bin/bash: a command cannot contain a NUL byte\n")
    too_long = await box.run("echo " + "x" * 140_000)
    assert (too_long.exit_code, too_long.stderr) == (126, "/bin/bash: Argument list too long\n")


async def test_21_a_flood_of_empty_files_meets_the_inode_limit(box: NamespaceSandbox) -> None:
    result = await box.run("python3 -c \"for i in range(200000): open(f'f{i}', 'w').close()\"", timeout_s=60.0)
    assert (result.limit_hit, result.exit_code) == ("inodes", 137)
    snapshot = await box.snapshot()
    assert snapshot.ref.kind == "layer"
    assert (await box.merged_digest()).startswith("sha256:")
    restored = await box.run("sleep 0.5; ls | wc -l; rm -rf /workspace/*; sleep 0.5")
    assert (restored.exit_code, restored.limit_hit) == (0, None), "who is over the limit may clean up"


async def test_21_a_session_over_its_limit_may_clean_up_but_not_go_on(box: NamespaceSandbox) -> None:
    flood = "python3 -c \"for i in range(200000): open(f'f{i}', 'w').close()\""
    assert (await box.run(flood, timeout_s=60.0)).limit_hit == "inodes"
    assert (await box.run("ls | wc -l; rm -rf f1*; sleep 0.7")).limit_hit is None
    assert (await box.run("rm -rf /workspace/*; sleep 0.7")).limit_hit is None
    assert (await box.run(flood, timeout_s=60.0)).limit_hit == "inodes"
    assert (await box.run(flood.replace("f{i}", "g{i}"), timeout_s=60.0)).limit_hit == "inodes"


async def test_22_three_thousand_nested_directories_can_be_frozen_and_deleted(
    namespace_backend: NamespaceBackend, box: NamespaceSandbox
) -> None:
    name = "d" * 20
    result = await box.run(f"python3 -c \"import os\nfor i in range(3000): os.mkdir('{name}'); os.chdir('{name}')\"")
    assert result.exit_code == 0, result
    first, snapshot = await box.merged_digest(), await box.snapshot()
    fork = await namespace_backend.restore(snapshot)
    assert await fork.merged_digest() == first
    assert (await fork.run(f"rm -rf {name}")).exit_code == 0
    await fork.snapshot()
    await fork.destroy()
    await box.destroy()
    assert (await namespace_backend.collect([])).layers == 2


async def test_23_names_of_any_bytes_are_kept_and_digested(
    namespace_backend: NamespaceBackend, box: NamespaceSandbox
) -> None:
    await box.run(r"touch $'new\nline' $'bad\xff' -- -rf; mkdir $'\xfe'; echo x > $'\xfe/\xfd'")
    digest, snapshot = await box.merged_digest(), await box.snapshot()
    fork = await namespace_backend.restore(snapshot)
    assert await fork.merged_digest() == digest
    assert (await fork.run(r"cat $'\xfe/\xfd'; cd $'\xfe'; ls")).stdout == "x\n\\xfd\n"
    assert await fork.read_file("\udcfd") == b"x\n"
    assert (await fork.run(r"mv $'/workspace/bad\xff' /workspace/bad")).exit_code == 0
    assert await fork.merged_digest() != digest


async def test_24_the_clock_cannot_be_set(box: NamespaceSandbox) -> None:
    result = await box.run("date -s '2001-01-01'")
    assert result.exit_code == 1
    assert "Operation not permitted" in result.stderr
    assert int((await box.run("date +%Y")).stdout) > 2020


async def test_25_no_namespace_can_be_made(box: NamespaceSandbox) -> None:
    result = await box.run("unshare -Ur true; unshare -m true; nsenter -t 1 -m true")
    assert result.exit_code != 0
    assert result.stderr.count("Operation not permitted") == 2
    source = b"""
        #define _GNU_SOURCE
        #include <errno.h>
        #include <stdio.h>
        #include <sched.h>
        #include <unistd.h>
        #include <sys/syscall.h>
        int main(void) {
            long a = syscall(SYS_clone, CLONE_NEWUSER | 17, 0, 0, 0, 0); int e = errno;
            long b = syscall(435, 0, 0); int f = errno;
            long c = syscall(425, 1, 0); int g = errno;
            printf("%ld %d %ld %d %ld %d\\n", a, e, b, f, c, g);
            return 0;
        }"""
    # EPERM for the namespace; clone3 and io_uring do not exist, so that libraries fall back.
    assert (await box.run(COMPILE, stdin=source)).stdout == "-1 1 -1 38 -1 38\n"


async def test_26_a_poisoned_environment_hurts_only_its_owner(
    namespace_backend: NamespaceBackend, box: NamespaceSandbox, tmp_path: Path
) -> None:
    mark = tmp_path / "owned"
    await box.run(f"export LD_PRELOAD=./evil.so BASH_ENV=/workspace/x; cd() {{ touch {mark}; }}; echo 'touch y' > x")
    result = await box.run("true; echo done")
    assert "done" in result.stdout
    forged = await box.run("printf '/tmp\\0\\0touch /tmp/forged\\0end\\n' >&254; kill -9 $$")
    assert forged.exit_code == 137
    await box.snapshot()
    other = await namespace_backend.open()
    assert (await other.run("env | grep -c -e LD_PRELOAD -e evil; ls /workspace /tmp")).stdout.startswith("0\n")
    assert not mark.exists()


async def test_27_a_wrecked_tree_is_the_agents_own_error(box: NamespaceSandbox) -> None:
    await box.run("chmod 000 /workspace; cd /workspace; rm -rf / --no-preserve-root")
    result = await box.run("echo still here")
    assert "still here" in result.stdout
    assert "/workspace: Permission denied" in result.stderr
    assert (await box.run("chmod 755 /workspace; cd /workspace && pwd")).stdout == "/workspace\n"


async def test_27_a_deleted_directory_is_reported_by_the_next_command(box: NamespaceSandbox) -> None:
    await box.run("mkdir d; cd d; rmdir ../d")
    result = await box.run("echo here; cd /workspace")
    assert result.stdout == "here\n"
    assert "/bin/bash: cd: /workspace/d: No such file or directory" in result.stderr
    assert (await box.run("pwd")).stdout == "/workspace\n"


async def test_28_too_much_memory_is_told_from_another_kill(
    namespace_backend: NamespaceBackend, box: NamespaceSandbox
) -> None:
    await needs(namespace_backend, "memory_bytes")
    result = await box.run("python3 -c 'x = bytearray(600 * 1024 * 1024)'")
    assert (result.exit_code, result.limit_hit) == (137, "memory")
    other = await box.run("kill -9 $$")
    assert (other.exit_code, other.limit_hit) == (137, None)


async def test_cpu_time_is_bounded(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open(limits=Limits(cpu_s=1))
    result = await box.run("while :; do :; done")
    assert (result.limit_hit, result.timed_out) == ("cpu", False)


async def test_two_sessions_bind_the_same_port_and_do_not_meet(namespace_backend: NamespaceBackend) -> None:
    listen = (
        "import socket, sys, time\n"
        "s = socket.socket(); s.bind(('127.0.0.1', 5000)); s.listen()\n"
        "s.settimeout(1.5)\n"
        "print('bound', flush=True)\n"
        "try: s.accept(); print('met')\n"
        "except TimeoutError: print('alone')\n"
    )
    call = "import socket; socket.create_connection(('127.0.0.1', 5001), 1)"
    boxes = [await namespace_backend.open() for _ in range(2)]
    for box in boxes:
        await box.write_file("listen.py", listen.encode())
    commands = (f'python3 listen.py & sleep 0.5; python3 -c "{call}"; wait', "python3 listen.py")
    results = await asyncio.gather(*(box.run(command) for box, command in zip(boxes, commands, strict=True)))
    assert [result.stdout for result in results] == ["bound\nalone\n"] * 2
    assert "ConnectionRefusedError" in results[0].stderr


async def test_a_port_is_free_again_for_the_next_borrower(data_dir: Path) -> None:
    backend = NamespaceBackend(data_dir, spare=1, max_running=1)
    await backend.start()
    server = (
        "import socket\n"
        "s = socket.socket(); s.bind(('127.0.0.1', 5000)); s.listen()\n"
        "c = socket.create_connection(('127.0.0.1', 5000)); a, _ = s.accept(); a.close(); c.recv(1); c.close()\n"
    )
    box = await backend.open()
    await box.write_file("s.py", server.encode())
    for _ in range(3):
        assert (await box.run("python3 s.py")).stderr == ""
    await backend.close()


async def test_three_hundred_commands_run_at_once(namespace_backend: NamespaceBackend) -> None:
    gc.collect()  # event loops and files that earlier tests of this process let go of hold descriptors until then
    before = len(list(Path("/proc/self/fd").iterdir()))
    boxes = [await namespace_backend.open() for _ in range(300)]

    async def one(index: int, box: NamespaceSandbox) -> CommandResult:
        return await box.run(f"echo {index} > mine; sleep 3; cat mine", timeout_s=500.0)

    results = await asyncio.gather(*(one(index, box) for index, box in enumerate(boxes)))  # type: ignore[arg-type]
    assert [result.stdout for result in results] == [f"{index}\n" for index in range(300)]
    assert len(list(Path("/proc/self/fd").iterdir())) - before < 30


async def test_the_hosts_boot_arguments_are_not_shown(box: NamespaceSandbox) -> None:
    result = await box.run(
        "cat /proc/cmdline; wc -c < /proc/cmdline; (echo x > /proc/cmdline); chmod 777 /proc/cmdline"
    )
    assert result.stdout == "0\n"
    assert len(result.stderr.splitlines()) == 2, "neither is allowed"
    assert (await box.run("cat /proc/cmdline")).stdout == ""


DRIVER = """
import ctypes, subprocess, sys
if len(sys.argv) > 1:
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
print(subprocess.run([sys.executable, "tracer.py"], capture_output=True, text=True).stdout)
"""
TRACER = """
import ctypes, os
libc, parent = ctypes.CDLL(None, use_errno=True), os.getppid()
def show(name, result):
    print(name, ctypes.get_errno() if result < 0 else "done")
show("attach", libc.ptrace(0x4206, parent, 0, 0))  # PTRACE_SEIZE, which does not stop it
show("getfd", libc.syscall(438, os.pidfd_open(parent), 0, 0))
for name in ("mem", "environ", "fd/0"):
    try:
        open(f"/proc/{parent}/{name}", "rb").close()
        print(name, "done")
    except OSError as error:
        print(name, error.errno)
"""


async def test_a_driver_that_closes_itself_cannot_be_traced_by_the_program_it_runs(box: NamespaceSandbox) -> None:
    """What the README of the terminal environment advises for drivers of probes."""
    await box.write_file("driver.py", DRIVER.encode())
    await box.write_file("tracer.py", TRACER.encode())
    plain, closed = await box.run("python3 driver.py < /dev/null"), await box.run("python3 driver.py x < /dev/null")
    assert plain.exit_code == 0, plain
    assert plain.stdout.split() == ["attach", "done", "getfd", "done", "mem", "done", "environ", "done", "fd/0", "done"]
    assert closed.stdout.split() == ["attach", "1", "getfd", "1", "mem", "13", "environ", "13", "fd/0", "13"]
