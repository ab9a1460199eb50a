"""`Waits`: says at WARNING, every 10 s, for what the callers of an event loop wait at a server.

All clients of an event loop share one object for each server, so that thousands of sessions that wait for the same
server give one line and not thousands.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from errata_protocol.exception_text import text_of

from . import background

WARN_S = 10.0
"""How long a caller waits until that is logged, and time between two lines, seconds."""
_MAX_REASON = 300

_log = logging.getLogger("errata.client")


Reason = Callable[[], BaseException | str | None]
"""Returns what is known of the reason of a wait, e.g. the last refusal; None for nothing."""


def _unknown() -> None:
    return None


@dataclass(slots=True, eq=False)
class Wait:
    """One caller that waits.

    Args:
        what: What it waits for, e.g. ``the reply to a step``.
        since: Loop time at which it began.
        most_s: Longest time that it waits, seconds; may be set later.
        why: Called for each line about it.
    """

    what: str
    since: float
    most_s: float
    why: Reason


class Waits:
    """The callers that wait at one server, on one event loop.

    Args:
        server: Address of the server, as the log has it.
        loop: The event loop.
    """

    def __init__(self, server: str, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._waits: dict[Wait, None] = {}  # oldest first
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, what: str, most_s: float = math.inf, why: Reason = _unknown) -> Wait:
        """Note that a caller waits from now on, until `end` is called with what this returns; see `Wait`."""
        wait = Wait(what, self._loop.time(), most_s, why)
        self._waits[wait] = None
        if self._timer is None:
            self._timer = self._loop.call_later(WARN_S, self._tell)
        return wait

    def end(self, wait: Wait) -> None:
        """Note that a caller waits no longer; does nothing where that is known."""
        self._waits.pop(wait, None)  # the timer stays: one every 10 s is less work than one for each request

    @contextmanager
    def on(self, what: str, most_s: float = math.inf, why: Reason = _unknown) -> Iterator[None]:
        """Note that the caller waits while the block runs; see `Wait`."""
        wait = self.begin(what, most_s, why)
        try:
            yield
        finally:
            self.end(wait)

    def text(self, now: float) -> str | None:
        """Return the line about the callers that wait at a loop time; None where none has waited for `WARN_S`."""
        oldest: dict[str, Wait] = {}
        number: dict[str, int] = {}
        first = next(iter(self._waits), None)
        if first is None or now - first.since < WARN_S - 0.001:  # a timer may fire a little early
            return None
        for wait in self._waits:
            if now - wait.since < WARN_S - 1.0:  # what began with the first one has the same reason, or is it
                break
            oldest.setdefault(wait.what, wait)
            number[wait.what] = number.get(wait.what, 0) + 1
        return f"waiting for {self._server}: " + "; ".join(
            _described(wait, number[what], now) for what, wait in oldest.items()
        )

    def _tell(self) -> None:
        self._timer = None
        if not self._waits:
            return
        now = self._loop.time()
        text = self.text(now)
        if text is not None:
            _log.warning("%s", text)
            self._timer = self._loop.call_later(WARN_S, self._tell)
        else:
            self._timer = self._loop.call_at(next(iter(self._waits)).since + WARN_S, self._tell)


def _described(wait: Wait, number: int, now: float) -> str:
    whose = wait.what if number == 1 else f"{wait.what} ({number:,} callers, this is the oldest)"
    limit = "without a limit" if math.isinf(wait.most_s) else f"{wait.most_s:g} s at most"
    why = wait.why()
    reason = "" if why is None else f", {text_of(why) if isinstance(why, BaseException) else why:.{_MAX_REASON}}"
    return f"{whose} for {now - wait.since:.0f} s now, {limit}{reason}"


_lock = threading.Lock()
_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Waits]] = WeakKeyDictionary()


def waits_at(url: str | None) -> Waits:
    """Return the `Waits` of the running event loop for a server.

    Args:
        url: A URL of the server, without what stands in its query: that may be secret. None where there is none.
    """
    parts = urlsplit(url or "")
    server = f"{parts.netloc.rpartition('@')[2]}{parts.path.removesuffix('/ws')}" or "a server"
    loop = asyncio.get_running_loop()
    with _lock:
        of_loop = _loops.setdefault(loop, {})
    found = of_loop.get(server)
    if found is None:
        found = of_loop[server] = Waits(server, loop)
    return found


@contextmanager
def blocking_wait(url: str, what: str, most_s: float) -> Iterator[None]:
    """Note that a caller without an event loop waits while the block runs, beside the waits of blocking clients.

    Args:
        url: See `waits_at`.
        what: See `Wait`.
        most_s: See `Wait`.
    """
    loop = background.loop()
    begun: list[Wait] = []
    loop.call_soon_threadsafe(lambda: begun.append(waits_at(url).begin(what, most_s)))
    try:
        yield
    finally:
        loop.call_soon_threadsafe(lambda: waits_at(url).end(begun[0]))


def _forget_loops() -> None:
    global _lock, _loops
    _lock, _loops = threading.Lock(), WeakKeyDictionary()


background.after_fork(_forget_loops)
