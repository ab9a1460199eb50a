"""Sessions that step counters while their network, server and disk fail; and what must hold afterwards.

Each step carries its number k and is answered with k and with the counter as the environment has it, so that a reply
shows on its own: counter < k, an acknowledged step was lost; counter > k, one acted twice; another k, it is the reply
of another request.

python -m tests.chaos.storm --sessions 2000 --kills 20 --seconds 600      (as root, from the root of the repository)
python -m tests.chaos.storm --target tests.chaos.environments:TaggedCounter --workers 4 --kills 20 --supervisor-kills 2
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openenv.core import GenericEnvClient
from websockets.exceptions import WebSocketException

from errata_client import Backoff, Connection, ErrataClient
from errata_protocol.errors import ErrataError, ServiceError
from errata_server.process import ServerProcess
from tests.server.worker_processes import children_of

from .proxy import FaultyProxy, Weather
from .server_start import started
from .small_disk import SmallDisk, small_disk

PATIENCE_S = 900.0
"""Longer than any fault: a caller that gave up could not say whether its step acted."""
SAMPLED = 0.05
"""Share of the deliveries whose bytes are compared with state(t)."""
NO_EFFECT = frozenset({"SANDBOX_FAILED", "JOURNAL_UNAVAILABLE"})
"""What a full disk may answer: the session stands where it stood."""

STOCK = 8
"""Clients of OpenEnv that play at the same time."""
STOCK_STEPS = 50

Client = ErrataClient[Any, Any, Any]


def shell_step(k: int) -> dict[str, Any]:
    """Return the action of step ``k`` in a sandbox: the counter is a file."""
    return {"command": f"read -r n 2>/dev/null < n || n=0; n=$((n+1)); echo $n > n; echo {k} $n"}


def shell_reply(observation: dict[str, Any]) -> tuple[int, int]:
    """Return k and the counter."""
    k, counter = observation["stdout"].split()
    return int(k), int(counter)


def tagged_step(k: int) -> dict[str, Any]:
    """Likewise for `tests.chaos.environments.TaggedCounter`."""
    return {"n": 1, "do": str(k)}


def tagged_reply(observation: dict[str, Any]) -> tuple[int, int]:
    """Return k and the counter."""
    return int(observation["text"]), int(observation["n"])


class Unaware(Connection):
    """A connection of a client that knows no fleet: each of its sockets arrives anywhere."""

    _member = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Plan:
    """What to do.

    Attributes:
        target: What is served; a terminal or a `TaggedCounter`.
        sessions: How many.
        sockets: On how many connections.
        at_once: How many of them have a step under way.
        seconds: How long faults are done, opening and the last steps not counted.
        kills: Number of times that the server is killed with -9, or one of its workers where it has several.
        workers: Number of processes that serve. With several, clients of OpenEnv play too, and other faults hit one.
        supervisor_kills: Number of times that all of several workers are killed with their supervisor.
        calmer: Other faults for each kill.
        recover_s: How long the last step of every session may take.
        seed: Of all that is drawn: it gives the same faults again, and not the same run.
    """

    target: str = "terminal"
    sessions: int = 100
    sockets: int = 6
    at_once: int = 48
    seconds: float = 60.0
    kills: int = 4
    workers: int = 1
    supervisor_kills: int = 0
    calmer: int = 3
    recover_s: float = 120.0
    seed: int = field(default_factory=lambda: secrets.randbits(32))


@dataclass
class Report:
    """What happened. Promises are kept where `broken` is empty.

    Attributes:
        acknowledged: Steps that were answered.
        lost: Replies whose counter is behind: an acknowledged step is gone.
        twice: Replies whose counter is ahead: a step acted twice.
        misplaced: Replies of another request, or with another t.
        changed: Deliveries whose state(t) is not what was sent.
        ended: Sessions that the server gave up, by code.
        stuck: Sessions that did not answer after the faults.
        stalled: Times that nothing was answered for `Plan.recover_s` with the server up.
        unacknowledged: Refusals and rolled-back failures, by code; nothing acted.
        compared: Deliveries that were compared with state(t).
        stock_steps: Number of steps that were answered to clients of OpenEnv, whose episodes end with their sockets.
        stock_ended: Number of their episodes that a fault ended, by the type of the error.
        faults: What was done how often.
        log: Errors in the servers' logs.
        seconds: From the first open to the last answer.
        recovered_s: From the end of the faults until every session had answered its next step.
    """

    plan: Plan
    acknowledged: int = 0
    lost: int = 0
    twice: int = 0
    misplaced: int = 0
    changed: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    stuck: int = 0
    stalled: int = 0
    unacknowledged: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    stock_steps: int = 0
    stock_ended: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)
    least_steps: int = 0
    seconds: float = 0.0
    recovered_s: float = 0.0

    def as_json(self) -> str:
        """Return it all as JSON."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}  # asdict() takes no Counter
        return json.dumps(found | {"plan": asdict(self.plan), "broken": self.broken}, indent=1)

    @property
    def broken(self) -> dict[str, int]:
        """Promises that were not kept."""
        found = {
            "lost": self.lost,
            "twice": self.twice,
            "misplaced": self.misplaced,
            "changed": self.changed,
            "ended": self.ended.total(),
            "stuck": self.stuck,
            "stalled": self.stalled,
        }
        return {name: count for name, count in found.items() if count}


