"""Containers of the docker backend from the pool to the reaper, and what happens when something is away."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from errata_protocol.errors import SandboxFailed, SandboxUnavailable
from errata_sandboxd.engine import Engine, Policy
from errata_sandboxd.schema import Refused
from errata_server.sandbox import registry
from errata_server.sandbox.base import BackendConfig, Limits, SandboxSnapshot
from errata_server.sandbox.docker import program
from errata_server.sandbox.docker.backend import DockerBackend
from errata_server.sandbox.docker.broker import BrokerRefused
from tests.hangs import HANGS_S
from tests.machine_speed import SLOWDOWN

from .conftest import RunningBroker, remove_all, start_broker

pytestmark = pytest.mark.containers


def containers_of(api: Any, broker: RunningBroker, owner: str = "one") -> list[str]:
    rows = api.containers(all=True, filters={"label": f"errata.sandbox={broker.owners[owner]}"})
    return [row["Id"] for row in rows]


async def until(holds: Any, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def sleeping(api: Any, box: Any) -> int:
    """Return how many programs ``sleep`` run in the container of a sandbox."""
    return sum(row[-1].split()[0] == "sleep" for row in api.top(box.container)["Processes"])


async def test_a_stopped_container_comes_back_with_its_files(docker_backend: DockerBackend, api: Any) -> None:
    box = await docker_backend.open()
    await box.run("cd /tmp; export A=1; echo text > f")
    api.kill(box.container)  # type: ignore[attr-defined]
    result = await box.run("pwd; echo $A; cat f")
    assert (result.stdout, result.limit_hit) == ("/tmp\n1\ntext\n", None)
    api.kill(box.container)  # type: ignore[attr-defined]
    assert await box.read_file("f") == b"text\n"
    assert (await box.snapshot()).ref.kind == "layer"


async def test_a_commands_input_ends_without_an_end_of_the_engines_stream(
    docker_backend: DockerBackend, api: Any
) -> None:
    """An engine under load sometimes loses the end of an exec's standard input, so the program counts its bytes."""
    box = await docker_backend.open()
    assert (await box.run("true")).exit_code == 0
    mark = program.nonce()
    text = program.run(
        b"cat; echo end",
        startup=b"",
        environment={b"PATH": b"/usr/bin:/bin"},
        cwd=b"/",
        limits=Limits(),
        mark=mark,
        stdin=b"all of it\n",
    )
    made = api.exec_create(box.container, list(program.ARGV), stdin=True, user="64000:64000")  # type: ignore[attr-defined]
    link = api.exec_start(made["Id"], socket=True)._sock
    link.settimeout(30)
    link.sendall(text)  # and it stays open
    received = bytearray()
    while more := await asyncio.to_thread(link.recv, 65536):
        received += more
    link.close()
    streams = {1: b"", 2: b""}
    while received:  # frames of the engine: the stream, three bytes of nothing, the size
        size = int.from_bytes(received[4:8])
        streams[received[0]] += bytes(received[8 : 8 + size])
        del received[: 8 + size]
    assert streams[1] == b"all of it\nend\n" and streams[2].startswith(mark)


async def test_a_paused_container_is_a_failure_of_the_machine(docker_backend: DockerBackend, api: Any) -> None:
    box = await docker_backend.open()
    await box.run("true")
    api.pause(box.container)  # type: ignore[attr-defined]
    with pytest.raises(SandboxFailed, match="paused"):
        await box.run("true")
    api.unpause(box.container)  # type: ignore[attr-defined]
    assert (await box.run("echo on")).stdout == "on\n"


async def test_a_removed_container_is_lost_with_a_code(docker_backend: DockerBackend, api: Any) -> None:
    box = await docker_backend.open()
    await box.run("true")
    api.remove_container(box.container, force=True)  # type: ignore[attr-defined]
    with pytest.raises(SandboxFailed, match="no container"):
        await box.run("true")
    await box.destroy()


