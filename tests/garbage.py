"""Keeps the garbage collector from running for a while, in any number of threads at once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holders = 0
_enabled = True


@contextmanager
def no_collections() -> Iterator[None]:
    """Let no collection begin by itself until the last of those that asked for it has ended."""
    global _holders, _enabled
    with _lock:
        if not _holders:
            _enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if not _holders and _enabled:
                gc.enable()
