"""The terminal environment as an application of its own: ``uvicorn terminal_env.server.app:app``."""

from __future__ import annotations

from errata_environment.application import application, serve

# By full name: openenv.yaml's ``server.app:app`` is also loaded from inside the package's directory.
from terminal_env.models import TerminalState
from terminal_env.server.environment import TerminalEnvironment
from terminal_env.spec import SPEC

app = application(TerminalEnvironment, SPEC, TerminalState)


def main() -> None:
    """Serve on one port; ``errata serve terminal`` has more options."""
    serve(app, main.__doc__)


if __name__ == "__main__":
    main()
