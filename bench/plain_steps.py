"""Steps over many plain sockets: Errata against the stock OpenEnv server, by where the environment's calls run.

    python bench/plain_steps.py [--json] [--smoke] [--sessions 100 1000] [--kinds async any_thread pinned]
                                [--rounds 5] [--seconds 4] [--data-dir DIR]

Equal for both: the environment classes, unmodified; uvicorn with uvloop and websockets-sansio, no deflate, one worker;
this process as the client, with one socket a session that sends its next step when the reply is there. Not equal:
Errata commits every step to a journal, synced to disk, before its reply leaves, and stock keeps nothing.
The servers of a kind run at the same time and are measured in turn, and the ratio is taken per round. On a machine that
does other work too, read the CPU time of the server per step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from plain_sockets import Peer, filesystem, serve_stock, step_for, summary


class EchoAction(Action):
    """Say something."""

    text: str = ""


class EchoObservation(Observation):
    """What was said."""

    text: str = ""


class PinnedEcho(Environment[EchoAction, EchoObservation, State]):
    """Synchronous: all its calls on one thread."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="echo", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> EchoObservation:
        return EchoObservation(text="go")

    def step(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> EchoObservation:
        self._state.step_count += 1
        return EchoObservation(text=action.text, reward=1.0)

    @property
    def state(self) -> State:
        return self._state


class FreeEcho(PinnedEcho):
    """Synchronous, on any thread."""

    ANY_THREAD = True


class AsyncEcho(PinnedEcho):
    """On the event loop."""

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> EchoObservation:
        return self.reset(seed, episode_id)

    async def step_async(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> EchoObservation:
        return self.step(action)


KINDS = {"async": AsyncEcho, "any_thread": FreeEcho, "pinned": PinnedEcho}


def _stock_app(kind: str, sessions: int) -> Any:
    from openenv.core.env_server.http_server import create_fastapi_app

    return create_fastapi_app(KINDS[kind], EchoAction, EchoObservation, max_concurrent_envs=sessions + 10)


async def measure(kind: str, sizes: list[int], seconds: float, rounds: int, data_dir: Path) -> dict[str, Any]:
    """Run the rounds of each size, stock first, then ours first, and so on."""
    most = max(sizes)
    peers = {
        "stock": Peer.stock(Path(__file__), "--serve-stock", kind, "--sessions", str(most)),
        "errata": Peer.errata(f"plain_steps:{KINDS[kind].__name__}", data_dir, "--max-sessions", str(most + 10)),
    }
    result: dict[str, Any] = {}
    try:
        for sessions in sizes:
            found: dict[str, list[dict[str, float]]] = {which: [] for which in peers}
            for number in range(rounds):
                for which in peers if number % 2 == 0 else reversed(peers):
                    figures = await step_for(peers[which], sessions, seconds, {"text": "x" * 64})
                    found[which].append(figures)
            result[str(sessions)] = summary(found, "errata")
    finally:
        for peer in peers.values():
            peer.stop()
    return result


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="small and quick: shows that it runs, measures nothing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--data-dir", type=Path, help="where the journal is kept; on a disk, not in memory")
    parser.add_argument("--seconds", type=float, default=4.0, help="of stepping, in each round and server")
    parser.add_argument("--serve-stock", choices=list(KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_stock:
        serve_stock(lambda: _stock_app(options.serve_stock, options.sessions[0]))
        return
    sizes, seconds, rounds = ([10], 0.3, 1) if options.smoke else (options.sessions, options.seconds, options.rounds)
    with tempfile.TemporaryDirectory(dir=options.data_dir) as scratch:
        result: dict[str, Any] = {
            "machine": f"{platform.machine()} {platform.release()} {os.cpu_count()} cpus",
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("openenv", "uvicorn", "uvloop", "websockets")},
            "seconds_a_round": seconds,
            "rounds": rounds,
            "journal_on": filesystem(Path(scratch)),
        }
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            for kind in options.kinds:
                result[kind] = runner.run(measure(kind, sizes, seconds, rounds, Path(scratch) / kind))
    if options.json:
        print(json.dumps(result))
        return
    for kind in options.kinds:
        for sessions, figures in result[kind].items():
            print(f"{kind}, {sessions} sockets")
            for key in ("steps_per_s", "server_cpu_us_per_step", "p50_ms", "p99_ms", "threads", "kib_per_open_session"):
                print(f"  {key:24} stock {figures['stock_' + key]:>10}   errata {figures['errata_' + key]:>10}")
            for key in ("steps_per_s", "server_cpu_us_per_step", "p99_ms"):
                print(f"  ratio {key:24} {figures[f'ratio_{key}_median_of_rounds']}  {figures[f'ratio_{key}_rounds']}")


if __name__ == "__main__":
    main()
