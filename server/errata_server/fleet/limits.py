"""The settings of one worker: limits are those of the whole server."""

from __future__ import annotations

import os

from errata_protocol.errors import InvalidRequest

from ..settings import Settings

MAX_WORKERS = 128


def count_of(text: str) -> int:
    """Return the number of workers that ``--workers`` gives: a number, or ``auto`` for one for each core.

    Raises:
        InvalidRequest: It is neither, or too high.
    """
    if text == "auto":
        return min(len(os.sched_getaffinity(0)), MAX_WORKERS)
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= MAX_WORKERS:
        raise InvalidRequest(f"--workers takes a number from 1 to {MAX_WORKERS}, or auto, not {text[:20]!r}")
    return int(text)


def shared_settings(settings: Settings, workers: int) -> Settings:
    """Return the settings of each of several workers.

    Args:
        settings: Those of the server.
        workers: Number of workers, more than one.
    """
    retention = settings.retention_max_bytes
    return settings.model_copy(
        update={
            "max_threads": max(1, settings.max_threads // workers),
            # a message of the largest size has to fit
            "max_unfinished_bytes": max(settings.max_frame, settings.max_unfinished_bytes // workers),
            "retention_max_bytes": None if retention is None else retention // workers,
        }
    )
