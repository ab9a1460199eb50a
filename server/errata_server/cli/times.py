"""Times as commands take them."""

from __future__ import annotations

import re
import time
from datetime import datetime

import typer

from errata_protocol.episode_lists import MAX_BUCKET_S


def when(text: str) -> float:
    """Parse a time, absolute or relative to now, to seconds since 1970."""
    ago = re.fullmatch(r"(\d+)\s*([mhd])", text.strip())
    if ago is not None:
        return time.time() - int(ago[1]) * {"m": 60, "h": 3600, "d": 86_400}[ago[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a time, such as 2026-05-01, 2026-05-01T12:00, 12h or 7d") from error


def span(text: str) -> int:
    """Parse a length of time to whole seconds, as buckets of aggregates have."""
    found = re.fullmatch(r"(\d{1,9})\s*([smhd]?)", text.strip())
    seconds = int(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]] if found is not None else 0
    if not 1 <= seconds <= MAX_BUCKET_S:
        raise typer.BadParameter(f"{text!r} is not a length of time from 1s to 366d, such as 90s, 12h or 7d")
    return seconds
