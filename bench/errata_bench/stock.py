"""A stock OpenEnv server in a process of its own: ``python -m errata_bench.stock KIND --sessions N [--deflate]``.

It prints its address. OpenEnv's own ``create_app`` under uvicorn, with uvloop as Errata has it; OpenEnv's default is
the slower asyncio loop. Without ``--deflate`` sockets are not compressed, which is the better case for stock.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

import uvicorn
import uvloop

from .environments import KINDS, EchoAction, EchoObservation


def application(kind: str, sessions: int) -> Any:
    """Return OpenEnv's application of one of our environments.

    Raises:
        RuntimeError: Code of Errata's server was imported, so this would not be stock.
    """
    from openenv.core.env_server.http_server import create_app

    app = create_app(KINDS[kind], EchoAction, EchoObservation, max_concurrent_envs=sessions)
    ours = sorted(name for name in sys.modules if name.startswith(("errata_server", "errata_client")))
    if ours:
        raise RuntimeError(f"the stock server has imported {', '.join(ours)}")
    return app


async def _serve(config: uvicorn.Config) -> None:
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn tells no other way
        await asyncio.sleep(0.01)
    if server.started:
        print(f"serving at 127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
    await serving


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--sessions", type=int, required=True)
    parser.add_argument("--deflate", action="store_true", help="compress, as uvicorn does unless told otherwise")
    options = parser.parse_args()
    config = uvicorn.Config(
        application(options.kind, options.sessions),
        host="127.0.0.1",
        port=0,
        loop="uvloop",
        ws="websockets-sansio",
        ws_per_message_deflate=options.deflate,
        access_log=False,
        log_level="error",
        backlog=4096,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))


if __name__ == "__main__":
    main()