async def test_a_cancelled_command_leaves_nothing_and_the_sandbox_goes_on(
    docker_backend: DockerBackend, api: Any
) -> None:
    box = await docker_backend.open()
    await box.run("echo kept > f")
    running = asyncio.ensure_future(box.run("(setsid sleep 1000 &); sleep 1000", timeout_s=600.0))
    await until(lambda: sleeping(api, box) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    result = await box.run("cat f; cat /proc/[0-9]*/comm")
    assert result.stdout.startswith("kept\n")
    assert "sleep" not in result.stdout


async def test_a_command_that_kills_its_program_is_cleaned_up(docker_backend: DockerBackend) -> None:
    box = await docker_backend.open()
    spared = "int(p) not in (1, os.getpid())"
    killer = f"import os\nfor p in os.listdir('/proc'):\n  if p.isdigit() and {spared}: os.kill(int(p), 9)"
    await box.write_file("k.py", killer.encode())
    result = await box.run("sleep 1000 & setsid python3 k.py", timeout_s=20.0)
    assert not result.shell_saved
    assert (await box.run("cat /proc/[0-9]*/comm")).stdout.count("sleep") == 0


async def test_a_forged_report_is_the_agents_own_matter(docker_backend: DockerBackend) -> None:
    box = await docker_backend.open()
    forge = (
        "mark=$(tr '\\0' '\\n' < /proc/$PPID/environ | grep nonce); "
        "printf '\\nerrata-report-%s:0\\0999\\0999\\0\\0' deadbeef >&2; exit 4"
    )
    result = await box.run(forge)
    assert (result.exit_code, result.limit_hit, result.shell_saved) == (4, None, True)


async def test_destroying_returns_at_once_and_the_reaper_removes(
    docker_backend: DockerBackend, broker: RunningBroker, api: Any
) -> None:
    boxes = [await docker_backend.open() for _ in range(4)]
    await asyncio.gather(*(box.run("true") for box in boxes))
    gone = [box.container for box in boxes]  # type: ignore[attr-defined]
    for box in boxes:
        with pytest.raises(StopIteration):  # at once: it waits for nothing
            box.destroy().send(None)
    await docker_backend.containers.wait_removed()
    assert not set(gone) & set(containers_of(api, broker))


async def test_spare_containers_are_started_ahead_and_not_used_twice(
    broker: RunningBroker, api: Any, tmp_path: Path
) -> None:
    backend = DockerBackend(tmp_path / "sandboxes", broker.sockets["one"], spare=2)
    await backend.start()
    try:
        first = await backend.open()
        await first.run("echo mine > f")
        await until(lambda: len(containers_of(api, broker)) == 4)  # the first, two spare, and the untouched one
        pool = backend.containers
        await until(lambda: sum(map(len, pool._ready.values())) == 2)
        ahead = {container for ready in pool._ready.values() for container in ready}
        second = await backend.open()
        assert (await second.run("ls")).stdout == ""
        assert second.container in ahead  # type: ignore[attr-defined]
        assert first.container != second.container  # type: ignore[attr-defined]
        await until(lambda: len(containers_of(api, broker)) == 5)
    finally:
        await backend.close()
    assert containers_of(api, broker) == []


async def test_a_restarted_server_removes_what_the_dead_one_left_and_keeps_layers(
    broker: RunningBroker, api: Any, tmp_path: Path
) -> None:
    dead = DockerBackend(tmp_path / "sandboxes", broker.sockets["one"], spare=1)
    await dead.start()
    box = await dead.open()
    await box.run("cd /tmp; echo kept > f")
    snapshot = await box.snapshot()
    running = asyncio.ensure_future(box.run("sleep 1000", timeout_s=600.0))
    await until(lambda: dead.running == 1)
    left = set(containers_of(api, broker))
    assert len(left) >= 2
    heir = DockerBackend(tmp_path / "sandboxes", broker.sockets["one"], spare=0)
    await heir.start()
    await heir.containers.wait_removed()
    assert not left & set(containers_of(api, broker))
    with pytest.raises(SandboxFailed):
        await running
    fork = await heir.restore(snapshot)
    assert (await fork.run("pwd; cat f")).stdout == "/tmp\nkept\n"
    await dead.close()
    await heir.close()
    remove_all(api, broker.owners["one"])


async def test_a_missing_or_refused_image_is_named_with_the_way_to_it(docker_backend: DockerBackend) -> None:
    with pytest.raises(SandboxUnavailable, match=r"image errata/base:nope is not in the engine.*errata image pull"):
        await docker_backend.open(base="nope")
    with pytest.raises(SandboxUnavailable, match=r"image other:1 is not on the broker's list .*--image"):
        await docker_backend.open(base="other:1")


async def test_an_absent_broker_is_named_with_its_socket(tmp_path: Path) -> None:
    backend = DockerBackend(tmp_path, tmp_path / "no.sock")
    with pytest.raises(SandboxUnavailable, match=r"no broker answers on .*no\.sock .*errata sandboxd"):
        await backend.start()
    assert "no.sock" in (backend.trouble or "")


async def test_an_absent_engine_is_named(tmp_path: Path) -> None:
    made = start_broker(f"unix://{tmp_path}/engine.sock", tmp_path, "lonely")
    try:
        backend = DockerBackend(tmp_path, made.sockets["lonely"])
        with pytest.raises(SandboxUnavailable, match="container engine cannot be reached"):
            await backend.start()
        assert backend.trouble is not None
    finally:
        made.stop()


async def test_a_broker_that_ends_in_a_command_is_a_failure_and_comes_back(
    engine: str, base_image: str, api: Any, tmp_path: Path
) -> None:
    made = start_broker(engine, tmp_path, "again")
    backend = DockerBackend(tmp_path / "sandboxes", made.sockets["again"], spare=0)
    await backend.start()
    box = await backend.open()
    await box.run("echo kept > f")
    running = asyncio.ensure_future(box.run("sleep 300", timeout_s=600.0))
    await until(lambda: sleeping(api, box) == 1)
    made.process.kill()
    made.process.wait(HANGS_S)
    with pytest.raises(BrokerRefused, match="the broker closed"):
        await running
    assert backend.trouble is not None
    with pytest.raises(SandboxUnavailable):
        await box.run("true")
    command = made.process.args
    again = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # type: ignore[call-overload]
    try:
        await until(lambda: made.sockets["again"].is_socket() and _answers(made.sockets["again"]))
        assert (await box.run("cat f")).stdout == "kept\n"
        assert backend.trouble is None
        await backend.close()
    finally:
        again.terminate()
        again.wait(60)
        remove_all(api, made.owners["again"])


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect(str(path))
        except OSError:
            return False
        return True


def test_the_registry_finds_the_backend_and_doctor_asks_the_broker(
    broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BackendConfig(tmp_path)
    monkeypatch.setenv("ERRATA_SANDBOXD_SOCKET", str(broker.sockets["one"]))
    assert isinstance(registry.create("docker", config), DockerBackend)
    (finding,) = registry.backend_type("docker").checks(config, usable=True)
    assert (finding.name, finding.verdict) == ("container engine", "ok")
    monkeypatch.setenv("ERRATA_SANDBOXD_SOCKET", str(tmp_path / "none.sock"))
    (finding,) = registry.backend_type("docker").checks(config, usable=True)
    assert (finding.verdict, finding.of_sandboxes) == ("missing", True)


async def test_a_snapshot_whose_layer_is_gone_is_refused(docker_backend: DockerBackend, api: Any) -> None:
    box = await docker_backend.open()
    await box.run("echo 1 > f")
    snapshot = await box.snapshot()
    api.remove_image(f"sha256:{snapshot.ref.id}", noprune=True)
    with pytest.raises(SandboxFailed, match="not in the engine"):
        await (await docker_backend.restore(SandboxSnapshot(snapshot.ref))).run("true")


# An engine of the test's own, which can be restarted


class OwnEngine:
    """A dockerd below a directory.

    Args:
        directory: For its data, its socket and its log.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.address = f"unix://{directory}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        import docker

        here = self._directory
        options = ["--data-root", here / "data", "--exec-root", here / "exec", "--pidfile", here / "pid"]
        options += ["-H", self.address, "--bridge", "none", "--iptables=false", "--ip6tables=false"]
        with (here / "log").open("ab") as log:
            # in a network of its own: without a bridge it deletes docker0, which is another engine's
            command = ["unshare", "--net", "--", "dockerd", *map(str, options)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until_s = time.monotonic() + 60
        while True:
            try:
                docker.APIClient(base_url=self.address, version="1.41", timeout=5).ping()
                return
            except Exception:
                assert time.monotonic() < until_s, (here / "log").read_text()[-2000:]
                time.sleep(0.1)

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(HANGS_S)


@pytest.fixture
def own_engine(api: Any, base_image: str) -> Iterator[OwnEngine]:
    if os.geteuid() != 0 or not shutil.which("dockerd"):
        pytest.skip("an engine that can be restarted needs root and dockerd: apt-get install docker.io")
    import docker

    place = Path(tempfile.mkdtemp(prefix="errata-engine-"))  # a path of pytest's is too long for containerd's sockets
    made = OwnEngine(place)
    made.start()
    other = docker.APIClient(base_url=made.address, version="1.41", timeout=300)
    other.load_image(api.get_image(base_image))
    yield made
    for row in other.containers(all=True):
        other.remove_container(row["Id"], force=True)
    made.stop()
    subprocess.run(["umount", "-l", str(place / "data")], stderr=subprocess.DEVNULL, check=False)
    shutil.rmtree(place, ignore_errors=True)


async def test_sessions_live_through_a_restart_of_the_engine_or_end_with_a_code(
    own_engine: OwnEngine, tmp_path: Path
) -> None:
    """100 opened and closed in sequence, 12 live, the engine restarted in the middle: no leak, no hang."""
    import docker

    made = start_broker(own_engine.address, tmp_path, "one")
    backend = DockerBackend(tmp_path / "sandboxes", made.sockets["one"], spare=1)
    await backend.start()
    live = [await backend.open() for _ in range(12)]
    await asyncio.gather(*(box.run(f"cd /tmp; echo {index} > mine") for index, box in enumerate(live)))
    failed = 0
    slowest = 0.0

    async def one() -> None:
        nonlocal failed, slowest
        began = time.monotonic()
        try:
            box = await backend.open()
            try:
                assert (await box.run("echo 1 > f; cat f", timeout_s=30.0)).stdout == "1\n"
            finally:
                await box.destroy()
        except (SandboxFailed, SandboxUnavailable) as error:
            failed += 1
            assert error.code in ("SANDBOX_FAILED", "SANDBOX_UNAVAILABLE")
        slowest = max(slowest, time.monotonic() - began)

    for _ in range(50):
        await one()
    assert failed == 0
    restarting = asyncio.ensure_future(asyncio.to_thread(lambda: (own_engine.stop(), own_engine.start())))
    done = 50
    while not restarting.done():
        await one()
        await asyncio.sleep(0.2)
        done += 1
    await restarting
    before = failed
    for _ in range(max(0, 100 - done)):
        await one()
    assert failed == before, "the engine is back, and so are sessions"
    assert slowest < 60.0 * SLOWDOWN
    for index, box in enumerate(live):
        assert (await box.run("pwd; cat mine")).stdout == f"/tmp\n{index}\n"
    await backend.close()
    api = docker.APIClient(base_url=own_engine.address, version="1.41", timeout=60)
    assert containers_of(api, made) == []
    made.stop()
    print(f"{failed} failed while the engine was away, slowest {slowest:.1f} s", file=sys.stderr)


def test_an_engine_that_never_answers_meets_the_deadline(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "engine.sock"))
        silent.listen()
        engine = Engine(Policy(engine=f"unix://{tmp_path}/engine.sock"), "one")
        with pytest.raises(Refused) as refused:
            engine.ping()
        assert refused.value.code == "deadline"
