"""Sessions that open, step, fork, are cut, leave, come back and close, at a rate that the server keeps up with.

What the server holds at the end is what it held at the beginning.

python -m tests.chaos.soak --minutes 20 --sessions 2000 --json soak.json      (from the root of the repository)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import connect

from errata_client import Backoff, Connection, ErrataClient, Ticket
from errata_server.journal.disk import MAX_OPEN

from .proxy import FaultyProxy
from .server_start import started
from .storm import PATIENCE_S, Client, shell_reply, shell_step, tagged_reply, tagged_step

TOLERANCE = 0.05
"""Share by which memory may grow."""
WARM_UP_MINUTES = 2.0
"""Until then caches, pools and allocators reach their size."""

DETACH_TTL_S = 5.0
"""So short that sessions fall asleep and wake all the time."""


@dataclass(frozen=True)
class Plan:
    """What to do.

    Attributes:
        target: What is served.
        minutes: How long, without opening the first sessions and closing the last.
        sessions: How many there are at a time.
        sockets: On how many connections.
        per_second: Requests, bounded.
        warm_up: Steps before anything is counted, as fast as they go; fewer are enough in sandboxes.
        seed: Of all that is drawn.
    """

    target: str = "tests.chaos.environments:TaggedCounter"
    minutes: float = 20.0
    sessions: int = 2000
    sockets: int = 4
    per_second: float = 150.0
    warm_up: int = 300_000
    seed: int = field(default_factory=lambda: secrets.randbits(32))


@dataclass(frozen=True)
class Sample:
    """What the server held at one time.

    Attributes:
        minute: Since all sessions are open.
        rss_mib: Resident memory.
        descriptors: Open ones, without the journal's segments.
        segments: Descriptors of these; `errata_server.journal.disk.MAX_OPEN` at most.
        threads: Of the process.
        requests: Answered until then.
        disk_mib: Of the data directory, which keeps what is delivered and therefore grows.
    """

    minute: float
    rss_mib: float
    descriptors: int
    segments: int
    threads: int
    requests: int
    disk_mib: int


@dataclass(frozen=True)
class Held:
    """What the server held of one thing.

    Attributes:
        first: Of the first third of the samples after the warm-up, their median or mean.
        last: Likewise of the last third.
        allowed: Most that ``last`` may be above ``first``.
    """

    first: float
    last: float
    allowed: float

    @property
    def grew(self) -> bool:
        """Return whether there is more of it than a steady server has."""
        return self.last - self.first > self.allowed


def held(samples: list[Sample]) -> dict[str, Held]:
    """Return what must not grow. A run of less than ten minutes warms up for its first fifth.

    Memory may grow by a share. Counts are small, and pools breathe: a share of 9 threads is none, and one more is 11 %.
    Their mean may go up by half of the swing in the first third, from the middle to where they had been, or by one.
    """
    warm_up = min(WARM_UP_MINUTES, samples[-1].minute / 5)
    warm = [sample for sample in samples if sample.minute >= warm_up]
    third = max(1, len(warm) // 3)

    def thirds(name: str) -> tuple[list[float], list[float]]:
        values = [float(getattr(sample, name)) for sample in warm]
        return values[:third], values[-third:]

    first, last = thirds("rss_mib")
    found = {"rss_mib": Held(statistics.median(first), statistics.median(last), TOLERANCE * statistics.median(first))}
    for name in ("descriptors", "threads"):
        first, last = thirds(name)
        allowed = max(1.0, (max(first) - min(first)) / 2)
        found[name] = Held(statistics.fmean(first), statistics.fmean(last), allowed)
    return found


class Soak:
    """The server, its clients and what they do."""

    def __init__(self, plan: Plan, data_dir: Path, *, every_s: float) -> None:
        self.plan = plan
        self.samples: list[Sample] = []
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._chance = random.Random(plan.seed)
        self._data_dir, self._every_s = data_dir, every_s
        self._proxy = FaultyProxy(self._chance)
        self._places: list[Client | None] = []
        self._steps: dict[Client, int] = {}
        self._away: list[tuple[float, int, Ticket, int]] = []
        self._busy: set[int] = set()
        shell = plan.target == "terminal"
        self._action, self._reply = (shell_step, shell_reply) if shell else (tagged_step, tagged_reply)

    async def run(self) -> None:
        """Do it all."""
        env = {"ERRATA_DETACH_TTL_S": str(DETACH_TTL_S), "ERRATA_RETENTION_DAYS": "0"}
        self._server = await started(self.plan.target, self._data_dir, "--max-sessions", "20000", env=env)
        with self._server:
            await self._serve()
        if status := self._server.process.returncode:
            self.wrong.append(f"the server ended with status {status}")
        log = list(self._server.log)
        self.wrong += ["".join(log[at : at + 80]) for at, line in enumerate(log) if " ERROR " in line]

    async def _serve(self) -> None:
        self._proxy.upstream = int(self._server.url.rsplit(":", 1)[1])
        self._http = httpx.AsyncClient(base_url=self._server.url, timeout=PATIENCE_S)
        url = await self._proxy.start()
        backoff = Backoff(first_s=0.05, most_s=1.0, give_up_s=PATIENCE_S)
        self._connections = [Connection(url, backoff=backoff) for _ in range(self.plan.sockets)]
        try:
            for connection in self._connections:
                await connection.connect()
            self._places = [None] * self.plan.sessions
            await self._all(self._open)
            await self._warm_up()
            self._began = time.monotonic()
            sampling = asyncio.create_task(self._sample())
            await self._load()
            sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampling  # whose own failure would leave too few samples to see anything grow
            await self._all(self._close)
        finally:
            for connection in self._connections:
                await connection.aclose()
            await self._http.aclose()
            await self._proxy.close()

    async def _all(self, do: Callable[[int], Awaitable[None]]) -> None:
        gate = asyncio.Semaphore(64)

        async def one(place: int) -> None:
            async with gate:
                await do(place)

        await asyncio.gather(*(one(place) for place in range(self.plan.sessions)))

    async def _warm_up(self) -> None:
        """Step until bounded caches are full, above all the index's pages (32 MiB): filling them is no leak."""
        while self.done["warm-up"] < self.plan.warm_up:
            await self._all(self._step)
            self.done["warm-up"] += self.plan.sessions

    async def _load(self) -> None:
        """Begin a request now and then, at most as many a second as planned, and none where the last is under way."""
        kinds: list[tuple[Callable[[int], Awaitable[None]], float]] = [
            (self._step, 80), (self._leave, 5), (self._replace, 4), (self._fork, 3), (self._reset, 3), (self._read, 5),
            (self._fork_over_http, 3), (self._plain, 3), (self._mcp, 3),
        ]  # fmt: skip
        calls, weights = [kind for kind, _ in kinds], [weight for _, weight in kinds]
        running: set[asyncio.Task[None]] = set()
        end, cut_at = self._began + self.plan.minutes * 60.0, self._began + 10.0
        while (now := time.monotonic()) < end:
            await asyncio.sleep(self._chance.expovariate(self.plan.per_second))
            if now > cut_at:
                self._proxy.cut(0.5)
                self.done["cut"] += 1
                cut_at = now + 10.0
            while self._away and self._away[0][0] < now:
                _, place, ticket, steps = self._away.pop(0)
                running.add(asyncio.create_task(self._guarded(self._come_back, place, ticket, steps)))
            place = self._chance.randrange(self.plan.sessions)
            if place not in self._busy and len(running) < 256:
                (call,) = self._chance.choices(calls, weights)
                self._busy.add(place)
                running.add(asyncio.create_task(self._guarded(call, place)))
            running = {task for task in running if not task.done()}
        await asyncio.gather(*running)
        for _, place, ticket, steps in self._away:
            await self._guarded(self._come_back, place, ticket, steps)

    async def _guarded(self, call: Callable[..., Awaitable[None]], place: int, *more: Any) -> None:
        try:
            await call(place, *more)
            self.done[call.__name__.strip("_")] += 1
        except Exception as error:
            self.wrong.append(f"{call.__name__}: {error!r}"[:300])
        finally:
            if call != self._leave:
                self._busy.discard(place)

    def _client(self) -> Client:
        connection = self._chance.choice(self._connections)
        return ErrataClient(connection=connection, message_timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S)

    async def _open(self, place: int) -> None:
        client = self._client()
        await client.reset()
        self._places[place], self._steps[client] = client, 0

    async def _close(self, place: int) -> None:
        client, self._places[place] = self._places[place], None
        if client is not None:
            del self._steps[client]
            await client.end_session()

    async def _replace(self, place: int) -> None:
        await self._close(place)
        await self._open(place)

    async def _step(self, place: int) -> None:
        client = self._places[place]
        assert client is not None
        k = self._steps[client] + 1
        said = self._reply((await client.step(self._action(k))).observation)
        if said != (k, k):
            self.wrong.append(f"step {k} was answered with {said}")
        self._steps[client] = k

    async def _reset(self, place: int) -> None:
        client = self._places[place]
        assert client is not None
        await client.reset()
        self._steps[client] = 0

    async def _read(self, place: int) -> None:
        client = self._places[place]
        assert client is not None
        assert client.t is not None
        await client.state_at(client.t)

    async def _fork(self, place: int) -> None:
        """Put a child into the place of its parent, and close that."""
        client = self._places[place]
        assert client is not None
        steps = self._steps[client]
        assert client.t is not None
        child = await client.fork(client.t)
        ticket = child.ticket()
        await child.close()
        await self._close(place)
        await self._come_back(place, ticket, steps)

    async def _fork_over_http(self, place: int) -> None:
        """Make a child that nobody takes up."""
        client = self._places[place]
        assert client is not None and client.t is not None
        wanted = {"t": client.t, "request_id": f"{place}-{self.done.total()}"}
        answer = await self._http.post(f"/episodes/{client.eid}/fork", json=wanted)
        answer.raise_for_status()

    async def _plain(self, place: int) -> None:
        """Use a session on a plain socket, half of them with capabilities asked for, and close it or cut it off."""
        socket = await connect(self._server.url.replace("http", "ws", 1) + "/ws")
        try:
            if self._chance.random() < 0.5:  # from then on it outlives its socket
                await socket.send('{"type":"capabilities","data":{}}')
                await socket.recv()
            for message in ({"type": "reset", "data": {}}, {"type": "step", "data": self._action(1)}):
                await socket.send(json.dumps(message))
                answer = json.loads(await socket.recv())
                if answer["type"] != "observation":
                    self.wrong.append(f"a plain socket was answered with {answer}"[:300])
            if self._chance.random() < 0.5:
                await socket.close()
        finally:
            socket.transport.abort()

    async def _mcp(self, place: int) -> None:
        """Create an MCP session over HTTP, and close it or leave it."""
        created = await self._rpc("openenv/session/create")
        if self._chance.random() < 0.5:
            await self._rpc("openenv/session/close", session_id=created["session_id"])

    async def _rpc(self, method: str, **params: Any) -> dict[str, Any]:
        answer = await self._http.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        result: dict[str, Any] = answer.raise_for_status().json()["result"]
        return result

    async def _leave(self, place: int) -> None:
        """Detach, as a trainer that ends does; the session falls asleep before another takes it up."""
        client, self._places[place] = self._places[place], None
        assert client is not None
        ticket = client.ticket()
        steps = self._steps.pop(client)
        await client.close()
        self._away.append((time.monotonic() + DETACH_TTL_S * 1.5, place, ticket, steps))

    async def _come_back(self, place: int, ticket: Ticket, steps: int) -> None:
        connection = self._chance.choice(self._connections)
        client: Client = ErrataClient.resume(
            connection.base_url,
            ticket,
            connection=connection,
            message_timeout_s=PATIENCE_S,
            connect_timeout_s=PATIENCE_S,
        )
        await client.connect()
        self._places[place], self._steps[client] = client, steps
        await self._step(place)

    # -- what it holds ------------------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        print(
            f"{'minute':>7} {'RSS MiB':>8} {'fds':>5} {'segments':>8} {'threads':>8} {'requests':>9} {'disk MiB':>9}",
            flush=True,
        )
        while True:
            sample = await asyncio.to_thread(self._look)
            self.samples.append(sample)
            print(
                f"{sample.minute:7.1f} {sample.rss_mib:8.1f} {sample.descriptors:5} {sample.segments:8} "
                f"{sample.threads:8} {sample.requests:9} {sample.disk_mib:9}",
                flush=True,
            )
            await asyncio.sleep(self._every_s)

    def _look(self) -> Sample:
        proc = Path(f"/proc/{self._server.process.pid}")
        open_files = [path.readlink().name for path in (proc / "fd").iterdir() if path.is_symlink()]
        segments = sum(name.endswith(".log") for name in open_files)
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        # Layers of sandboxes are too many files to count twice a minute.
        parts = [part for part in self._data_dir.iterdir() if part.name != "sandboxes"]
        size = 0
        for file in (file for part in parts for file in (part.rglob("*") if part.is_dir() else [part])):
            with contextlib.suppress(FileNotFoundError):  # retention takes segments away meanwhile
                size += file.stat().st_size if file.is_file() else 0
        return Sample(
            round((time.monotonic() - self._began) / 60.0, 2),
            round(int(status["VmRSS"].split()[0]) / 1024, 1),
            len(open_files) - segments,
            segments,
            int(status["Threads"]),
            self.done.total(),
            size >> 20,
        )


