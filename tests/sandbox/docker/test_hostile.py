"""The hostile battery on the docker backend: the same tests, but for those that `DIFFERENT` names with the reason."""

from __future__ import annotations

import asyncio
from types import FunctionType

import pytest

from errata_protocol.errors import SandboxFailed
from errata_server.sandbox.base import Sandbox
from errata_server.sandbox.docker.backend import DockerBackend

from .. import test_hostile as battery

pytestmark = pytest.mark.containers

DIFFERENT = {
    "test_03_many_large_files_meet_the_quota": "the engine counts twice a second: a slower writer is used",
    "test_06_init_shows_nothing_of_the_host": "process 1 is the container's own bash, not ours",
    "test_18_there_is_no_network_but_its_own_loopback": "AF_VSOCK is left to the engine's seccomp profile",
    "test_21_a_flood_of_empty_files_meets_the_inode_limit": "an engine limits no inodes",
    "test_21_a_session_over_its_limit_may_clean_up_but_not_go_on": "an engine limits no inodes",
    "test_22_three_thousand_nested_directories_can_be_frozen_and_deleted": "an engine reads no path above 4,096 bytes",
    "test_25_no_namespace_can_be_made": "io_uring is left to the engine's seccomp profile",
    "test_a_driver_that_closes_itself_cannot_be_traced_by_the_program_it_runs": "the engine refuses pidfd_getfd to all",
    "test_a_port_is_free_again_for_the_next_borrower": "network namespaces are not lent",
    "test_three_hundred_commands_run_at_once": "300 containers are not for one machine; twelve are, below",
    "test_the_hosts_boot_arguments_are_not_shown": "the engine shows /proc/cmdline",
}
ALIKE = [name for name in vars(battery) if name.startswith("test_") and name not in DIFFERENT]
for _name in ALIKE:
    globals()[_name] = getattr(battery, _name)


@pytest.fixture
def namespace_backend(docker_backend: DockerBackend) -> DockerBackend:
    """What the battery asks for by that name."""
    return docker_backend


@pytest.fixture
async def box(docker_backend: DockerBackend) -> Sandbox:
    return await docker_backend.open(limits=battery.SMALL)


@pytest.fixture(autouse=True)
def process_one_and_the_program_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def still_works(box: Sandbox) -> None:
        result = await box.run("echo ok; ls -d /proc/[0-9]* | wc -l")
        assert result.exit_code == 0, result
        assert result.stdout.startswith("ok\n")
        # process 1, the program that runs commands, bash, ls, wc
        assert int(result.stdout.split()[1]) <= 5, result.stdout

    monkeypatch.setattr(battery, "still_works", still_works)


def test_the_battery_is_run_but_for_declared_differences() -> None:
    assert all(isinstance(getattr(battery, name), FunctionType) for name in DIFFERENT)
    tests = [name for name in vars(battery) if name.startswith("test_")]
    assert sorted([*ALIKE, *DIFFERENT]) == sorted(tests)
    assert len(DIFFERENT) < len(ALIKE) / 2


async def test_03_many_large_files_meet_the_quota(box: Sandbox) -> None:
    writer = "for i in $(seq 100); do dd if=/dev/zero of=/tmp/x$i bs=1M count=8 status=none; sleep 0.2; done"
    result = await box.run(writer, timeout_s=60.0)
    assert (result.limit_hit, result.exit_code) == ("disk", 137)
    assert (await box.run("rm /tmp/x*")).limit_hit is None
    at_once = await box.run("for i in 1 2 3 4 5 6 7 8; do head -c 10M /dev/zero > /tmp/x$i; done")
    assert at_once.limit_hit == "disk", "what is written between two counts is counted after the command"
    assert (await box.run("rm /tmp/x*; echo fine")).stdout == "fine\n"
    shared = await box.run("for i in 1 2 3 4 5 6 7 8; do dd if=/dev/zero of=/dev/shm/x$i bs=1M count=10; done")
    assert "No space left on device" in shared.stderr
    assert (await box.run("ls -A /dev/shm")).stdout == ""


