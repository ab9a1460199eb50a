"""A node that is cut off: its worker goes on and acknowledges nothing, and its shard is taken over at another node.

The nodes are in network and process namespaces of their own, at a bridge in a third one, where other clients are.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from errata_client import ErrataClient
from errata_protocol.shards import shard_of

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="root alone can make network namespaces"),
    pytest.mark.skipif(
        any(shutil.which(one) is None for one in ("ip", "nsenter", "setpriv", "unshare")),
        reason="needs ip of iproute2, and nsenter, setpriv and unshare of util-linux",
    ),
]

TARGET = "errata_environment.fleet_demo:CountEnvironment"
TOKEN = "a-token-of-these-tests"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
HEAD, VICTIM, OUTSIDE = "10.77.0.1", "10.77.0.2", "10.77.0.3"
CLUSTER = f"{HEAD}:6379"
WAIT_S = 120.0
LOOK_S = 0.2
SESSIONS = 12
STEPS = 10
PAUSE_S = 0.1
STARTS = 3
CLONE_NEWNET = 0x40000000

DETECTION = {
    # Ray calls a node dead after 5 checks without an answer, each of at most 2 s.
    "health_check_initial_delay_ms": 10000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 5,
    # The node that is cut off does not give up by itself: it learns that it is dead when the link is back.
    "gcs_rpc_server_reconnect_timeout_s": 600,
}


def ran(*command: str, **env: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env={**os.environ, **env})
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


def until(found: Callable[[], Any], what: str) -> Any:
    for _ in range(int(WAIT_S / LOOK_S)):
        if value := found():
            return value
        time.sleep(LOOK_S)
    raise AssertionError(f"it does not come about: {what}")


class Space:
    """A network namespace with one address.

    Args:
        name: Name of it.
        address: Address of its interface.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address

    def start(self, work: Callable[[], Any]) -> Future[Any]:
        """Do something on a thread whose sockets, and those of threads that it starts, are of this namespace."""
        threads = ThreadPoolExecutor(1, initializer=self._enter)
        try:
            return threads.submit(work)
        finally:
            threads.shutdown(wait=False)

    def get(self, url: str) -> httpx.Response:
        def ask() -> httpx.Response:
            return httpx.get(url, headers=HEADERS, timeout=30.0, trust_env=False)

        found: httpx.Response = self.start(ask).result(WAIT_S)
        return found

    def _enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(f"/run/netns/{self.name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(descriptor, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
        finally:
            os.close(descriptor)


@contextmanager
def spaces() -> Iterator[dict[str, Space]]:
    """Make namespaces that reach each other, by their addresses. The bridge is in that of `OUTSIDE`.

    Filters of the machine, as Docker's, do not act there.
    """
    made = {
        address: Space(f"errata-{os.getpid()}-{address.rpartition('.')[2]}", address)
        for address in (OUTSIDE, HEAD, VICTIM)
    }
    hub = made[OUTSIDE].name
    with ExitStack() as stack:
        for one in made.values():
            ran("ip", "netns", "add", one.name)
            stack.callback(ran, "ip", "netns", "delete", one.name)  # its interfaces go with it
            ran("ip", "-n", one.name, "link", "set", "lo", "up")
        ran("ip", "-n", hub, "link", "add", "eth0", "type", "bridge")
        for one in (made[HEAD], made[VICTIM]):
            port = port_of(one)
            ran("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", one.name)
            ran("ip", "-n", hub, "link", "set", port, "master", "eth0", "up")
        for one in made.values():
            ran("ip", "-n", one.name, "address", "add", f"{one.address}/24", "dev", "eth0")
            ran("ip", "-n", one.name, "link", "set", "eth0", "up")
        yield made


def port_of(space: Space) -> str:
    return f"to-{space.address.rpartition('.')[2]}"


class Node:
    """A node of a Ray cluster in a namespace.

    Args:
        space: Network namespace of the node.
        directory: Directory of Ray's files of this node, with a short path.
        options: Options of ``ray start``.
    """

    def __init__(self, space: Space, directory: Path, *options: str) -> None:
        directory.mkdir()
        self._log = (directory / "start.log").open("w")
        # All its processes end with the first one of the process namespace, and that with this one.
        self._process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{space.name}"),
                *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *("sh", "-c", '"$@" && echo it is started && exec sleep infinity', "sh"),
                *(sys.executable, "-m", "ray.scripts.scripts", "start", *options),
                *("--node-ip-address", space.address, "--temp-dir", str(directory), "--num-cpus", "2"),
                *("--disable-usage-stats", "--object-store-memory", "80000000"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "RAY_worker_niceness": "0", "TMPDIR": str(directory)},
        )

    def is_up(self) -> bool:
        """Wait until it is a node of the cluster; return whether it became one."""
        until(lambda: self._has_started() or self._process.poll() is not None, "a node of Ray starts")
        return self._has_started()

    def errata(self, *arguments: str) -> str:
        """Run a command of ``errata`` there, and return what it prints."""
        first = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()[0]
        inside = ("nsenter", "--target", first, "--net", "--pid", "--mount", f"--wd={Path.cwd()}", "--")
        return ran(*inside, sys.executable, "-m", "errata_server.cli", *arguments, ERRATA_TOKEN=TOKEN)

    def end(self) -> None:
        """Kill all its processes."""
        self._process.kill()
        self._process.wait(WAIT_S)
        self._log.close()

    def said(self) -> str:
        """Return what ``ray start`` has printed."""
        return Path(self._log.name).read_text()

    def _has_started(self) -> bool:
        return "it is started" in self.said()


