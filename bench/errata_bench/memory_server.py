"""Errata with its journal in memory: ``python -m errata_bench.memory_server TARGET --sessions N``.

It runs what ``errata serve`` runs, without a data directory, and prints its address in the same way. The command itself
always has a data directory.
"""

from __future__ import annotations

import argparse

from errata_server.serve import server
from errata_server.settings import Settings


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--sessions", type=int, required=True)
    options = parser.parse_args()
    bind = server.Bind(port=0)
    served = server.build(
        [options.target], Settings(data_dir=None), bind=bind, mode=None, max_sessions=options.sessions
    )
    server.run(served, bind)


if __name__ == "__main__":
    main()