async def test_06_process_one_shows_nothing(box: Sandbox) -> None:
    result = await box.run("ls /proc/1/root; cat /proc/1/environ; ls /proc/1/fd; kill -9 1; kill -TERM 1; kill -STOP 1")
    assert result.stdout == ""
    assert result.stderr.count("Permission denied") == 3
    assert result.stderr.count("Operation not permitted") == 3


async def test_18_there_is_no_network_but_its_own_loopback(box: Sandbox) -> None:
    connect = "import socket, sys; s = socket.socket(); s.settimeout(3); s.connect((sys.argv[1], 80))"
    await box.write_file("c.py", connect.encode())
    result = await box.run(
        "python3 c.py 127.0.0.1; python3 c.py 1.1.1.1; python3 c.py example.com; ls /sys/class/net; cat /proc/net/dev"
    )
    assert "ConnectionRefusedError" in result.stderr
    assert "Network is unreachable" in result.stderr
    assert "socket.gaierror" in result.stderr
    assert [line.split(":")[0].strip() for line in result.stdout.splitlines() if ":" in line] == ["lo"]


async def test_21_a_flood_of_empty_files_is_digested_and_kept(docker_backend: DockerBackend, box: Sandbox) -> None:
    result = await box.run("python3 -c \"for i in range(20000): open(f'f{i}', 'w').close()\"", timeout_s=60.0)
    assert (result.exit_code, result.limit_hit) == (0, None)
    snapshot = await box.snapshot()
    fork = await docker_backend.restore(snapshot)
    assert (await fork.run("ls | wc -l; rm -rf /workspace/*")).stdout == "20000\n"
    assert (await fork.merged_digest()) != snapshot.ref.digest


async def test_22_nested_directories_can_be_frozen_up_to_the_length_of_a_path(
    docker_backend: DockerBackend, box: Sandbox
) -> None:
    make = "python3 -c \"import os\nfor i in range({}): os.mkdir('{}'); os.chdir('{}')\""
    assert (await box.run(make.format(150, "e" * 20, "e" * 20))).exit_code == 0
    first, snapshot = await box.merged_digest(), await box.snapshot()
    fork = await docker_backend.restore(snapshot)
    assert await fork.merged_digest() == first
    assert (await box.run(make.format(3000, "d" * 20, "d" * 20))).exit_code == 0
    with pytest.raises(SandboxFailed, match="name too long"):
        await box.snapshot()
    assert (await box.run(f"rm -rf {'d' * 20}")).exit_code == 0
    assert (await box.snapshot()).ref == snapshot.ref


async def test_25_no_namespace_can_be_made(box: Sandbox) -> None:
    result = await box.run("unshare -Ur true; unshare -m true; nsenter -t 1 -m true")
    assert result.exit_code != 0
    assert result.stderr.count("Operation not permitted") + result.stderr.count("Permission denied") >= 3


async def test_twelve_commands_run_at_once(docker_backend: DockerBackend) -> None:
    boxes = [await docker_backend.open(limits=battery.SMALL) for _ in range(12)]
    commands = (box.run(f"echo {index} > mine; sleep 2; cat mine", timeout_s=60.0) for index, box in enumerate(boxes))
    results = await asyncio.gather(*commands)
    assert [result.stdout for result in results] == [f"{index}\n" for index in range(12)]


async def test_a_driver_that_closes_itself_cannot_be_traced(box: Sandbox) -> None:
    await box.write_file("driver.py", battery.DRIVER.encode())
    await box.write_file("tracer.py", battery.TRACER.encode())
    closed = await box.run("python3 driver.py x < /dev/null")
    assert closed.stdout.split() == ["attach", "1", "getfd", "1", "mem", "13", "environ", "13", "fd/0", "13"]
