"""A synchronous environment whose step blocks, on many sessions: Errata against the stock OpenEnv server.

    python bench/blocking.py [--json] [--smoke] [--any-thread] [--data-dir DIR]

Equal for both: the environment class, unmodified (its step sleeps 0.2 s); uvicorn with uvloop and websockets-sansio, no
deflate, one worker; this process as the client, with one socket a session that sends its next step when the reply is
there. Not equal: Errata runs as `errata serve`, stock as an application under uvicorn; Errata commits every step to a
journal, synced to disk, before its reply leaves, and stock keeps nothing.
The servers run at the same time and are measured in turn, and the ratio is taken per round.

``--any-thread`` measures Errata with an environment that says ``ANY_THREAD = True`` instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from websockets.asyncio.client import ClientConnection, connect

from errata_server.process import ServerProcess

BLOCKED_S = 0.2


class NapAction(Action):
    """Take a nap."""

    text: str = ""


class NapObservation(Observation):
    """What was said."""

    text: str = ""


class NapEnvironment(Environment[NapAction, NapObservation, State]):
    """Synchronous; a step blocks its thread."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="nap", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> NapObservation:
        return NapObservation(text="go")

    def step(self, action: NapAction, timeout_s: float | None = None, **_: Any) -> NapObservation:
        time.sleep(BLOCKED_S)
        self._state.step_count += 1
        return NapObservation(text=action.text, reward=1.0)

    @property
    def state(self) -> State:
        return self._state


class FreeNapEnvironment(NapEnvironment):
    """The same, and it says that it does not care for threads."""

    ANY_THREAD = True


def serve_stock(sessions: int) -> None:
    """Be the stock server; print the port."""
    from openenv.core.env_server.http_server import create_fastapi_app

    app = create_fastapi_app(NapEnvironment, NapAction, NapObservation, max_concurrent_envs=sessions + 10)
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        loop="uvloop",
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        access_log=False,
        log_level="warning",
        backlog=4096,
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn tells no other way
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await serving

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


class Peer:
    """A server in a process of its own."""

    def __init__(self, which: str, data_dir: Path, sessions: int) -> None:
        if which == "stock":
            command = [sys.executable, __file__, "--serve-stock", "--sessions", str(sessions)]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self.process.stdout is not None
            self.port = int(self.process.stdout.readline())
        else:
            path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
            target = "blocking:FreeNapEnvironment" if which == "errata-any-thread" else "blocking:NapEnvironment"
            server = ServerProcess(target, data_dir, "--max-sessions", str(sessions + 10), env={"PYTHONPATH": path})
            self.process = server.process
            self.port = int(server.url.rsplit(":", 1)[1])

    def cpu_s(self) -> float:
        """CPU seconds it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


async def measure_round(peer: Peer, sessions: int, seconds: float) -> dict[str, float]:
    """Open, reset, step for a while, close."""
    gate = asyncio.Semaphore(64)
    url = f"ws://127.0.0.1:{peer.port}/ws"
    step = json.dumps({"type": "step", "data": {"text": "x" * 64}})

    async def open_one() -> ClientConnection:
        async with gate:
            ws = await connect(url, compression=None, open_timeout=60, ping_interval=None)
            await ws.send('{"type":"reset","data":{}}')
            assert json.loads(await ws.recv())["type"] == "observation"
            return ws

    started = time.perf_counter()
    sockets = await asyncio.gather(*(open_one() for _ in range(sessions)))
    opened_s = time.perf_counter() - started

    took: list[float] = []
    end = time.perf_counter() + seconds

    async def drive(ws: ClientConnection) -> None:
        while (sent := time.perf_counter()) < end:
            await ws.send(step)
            answer = await ws.recv()
            assert b'"type":"observation"' in (answer if isinstance(answer, bytes) else answer.encode()).replace(
                b" ", b""
            )
            took.append(time.perf_counter() - sent)

    cpu, started = peer.cpu_s(), time.perf_counter()
    await asyncio.gather(*(drive(ws) for ws in sockets))
    elapsed, cpu = time.perf_counter() - started, peer.cpu_s() - cpu
    await asyncio.gather(*(ws.close() for ws in sockets))
    took.sort()
    return {
        "steps": float(len(took)),
        "opens_per_s": sessions / opened_s,
        "steps_per_s": len(took) / elapsed,
        "p50_ms": took[len(took) // 2] * 1e3,
        "p99_ms": took[int(len(took) * 0.99)] * 1e3,
        "server_cpu_us_per_step": cpu / len(took) * 1e6,
    }


async def measure(sessions: int, seconds: float, rounds: int, ours: str, data_dir: Path) -> dict[str, Any]:
    """Run the rounds, stock first, then ours first, and so on."""
    found: dict[str, list[dict[str, float]]] = {"stock": [], ours: []}
    peers = {which: Peer(which, data_dir, sessions) for which in found}
    try:
        for number in range(rounds):
            for which in found if number % 2 == 0 else reversed(found):
                found[which].append(await measure_round(peers[which], sessions, seconds))
    finally:
        for peer in peers.values():
            peer.stop()
    result: dict[str, Any] = {
        "machine": f"{platform.machine()} {platform.release()} {os.cpu_count()} cpus",
        "load_average_after": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("openenv", "uvicorn", "uvloop", "websockets")},
        "sessions": sessions,
        "step_sleeps_s": BLOCKED_S,
        "seconds_a_round": seconds,
        "journal_on": _filesystem(data_dir),
    }
    for which, figures in found.items():
        for key in figures[0]:
            result[f"{which}_{key}"] = statistics.median(f[key] for f in figures)
    for key in ("steps_per_s", "opens_per_s", "server_cpu_us_per_step", "p99_ms"):
        ratios = [mine[key] / max(theirs[key], 1e-9) for mine, theirs in zip(found[ours], found["stock"], strict=True)]
        result[f"ratio_{key}_median_of_rounds"] = statistics.median(ratios)
        result[f"ratio_{key}_rounds"] = [round(r, 3) for r in ratios]
    return result


def _filesystem(directory: Path) -> str:
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mounted, kind, *_ = line.split()
        if directory.resolve().is_relative_to(mounted) and len(mounted) >= len(best[0]):
            best = (mounted, kind)
    return best[1]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="small and quick: shows that it runs, measures nothing")
    parser.add_argument("--any-thread", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--data-dir", type=Path, help="where the journal is kept; on a disk, not in memory")
    parser.add_argument("--seconds", type=float, default=6.0, help="of stepping, in each round and server")
    parser.add_argument("--serve-stock", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_stock:
        serve_stock(options.sessions)
        return
    ours = "errata-any-thread" if options.any_thread else "errata"
    sessions, seconds, rounds = (20, 0.5, 1) if options.smoke else (options.sessions, options.seconds, options.rounds)
    with tempfile.TemporaryDirectory(dir=options.data_dir) as scratch:
        work = measure(sessions, seconds, rounds, ours, Path(scratch))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(work)
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:50} {value:.1f}" if isinstance(value, float) and value > 10 else f"{key:50} {value}")


if __name__ == "__main__":
    main()
