"""The terminal environment as an application of its own: ``uvicorn terminal_env.server.app:app``."""

from __future__ import annotations

import argparse

from errata_server.app import create_app

# By full name: openenv.yaml's ``server.app:app`` is also loaded from inside the package's directory.
from terminal_env.models import TerminalAction, TerminalObservation, TerminalState
from terminal_env.server.environment import TerminalEnvironment
from terminal_env.spec import SPEC

app = create_app(
    TerminalEnvironment,
    TerminalAction,
    TerminalObservation,
    env_name="terminal",
    max_concurrent_envs=1000,
    state_cls=TerminalState,
    spec=SPEC,
)


def main() -> None:
    """Serve on one port; ``errata serve terminal`` has more options."""
    import uvicorn

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    uvicorn.run(app, host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
