"""`SLOWDOWN`: how many times slower this machine is now than an idle one, for deadlines that pass in real time.

A deadline of the product that a test lets pass must leave the work that meets it enough time. Where virtual time is no
choice, such a deadline is a multiple of `SLOWDOWN`, and so is all that is compared with it.
"""

from __future__ import annotations

import time

_IDLE_S = 0.05
"""What `_work` takes on an idle core of a server of 2024."""
_MOST = 10.0


def _work() -> int:
    total = 0
    for n in range(1_000_000):
        total += n * n % 7
    return total


def _measured() -> float:
    began = time.monotonic()
    _work()
    return min(max(1.0, (time.monotonic() - began) / _IDLE_S), _MOST)


def slowdown_now() -> float:
    """Return how many times more CPU time a call takes now than on an idle core; at least 1."""
    began = time.thread_time()
    _work()
    return max(1.0, (time.thread_time() - began) / _IDLE_S)


SLOWDOWN = _measured()
"""At least 1. Measured once in a process, so that deadlines can be compared with each other."""