def main() -> int:
    """Soak a server and print what it held; 1 if that grew or anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--json", type=Path, help="Write what is found here.")
    parser.add_argument("--directory", type=Path, help="Of the data directory.")
    given = vars(parser.parse_args())
    path, directory = given.pop("json"), given.pop("directory")
    plan = Plan(**given)
    print(f"seed {plan.seed}", file=sys.stderr, flush=True)
    for stopped in (signal.SIGTERM, signal.SIGINT):  # also in the background: the server has to be stopped
        signal.signal(stopped, signal.default_int_handler)
    with tempfile.TemporaryDirectory(dir=directory, prefix="errata-soak-") as made:
        soak = Soak(plan, Path(made) / "data", every_s=min(30.0, plan.minutes * 60 / 40))
        asyncio.run(soak.run())
    ends = held(soak.samples)
    for name, of in ends.items():
        change = f"{of.last - of.first:+.1f}, {of.allowed:.1f} allowed"
        print(f"{name}: {of.first:.1f} -> {of.last:.1f} ({change}){' GREW' if of.grew else ''}")
    if (segments := max(sample.segments for sample in soak.samples)) > MAX_OPEN:
        soak.wrong.append(f"{segments} descriptors of segments, {MAX_OPEN} at most are to stay open")
    print(dict(soak.done), f"{len(soak.wrong)} wrong", *soak.wrong[:20], sep="\n")
    if path is not None:
        found = {"plan": asdict(plan), "samples": [asdict(s) for s in soak.samples], "done": soak.done}
        found |= {"held": {name: asdict(of) for name, of in ends.items()}, "wrong": soak.wrong}
        path.write_text(json.dumps(found, indent=1))
    return 1 if soak.wrong or any(of.grew for of in ends.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
