"""A budget of the trainer, as a teacher in another process reserves parts of it.

The teacher asks over the port of its question, and the trainer's `Budget` grants. What a lost process had reserved
counts as spent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ...teachers import Budget, BudgetSpent, Reservation, Spend
from .supervision import channel


@dataclass(frozen=True, slots=True)
class Reserve:
    """A request for a part of the budget.

    Attributes:
        number: Id of the reservation, unique in one question.
        bound: The most that the call can cost.
        granted: Port that takes None, or the reason why the budget has not so much.
    """

    number: tuple[int, int]
    bound: Spend
    granted: Any


@dataclass(frozen=True, slots=True)
class Settle:
    """The cost of a reserved call.

    Attributes:
        number: Id of the reservation.
        spent: Cost of the call.
    """

    number: tuple[int, int]
    spent: Spend


class AskedBudget(Budget):
    """The budget in the teacher's process: it asks the trainer for each reservation.

    Args:
        port: Port of the question.
        attempt: Number of the attempt at the question.
        limited: Limits of the trainer's budget, for `Teacher.check`.
    """

    def __init__(self, port: Any, attempt: int, limited: Spend | None = None) -> None:
        super().__init__(processes=1)
        self._port, self._attempt, self._made = port, attempt, 0

    async def reserve(self, bound: Spend) -> Reservation:
        """Reserve ``bound`` of the trainer's budget.

        Args:
            bound: The most that one call can cost.

        Raises:
            BudgetSpent: It does not fit.
        """
        self._made += 1
        number = (self._attempt, self._made)
        port, granted = channel()
        self._port.send(Reserve(number, bound, port))
        refused = await granted.recv()
        if refused is not None:
            raise BudgetSpent(refused)
        return _Asked(self, bound, number)

    def settle_asked(self, number: tuple[int, int], spent: Spend) -> None:
        """Tell the trainer what a reserved call has cost."""
        self._port.send(Settle(number, spent))


class _Asked(Reservation):
    def __init__(self, budget: AskedBudget, bound: Spend, number: tuple[int, int]) -> None:
        super().__init__(budget, bound)
        self._asked, self._number, self._paid = budget, number, bound

    def cost(self, spent: Spend) -> None:
        self._paid = spent

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._asked.settle_asked(self._number, self._paid)


class Granted:
    """The trainer's side of one question's reservations, a context manager: those that are open at its end count as
    spent.

    Args:
        budget: Budget of the trainer.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._open: dict[tuple[int, int], Reservation] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, message: Reserve | Settle) -> None:
        """Take a request or a cost of the teacher's process; it does not wait."""
        if isinstance(message, Settle):
            with self._open.pop(message.number) as reservation:
                reservation.cost(message.spent)
            return
        task = asyncio.get_running_loop().create_task(self._grant(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _grant(self, asked: Reserve) -> None:
        try:
            self._open[asked.number] = await self._budget.reserve(asked.bound)
        except BudgetSpent as error:
            asked.granted.send(error.message)
        else:
            asked.granted.send(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for reservation in self._open.values():
            with reservation:
                pass
        self._open.clear()
