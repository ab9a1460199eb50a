"""A hard limit on money and tokens.

Before a call is made, it reserves the most that it can cost; afterwards the reservation is settled with the actual
cost. So the limit is never exceeded, unless an endpoint charges more than its prices. A call that may have cost
something but does not report its cost is settled with the whole reservation.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from .. import launch
from .teacher import BudgetSpent, Spend

log = logging.getLogger("errata.trainer")

_ROUNDING_USD = 1e-9


class Budget:
    """Limits of money and tokens, shared by any number of pools and threads.

    The limits are those of the whole run. Where several processes train together, each has an equal part of them.

    Args:
        usd: Limit in US dollars; None for no limit.
        tokens: Limit of prompt and answer tokens together; None for no limit.
        spent: Amount that this process spent before, e.g. in a run that this one continues; None for nothing.
        processes: Number of processes that the limits are divided among; None reads ``WORLD_SIZE``, as `torchrun` and
            `accelerate launch` set it, or takes 1.

    Attributes:
        usd: Limit of this process in US dollars; None for no limit.
        tokens: Limit of this process in tokens; None for no limit.

    Raises:
        ValueError: A limit is negative, or there is no process.
    """

    def __init__(
        self,
        *,
        usd: float | None = None,
        tokens: int | None = None,
        spent: Spend | None = None,
        processes: int | None = None,
    ) -> None:
        if (usd is not None and not usd >= 0) or (tokens is not None and tokens < 0):
            raise ValueError(f"a budget of {usd} USD and {tokens} tokens: no limit may be negative")
        parts = launch.processes() if processes is None else processes
        if parts < 1:
            raise ValueError(f"a budget among {parts} processes: at least 1")
        self.usd = None if usd is None else usd / parts
        self.tokens = None if tokens is None else tokens // parts
        self._spent = spent or Spend()
        self._reserved = Spend()
        self._lock = threading.Lock()
        self._files: list[Path] = []
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def spent(self) -> Spend:
        """The cost of settled calls."""
        return self._spent

    @property
    def reserved(self) -> Spend:
        """The most that calls in flight can cost."""
        return self._reserved

    async def reserve(self, bound: Spend) -> Reservation:
        """Reserve ``bound``, waiting for calls in flight if it may fit after they are settled.

        Args:
            bound: The most that one call can cost.

        Raises:
            BudgetSpent: It does not fit, whatever the calls in flight will have cost.
        """
        while True:
            with self._lock:
                if self._fits(self._spent, bound, self._reserved):
                    self._reserved = _sum(self._reserved, bound)
                    return Reservation(self, bound)
                if not self._fits(self._spent, bound, Spend()):
                    raise BudgetSpent(
                        f"a call of up to {bound.usd:.4f} USD and {bound.tokens} tokens does not fit: "
                        f"{self._spent.usd:.4f} of {self.usd} USD and {self._spent.tokens} of {self.tokens} tokens "
                        "are spent"
                    )
                loop = asyncio.get_running_loop()
                settled = loop.create_future()
                self._waiting.append((loop, settled))
            try:
                await settled
            finally:
                with self._lock:
                    self._waiting = [entry for entry in self._waiting if entry[1] is not settled]

    def resume(self, spent: Spend) -> None:
        """Count at least this much as spent, e.g. what a resumed run had spent at its checkpoint."""
        with self._lock:
            self._spent = Spend(max(self._spent.usd, spent.usd), max(self._spent.tokens, spent.tokens))

    def keep_in(self, path: Path) -> None:
        """Write what is spent to a file after each call, so that `resume_from` counts it after the process was killed.

        Args:
            path: JSON file; it is replaced as a whole.
        """
        with self._lock:
            if path not in self._files:
                self._files.append(path)

    def resume_from(self, path: Path) -> None:
        """Count at least as much as spent as a file of `keep_in` says; without the file do nothing.

        Raises:
            ValueError: The file cannot be read.
        """
        if path.is_file():
            try:
                self.resume(Spend(**json.loads(path.read_text())))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path} does not say what was spent: {error}; remove it to count from 0") from error

    def settle(self, bound: Spend, spent: Spend) -> None:
        """Release a reservation and count what was spent; see `Reservation`."""
        with self._lock:
            self._reserved = Spend(
                max(0.0, self._reserved.usd - bound.usd), max(0, self._reserved.tokens - bound.tokens)
            )
            self._spent = _sum(self._spent, spent)
            for path in self._files:
                _replace(path, json.dumps(asdict(self._spent)))
            waiting, self._waiting = self._waiting, []
        for loop, settled in waiting:
            try:
                loop.call_soon_threadsafe(_wake, settled)
            except RuntimeError:  # that loop is closed, so no call waits there
                pass

    def _fits(self, spent: Spend, bound: Spend, reserved: Spend) -> bool:
        if self.usd is not None and spent.usd + reserved.usd + bound.usd > self.usd + _ROUNDING_USD:
            return False
        return self.tokens is None or spent.tokens + reserved.tokens + bound.tokens <= self.tokens


class Reservation:
    """A reserved part of a budget for one call; a context manager that settles it.

    If `cost` was not called, the whole reservation counts as spent.
    """

    def __init__(self, budget: Budget, bound: Spend) -> None:
        self._budget = budget
        self.bound = bound
        self._cost: Spend | None = None

    def cost(self, spent: Spend) -> None:
        """Set the actual cost of the call."""
        self._cost = spent

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.settle(self.bound, self.bound if self._cost is None else self._cost)


def _replace(path: Path, text: str) -> None:
    """Replace a file. A disk that is full does not end the run: the checkpoint has what was spent until then."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        log.warning("what teachers cost is not kept: %s", error)


def _sum(one: Spend, other: Spend) -> Spend:
    return Spend(one.usd + other.usd, one.tokens + other.tokens)


def _wake(settled: asyncio.Future[None]) -> None:
    if not settled.done():
        settled.set_result(None)