class Player:
    """Sessions that step until they are to end, on a thread in a namespace.

    Args:
        space: Namespace of the clients.
        url: Address of the member that the clients are given.
    """

    def __init__(self, space: Space, url: str) -> None:
        self._url = url
        self._end = threading.Event()
        self._open = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self.answered: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._done = space.start(lambda: asyncio.run(self._play()))

    def wait(self) -> None:
        """Wait until all sessions have stepped."""
        until(lambda: self._done.done() or (self._open.is_set() and self.least() >= STEPS), "all sessions step")
        assert not self._done.done(), self._done.exception()

    def of(self, shard: str) -> dict[str, int]:
        """Return the answered steps of each session of a shard, with all that has arrived by now."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(_rounds(), self._loop).result(WAIT_S)
        return {eid: count for eid, count in dict(self.answered).items() if shard_of(eid) == shard}

    def least(self, shard: str | None = None) -> int:
        return min(count for eid, count in dict(self.answered).items() if shard in (None, shard_of(eid)))

    def end(self) -> None:
        """Have each session end after the step that runs, and close it."""
        self._end.set()
        self._done.result(WAIT_S)

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._task is not None and not self._done.done():
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def _play(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        clients = [
            ErrataClient[Any, Any, Any](self._url, headers=HEADERS, message_timeout_s=2 * WAIT_S)
            for _ in range(SESSIONS)
        ]
        await asyncio.gather(*(client.reset() for client in clients))
        self.answered.update({client.eid: 0 for client in clients})
        self._open.set()
        async with asyncio.TaskGroup() as playing:
            for client in clients:
                playing.create_task(self._session(client))
        await asyncio.gather(*(client.close() for client in clients))

    async def _session(self, client: ErrataClient[Any, Any, Any]) -> None:
        eid = client.eid
        assert eid is not None
        while not self._end.is_set():
            total = (await client.step({"n": 1})).observation["total"]
            self.answered[eid] += 1
            if total != self.answered[eid]:
                self.wrong.append(f"step {self.answered[eid]} of {eid} was answered with {total}")
            await asyncio.sleep(PAUSE_S)


async def _rounds() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def server_of(shard: str) -> int:
    """Return the pid of the one process that serves a shard."""
    (found,) = [int(one.name) for one in Path("/proc").glob("[0-9]*") if serves(int(one.name), shard)]
    return found


def serves(pid: int, shard: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return False
    return "errata_server.cli" in words and any(word.endswith(f"/{shard}") for word in words)


@pytest.fixture
def network() -> Iterator[dict[str, Space]]:
    with spaces() as made:
        yield made


def started(stack: ExitStack, space: Space, place: Path, *options: str) -> Node:
    """Start a node that ends with a stack. Ray gives up after 30 s, on a machine with much else to do; then again."""
    for start in range(STARTS):
        node = Node(space, place / f"{space.address.rpartition('.')[2]}-{start}", *options)
        stack.callback(node.end)
        if node.is_up():
            return node
        node.end()
    raise AssertionError(node.said())


@pytest.fixture
def head(network: dict[str, Space]) -> Iterator[Node]:
    """The head of a cluster of two nodes."""
    system = ("--system-config", json.dumps(DETECTION), "--include-dashboard=false")
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="errata-", dir="/tmp")))
        first = started(stack, network[HEAD], place, "--head", "--port", CLUSTER.rpartition(":")[2], *system)
        started(stack, network[VICTIM], place, "--address", CLUSTER)
        yield first


def test_a_node_that_is_cut_off_acknowledges_nothing_and_its_shard_is_taken_over(
    network: dict[str, Space], head: Node, tmp_path: Path
) -> None:
    outside, victim = network[OUTSIDE], network[VICTIM]
    where = ("--ray", "--address", CLUSTER)
    made = head.errata(
        *("fleet", "up", TARGET, *where, "--shared", "--data-dir", str(tmp_path), "--json"),
        *("--", "--max-sessions", "100"),
    )
    urls = {one["url"]: one["shard"] for one in json.loads(made)}
    (kept_url,) = [url for url in urls if HEAD in url]
    (old_url,) = [url for url in urls if VICTIM in url]
    kept, moved = urls[kept_url], urls[old_url]
    old = server_of(moved)

    def member(shard: str) -> dict[str, Any]:
        members = outside.get(f"{kept_url}/fleet").json()["members"]
        return next((one for one in members if one["shard"] == shard), {})

    until(lambda: all(member(one).get("state") == "up" for one in urls.values()), "the members know each other")
    with Player(outside, kept_url) as without, Player(victim, old_url) as within:
        players = (without, within)
        for player in players:
            player.wait()
            assert player.of(kept) and player.of(moved), "clients have sessions at both"

        # The link is cut.
        ran("ip", "-n", outside.name, "link", "set", port_of(victim), "down")
        at_cut = without.of(kept)
        until(lambda: victim.get(f"{old_url}/ready").status_code == 503, "the lease of the old worker runs out")
        assert "lease" in victim.get(f"{old_url}/ready").text
        last = within.of(moved)
        new = until(
            lambda: (one := member(moved))["state"] == "up" and one["url"] != old_url and one, "it is taken over"
        )
        assert HEAD in new["url"]
        at_take_over = without.of(moved)
        until(lambda: not serves(old, moved), "the old worker ends, since there is a later owner")
        until(lambda: all(n >= at_take_over[eid] + STEPS for eid, n in without.of(moved).items()), "sessions resume")
        assert within.of(moved) == last, "it has acknowledged nothing"
        for eid, acknowledged in last.items():
            found = outside.get(f"{new['url']}/episodes/{eid}").json()
            assert found["deliveries"] - 1 in (acknowledged, acknowledged + 1), "all that it acknowledged is there"
        assert without.least(kept) >= max(at_cut.values()) + STEPS, "the others went on"
        assert member(kept)["url"] == kept_url and member(kept)["state"] == "up"

        # The link is back.
        ran("ip", "-n", outside.name, "link", "set", port_of(victim), "up")
        until(
            lambda: all(n >= last[eid] + STEPS for eid, n in within.of(moved).items()), "its clients' sessions resume"
        )
        shown = json.loads(head.errata("fleet", "status", *where, "--json"))
        assert {one["shard"]: (one["url"], one["state"]) for one in shown} == {
            kept: (kept_url, "up"),
            moved: (new["url"], "up"),
        }, "the keeper of before takes nothing back"
        server_of(moved)
        for player in players:
            player.end()
            assert not player.wrong
    wanted = sum(player.answered.total() + SESSIONS for player in players)
    journaled = sum(
        bucket["deliveries"]
        for url in (kept_url, new["url"])
        for bucket in outside.get(f"{url}/episodes/aggregates").json()["buckets"]
    )
    assert journaled == wanted, "each step is there once"
    head.errata("fleet", "down", *where, "--now")
