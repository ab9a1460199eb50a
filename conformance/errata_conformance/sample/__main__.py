"""``python -m errata_conformance.sample``: serve the tally environment, with or without a defect."""

from __future__ import annotations

import argparse

from .episodes import World
from .server import running
from .wrong import DEFECTS


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m errata_conformance.sample", description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--defect", choices=tuple(DEFECTS), help="serve the server that is wrong in this way")
    parser.add_argument("--list", action="store_true", help="list the wrong servers and what each breaks")
    asked = parser.parse_args()
    if asked.list:
        for name, defect in DEFECTS.items():
            print(f"{name:28} {defect.statement:9} {defect.text}")
        return
    options = DEFECTS[asked.defect].options if asked.defect is not None else {}
    running(World(asked.defect, **options), asked.port, asked.host).run()


if __name__ == "__main__":
    main()
