"""The demo's command line and its tables."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from errata_environment.demos import Played
from errata_server.cli.turn_table import TurnTable

from .play import Result, play


def main(arguments: Sequence[str] = ()) -> int:
    """Run the demo; return 0 when every promise held."""
    parser = argparse.ArgumentParser(prog="errata demo terminal", description="A scripted agent in real sandboxes.")
    parser.add_argument("--data-dir", type=Path, default=Path(".errata") / "demo", help="journal and sandbox layers")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(list(arguments))
    console = Console(stderr=options.json, width=None if sys.stdout.isatty() else 160)
    started = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[{time.monotonic() - started:5.1f} s] {line}", markup=False, highlight=False)

    result = asyncio.run(play(options.data_dir.resolve(), say, lambda played: _show(console, played)))
    if options.json:
        print(result.to_json())
    else:
        _summary(console, result, options.data_dir, time.monotonic() - started)
    for failure in result.failures:
        print(f"errata demo: {failure}", file=sys.stderr)
    return 1 if result.failures else 0


def _show(console: Console, played: Played) -> None:
    title = f"{played.task_id}   {played.eid}"
    if played.forked_from is not None:
        title += f"   fork of {played.forked_from[0]} at t={played.forked_from[1]}"
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    table = TurnTable(console.file)
    for turn in played.turns:
        table.add(turn)
    table.end()
    console.print()


def _summary(console: Console, result: Result, data_dir: Path, took_s: float) -> None:
    counts = ", ".join(f"{n} {when}" for when, n in result.compared.items())
    parent = next(e for e in result.episodes for f in result.episodes if f.forked_from and f.forked_from[0] == e.eid)
    child = next(e for e in result.episodes if e.forked_from)
    lines = (
        f"{len(result.kinds)} kinds of mistakes marked: {', '.join(result.kinds)}",
        f"state(t) equal byte for byte, with its digest and what the agent read: {counts}",
        f"{parent.task_id}: reward {parent.reward:g}, and {child.reward:g} in the fork from before the mistake",
        f"all of it in {took_s:.0f} s; the journal is in {result.data_dir / 'journal'}",
        "",
        "next:",
        f"  errata episodes --data-dir {data_dir}",
        f"  errata replay {parent.eid} 2 --agent-text --data-dir {data_dir}",
        f"  errata serve terminal --data-dir {data_dir}",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
