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
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from plain_sockets import Peer, filesystem, serve_stock, step_for, summary

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


def _stock_app(sessions: int) -> Any:
    from openenv.core.env_server.http_server import create_fastapi_app

    return create_fastapi_app(NapEnvironment, NapAction, NapObservation, max_concurrent_envs=sessions + 10)


async def measure(sessions: int, seconds: float, rounds: int, ours: str, data_dir: Path) -> dict[str, Any]:
    """Run the rounds, stock first, then ours first, and so on."""
    found: dict[str, list[dict[str, float]]] = {"stock": [], ours: []}
    target = "blocking:FreeNapEnvironment" if ours == "errata-any-thread" else "blocking:NapEnvironment"
    peers = {
        "stock": Peer.stock(Path(__file__), "--serve-stock", "--sessions", str(sessions)),
        ours: Peer.errata(target, data_dir, "--max-sessions", str(sessions + 10)),
    }
    try:
        for number in range(rounds):
            for which in found if number % 2 == 0 else reversed(found):
                found[which].append(await step_for(peers[which], sessions, seconds, {"text": "x" * 64}))
    finally:
        for peer in peers.values():
            peer.stop()
    return {
        "machine": f"{platform.machine()} {platform.release()} {os.cpu_count()} cpus",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("openenv", "uvicorn", "uvloop", "websockets")},
        "sessions": sessions,
        "step_sleeps_s": BLOCKED_S,
        "seconds_a_round": seconds,
        "journal_on": filesystem(data_dir),
        **summary(found, ours),
    }


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
        serve_stock(lambda: _stock_app(options.sessions))
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
