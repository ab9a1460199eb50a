"""Serve the worlds on stock OpenEnv, whichever generation this Python has; print their URLs; end when stdin does."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from worlds import (
    CounterAction,
    CounterEnvironment,
    CounterObservation,
    EchoEnvironment,
    LedgerAction,
    LedgerEnvironment,
    LedgerObservation,
)

WORLDS: dict[str, tuple[Any, Any, Any]] = {
    "ledger": (LedgerEnvironment, LedgerAction, LedgerObservation),
    "counter": (CounterEnvironment, CounterAction, CounterObservation),
    "echo": (EchoEnvironment, CallToolAction, CallToolObservation),
}


def main() -> None:
    """Serve until the caller closes our standard input."""
    urls = {}
    for name, (environment, action, observation) in WORLDS.items():
        app = create_app(environment, action, observation, env_name=name, max_concurrent_envs=16)
        listening = socket.create_server(("127.0.0.1", 0))
        urls[name] = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    print(json.dumps(urls), flush=True)  # the sockets listen already: a client waits in their backlogs
    sys.stdin.read()
    os._exit(0)  # nothing here is worth a graceful end


if __name__ == "__main__":
    main()
