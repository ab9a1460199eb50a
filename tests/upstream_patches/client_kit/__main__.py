"""The command. It prints a table or JSON; exit status 0: no statement is broken, 1: one is, 2: nothing was started."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shlex
import sys

from .judge import judge, verdicts
from .scenarios import STATEMENTS


def main() -> int:
    """Judge the client that the arguments name."""
    parser = argparse.ArgumentParser(prog="client_kit", description="Judge a client of the proposals A and C.")
    parser.add_argument("client", help="command of the client, such as 'node client.js'")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--jobs", type=int, default=4, help="scenarios that are played at the same time (default 4)")
    asked = parser.parse_args()
    try:
        results = asyncio.run(judge(shlex.split(asked.client), asked.jobs))
    except (OSError, ValueError) as error:
        print(f"client_kit: the client cannot be started: {error}", file=sys.stderr)
        return 2
    found = verdicts(results)
    if asked.json:
        statements = {name: {"verdict": verdict, "why": why} for name, (verdict, why) in found.items()}
        print(
            json.dumps({"statements": statements, "scenarios": [dataclasses.asdict(one) for one in results]}, indent=1)
        )
    else:
        for name, (verdict, why) in found.items():
            print(f"{name:9}  {verdict:10}  {STATEMENTS[name]}")
            for one in why:
                print(f"{'':23}  {one}")
    return int(any(verdict == "fail" for verdict, _ in found.values()))


if __name__ == "__main__":
    sys.exit(main())
