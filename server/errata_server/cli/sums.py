"""Prints what episodes add up to over time: ``errata episodes --sums``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import UTC, datetime

import typer

from errata_protocol.episode_lists import DAY_S
from errata_protocol.printable import printable
from errata_protocol.replay import EpisodeAggregates

from .tables import Column, Table

MOST_KINDS = 5
"""Error kinds of a line, those with the most turns."""


def show_sums(found: EpisodeAggregates, seen: str, *, as_json: bool) -> None:
    """Print aggregates, one line for each bucket, earliest first.

    Args:
        found: The aggregates.
        seen: What was read, for the message if there is nothing.
        as_json: Print them as ``GET /episodes/aggregates`` answers them.
    """
    if as_json:
        typer.echo(json.dumps(found.model_dump(mode="json")))
        return
    table = Table(
        Column("from (UTC)", whole=True),
        Column("episodes", right=True, whole=True),
        Column("done", right=True, whole=True),
        Column("turns", right=True, whole=True),
        Column("mean reward", right=True, whole=True),
        "errors",
    )
    for bucket in found.buckets:
        start = datetime.fromtimestamp(bucket.start, UTC)
        shown = start.strftime("%Y-%m-%d" if found.bucket_s % DAY_S == 0 else "%Y-%m-%d %H:%M:%S")
        kinds = Counter(bucket.error_kinds).most_common(MOST_KINDS)
        more = len(bucket.error_kinds) - len(kinds)
        errors = " ".join([*(f"{kind}:{turns}" for kind, turns in kinds), *([f"and {more} more"] if more else [])])
        mean = f"{bucket.reward / bucket.episodes:.3g}"
        table.add(shown, str(bucket.episodes), str(bucket.done), str(bucket.deliveries), mean, errors)
    table.end()
    if not found.buckets:
        print(f"errata: no such episode in {printable(seen)}", file=sys.stderr)