@dataclass(eq=False)
class Load:
    """One session and what was acknowledged to it."""

    client: Client
    done: int = 0
    over: bool = False
    sampled: dict[int, bytes] = field(default_factory=dict)


class Storm:
    """A server, a proxy, clients and their faults.

    Args:
        plan: What to do.
        data_dir: The server's.
        disk: Where that lies, if it can be filled.
        on_killed: Called after each kill, before the next start: a control spoils the journal here.
    """

    def __init__(
        self,
        plan: Plan,
        data_dir: Path,
        disk: SmallDisk | None = None,
        on_killed: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan = plan
        self.report = Report(plan)
        self._data_dir, self._disk, self._on_killed = data_dir, disk, on_killed
        self._chance = random.Random(plan.seed)
        self._proxy = FaultyProxy(self._chance)
        self._loads: list[Load] = []
        self._idle: deque[Load] = deque()
        self._over = False
        self._since = 0
        self._server: ServerProcess | None = None
        self._stock_episodes: dict[str, int] = {}
        shell = plan.target == "terminal"
        self._action, self._reply = (shell_step, shell_reply) if shell else (tagged_step, tagged_reply)

    async def run(self) -> Report:
        """Do it all."""
        began = time.monotonic()
        url = await self._proxy.start()
        connections = [self._connection(url, Unaware if n % 2 else Connection) for n in range(self.plan.sockets)]
        try:
            await self._start()
            for connection in connections:
                await connection.connect()
            await self._open(connections)
            drivers = [asyncio.create_task(self._drive()) for _ in range(self.plan.at_once)]
            players = [asyncio.create_task(self._play_stock(url, n)) for n in range(STOCK * (self.plan.workers > 1))]
            await self._fail_for_a_while()
            self._over = True
            self._proxy.calm()
            calm = time.monotonic()
            await self._rest(drivers)
            await asyncio.gather(*players)
            self.report.recovered_s = round(time.monotonic() - calm, 1)
            await self._compare()
            await asyncio.to_thread(self._compare_stock)
        finally:
            try:
                for connection in connections:
                    await connection.aclose()
                await self._proxy.close()
            finally:  # also where that is interrupted
                self._stop_for_good()
        self.report.faults.update(self._proxy.done)
        self.report.resumes = sum(load.client.stats.resumes for load in self._loads)
        self.report.least_steps = min(load.done for load in self._loads)
        self.report.seconds = round(time.monotonic() - began, 1)
        return self.report

    def _connection(self, url: str, kind: type[Connection]) -> Connection:
        return kind(
            url,
            websocket_ping_interval_s=4.0,
            websocket_ping_timeout_s=6.0,
            backoff=Backoff(first_s=0.05, most_s=1.0, give_up_s=PATIENCE_S),
        )

    async def _open(self, connections: list[Connection]) -> None:
        gate = asyncio.Semaphore(self.plan.at_once)

        async def one(n: int) -> None:
            client: Client = ErrataClient(
                connection=connections[n % len(connections)], message_timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S
            )
            async with gate:
                await client.reset()
            self._loads.append(Load(client))

        await asyncio.gather(*(one(n) for n in range(self.plan.sessions)))
        self._idle.extend(self._loads)

    # -- load -------------------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        while not self._over and self._idle:
            load = self._idle.popleft()
            if await self._step(load):
                self._idle.append(load)

    async def _step(self, load: Load) -> bool:
        """Step until the step is acknowledged; False if the session is over."""
        k = load.done + 1
        while True:
            try:
                result = await load.client.step(self._action(k))
                break
            except ErrataError as error:
                if error.code in NO_EFFECT:
                    self.report.unacknowledged[error.code] += 1
                    await asyncio.sleep(0.2)
                else:
                    self.report.ended[error.code] += 1
                    load.over = True
                    return False
        said, counter = self._reply(result.observation)
        self.report.lost += counter < k
        self.report.twice += counter > k
        self.report.misplaced += said != k or load.client.t != k
        self.report.acknowledged += 1
        load.done = k
        if self._chance.random() < SAMPLED:
            eid = load.client.eid
            assert eid is not None
            received = load.client._log.get(eid, k)  # the bytes as they came; the public history would ask the server
            assert received is not None
            load.sampled[k] = hashlib.sha256(received.payload).digest()
        return True

    async def _rest(self, drivers: list[asyncio.Task[None]]) -> None:
        """Let what is under way end, then step every session once more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.plan.recover_s):
                await asyncio.gather(*drivers)
        gate = asyncio.Semaphore(self.plan.at_once)

        async def last(load: Load) -> bool:
            async with gate:
                return await self._step(load)

        steps = {asyncio.create_task(last(load)): load for load in self._loads if not load.over}
        _, late = await asyncio.wait(steps, timeout=self.plan.recover_s)
        self.report.stuck = len(late)
        for step in late:
            step.cancel()
        for driver in drivers:
            driver.cancel()
        outcomes = await asyncio.gather(*drivers, *steps, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _compare(self) -> None:
        """Compare sampled deliveries with state(t)."""
        gate = asyncio.Semaphore(16)

        async def one(load: Load, t: int, sha: bytes) -> None:
            async with gate:
                found = await load.client.state_at(t)
            self.report.compared += 1
            self.report.changed += hashlib.sha256(found.payload).digest() != sha

        live = [load for load in self._loads if not load.over]
        await asyncio.gather(*(one(load, t, sha) for load in live for t, sha in load.sampled.items()))

    async def _play_stock(self, url: str, player: int) -> None:
        """Play short episodes with a client of OpenEnv, the next one when a fault has ended one."""
        for episode in itertools.count():
            if self._over:
                return
            name, n = f"stock-{player}-{episode}", 0
            try:
                async with GenericEnvClient(base_url=url, connect_timeout_s=30.0, message_timeout_s=30.0) as client:
                    await client.reset(episode_id=name)
                    while not self._over and n < STOCK_STEPS:
                        self._stock_episodes[name] = n
                        n += 1
                        said, counter = self._reply((await client.step(self._action(n))).observation)
                        # It may have lost its socket before this step, and opened another one without an error.
                        if counter == 1 and (n > 1 or (await client.state())["episode_id"] != name):
                            self.report.stock_ended["connected again"] += 1
                            n -= 1
                            break
                        self.report.misplaced += said != n
                        self.report.lost += counter < n
                        self.report.twice += counter > n
                        self.report.stock_steps += 1
                    self._stock_episodes[name] = n
            except (OSError, RuntimeError, WebSocketException) as error:  # a timeout is an OSError
                self.report.stock_ended[type(error).__name__] += 1
                await asyncio.sleep(0.2)

    def _compare_stock(self) -> None:
        """Compare what clients of OpenEnv had answered with the journal, which may have one step more."""
        assert self._server is not None
        found: dict[str, int] = {}
        cursor: dict[str, str] = {}
        while self._stock_episodes:
            answer = httpx.get(f"{self._server.url}/episodes", params={"limit": 500, **cursor}, timeout=PATIENCE_S)
            answer.raise_for_status()
            page = answer.json()
            found |= {one["episode_id"]: one["deliveries"] for one in page["episodes"]}
            if page["next"] is None:
                break
            cursor = {"cursor": page["next"]}
        for name, steps in self._stock_episodes.items():
            self.report.lost += found.get(name, 0) < steps + 1
            self.report.twice += found.get(name, 0) > steps + 2

    # -- faults -----------------------------------------------------------------------------------------------------

    async def _fail_for_a_while(self) -> None:
        others = [
            *((self._fill_disk, self._kill_while_full) if self._disk else ()),
            self._cut, self._half_open, self._tear, self._drip, self._delay, self._stop_and_continue, self._hand_over,
            self._kill_at_once, self._cut,
        ]  # fmt: skip
        kills = [self._kill] * self.plan.kills + [self._kill_supervisor] * self.plan.supervisor_kills
        rest = (others * (self.plan.kills * self.plan.calmer // len(others) + 1))[: self.plan.kills * self.plan.calmer]
        faults = kills + rest
        self._chance.shuffle(faults)
        end = time.monotonic() + self.plan.seconds
        for left, fault in zip(range(len(faults), 0, -1), faults, strict=True):
            pause = max(0.0, end - time.monotonic()) / left
            await asyncio.sleep(self._chance.uniform(0.3, 1.3) * pause)
            await fault()

    async def _start(self) -> None:
        several = ("--workers", str(self.plan.workers)) if self.plan.workers > 1 else ()
        self._server = await started(self.plan.target, self._data_dir, "--max-sessions", "20000", *several)
        self._since = self.report.acknowledged
        self._proxy.upstream = int(self._server.url.rsplit(":", 1)[1])

    def _ended(self) -> None:
        assert self._server is not None
        self._proxy.upstream = None
        of_error = False
        for line in self._server.log:
            # Lines without a time belong to the one before: the rest of a traceback is kept with its error.
            of_error = "ERROR" in line or "Traceback" in line or (of_error and not line.startswith("20"))
            if of_error:
                self.report.log.append(line.strip())

    async def _kill(self) -> None:
        """Kill the server under load: where nothing went on since the last start, nothing could be lost."""
        await self._progress()
        await self._kill_at_once()

    async def _kill_at_once(self) -> None:
        """Kill the server, perhaps while its sessions still come back."""
        if self.plan.workers > 1:
            await self._kill_worker()
            return
        self.report.faults["kill -9"] += 1
        await self._kill_server()
        await self._start()

    async def _kill_worker(self) -> None:
        """Kill one of the workers, and wait until its supervisor has started it again."""
        self.report.faults["kill -9 of a worker"] += 1
        victim = self._chance.choice(await self._all_workers())
        self._since = self.report.acknowledged
        os.kill(victim, signal.SIGKILL)
        while victim in self._workers():  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _kill_supervisor(self) -> None:
        """Kill the supervisor under load, with which its workers die, and start it again as a service manager does."""
        await self._progress()
        self.report.faults["kill -9 of the supervisor"] += 1
        await self._kill_server()
        await self._start()

    def _workers(self) -> list[int]:
        """Return the process ids of the workers that run."""
        assert self._server is not None
        return children_of(self._server.process.pid)

    async def _all_workers(self) -> list[int]:
        """Return the process ids of all workers, once all run."""
        while len(found := self._workers()) < self.plan.workers:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return found

    async def _progress(self) -> None:
        """Wait until every driver can have had two replies since the last start: the first may be of a step before."""
        goal = self._since + 2 * self.plan.at_once
        end = time.monotonic() + self.plan.recover_s
        while self.report.acknowledged < goal and self._any_left():
            if time.monotonic() > end:
                self.report.stalled += 1
                return
            await asyncio.sleep(0.05)

    def _any_left(self) -> bool:
        return self.report.ended.total() < len(self._loads)

    async def _kill_server(self) -> None:
        assert self._server is not None
        workers = self._workers() if self.plan.workers > 1 else []
        await asyncio.to_thread(self._server.kill)
        while any(Path(f"/proc/{pid}").exists() for pid in workers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        self._ended()
        self._on_killed()

    async def _kill_while_full(self) -> None:
        assert self._disk is not None
        self.report.faults["kill -9, disk full"] += 1
        await asyncio.to_thread(self._disk.fill)
        await asyncio.sleep(self._chance.uniform(0.0, 1.0))
        await self._kill_server()
        try:
            await self._start()
        except ServiceError:
            self.report.faults["no start, disk full"] += 1
            self._disk.empty()
            await self._start()
        else:
            await asyncio.sleep(self._chance.uniform(0.5, 2.0))
            self._disk.empty()

    async def _hand_over(self) -> None:
        self.report.faults["SIGTERM"] += 1
        assert self._server is not None
        status = await asyncio.to_thread(self._server.stop, 120.0)
        self._ended()
        if status != 0:
            self.report.log.append(f"SIGTERM ended with status {status}")
        await self._start()

    async def _stop_and_continue(self) -> None:
        self.report.faults["SIGSTOP"] += 1
        assert self._server is not None
        several = self.plan.workers > 1
        stopped = self._chance.choice(await self._all_workers()) if several else self._server.process.pid
        os.kill(stopped, signal.SIGSTOP)
        await asyncio.sleep(self._chance.choice([0.2, 1.0, 3.0, 12.0]))  # the last one is longer than pings wait
        os.kill(stopped, signal.SIGCONT)

    async def _fill_disk(self) -> None:
        self.report.faults["disk full"] += 1
        assert self._disk is not None
        await asyncio.to_thread(self._disk.fill)
        await asyncio.sleep(self._chance.uniform(0.5, 4.0))
        self._disk.empty()

    async def _cut(self) -> None:
        self._proxy.cut(self._chance.choice([0.2, 0.5, 1.0]))

    async def _half_open(self) -> None:
        self._proxy.set(Weather.SILENT, self._chance.choice([0.2, 0.5]))

    async def _tear(self) -> None:
        self._proxy.set(Weather.TORN, self._chance.choice([0.3, 1.0]))

    async def _drip(self) -> None:
        self._proxy.set(Weather.DRIPPING, 0.5)
        await self._for_a_moment()

    async def _delay(self) -> None:
        self._proxy.set(Weather.LATE, 0.7, late_s=self._chance.choice([0.05, 0.3]))
        await self._for_a_moment()

    async def _for_a_moment(self) -> None:
        await asyncio.sleep(self._chance.uniform(0.5, 1.5))
        self._proxy.set(Weather.FAIR)

    def _stop_for_good(self) -> None:
        if self._disk is not None:
            self._disk.empty()
        if self._server is not None and self._server.process.poll() is None:
            self._server.process.send_signal(signal.SIGCONT)
            try:
                self._server.stop(120.0)
            except BaseException:  # also a second ^C
                self._server.kill()
                raise
            finally:
                self._ended()


def main() -> int:
    """Run one storm on a disk of its own and print its report; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--directory", type=Path, help="Of the disk's image.")
    parser.add_argument("--disk-mib", type=int, default=16 << 10)
    given = vars(parser.parse_args())
    directory, disk_mib = given.pop("directory"), given.pop("disk_mib")
    plan = Plan(**given)
    print(f"seed {plan.seed}", file=sys.stderr, flush=True)
    for stopped in (signal.SIGTERM, signal.SIGINT):  # also in the background: the disk has to be unmounted
        signal.signal(stopped, signal.default_int_handler)
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="errata-storm-") as made,
        small_disk(Path(made) / "own", disk_mib) as disk,
    ):
        report = asyncio.run(Storm(plan, disk.place / "data", disk).run())
    print(report.as_json())
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
