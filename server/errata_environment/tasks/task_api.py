"""`TaskApi`: OpenEnv's Task API over an environment's tasks; `pick` chooses one at a reset."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

from errata_protocol.errors import InvalidRequest

TaskT = TypeVar("TaskT")


class UnknownSplit(InvalidRequest, IndexError):
    """No split of that name. An IndexError too, because OpenEnv's routes answer those with 400."""


class TaskApi(ABC, Generic[TaskT]):
    """The methods of OpenEnv's ``TaskProvider``; they work on a fresh instance, and read files only, in a thread.

    A subclass says which tasks there are. What `public_task` leaves out never leaves the server through this API.

    Attributes:
        TASKS: Word for the tasks in error messages.
    """

    TASKS: ClassVar[str] = "tasks"

    @abstractmethod
    def split_types(self) -> dict[str, str]:
        """Return the type of each split, ``train`` or ``test``, by the split's name. May read files."""

    @abstractmethod
    def tasks_of(self, split: str) -> Sequence[TaskT]:
        """Return the tasks of a split. May read files.

        Raises:
            UnknownSplit: There is no such split.
        """

    @abstractmethod
    def public_task(self, task: TaskT, index: int) -> dict[str, Any]:
        """Return what agents and trainers may know of a task.

        Args:
            task: The task.
            index: Position of the task in its split.
        """

    async def list_splits(self) -> list[dict[str, str]]:
        """Return the splits, each with its name and its type."""
        types = await asyncio.to_thread(self.split_types)
        return [{"name": name, "type": kind} for name, kind in types.items()]

    async def num_tasks(self, split: str) -> int:
        """Return the number of tasks in ``split``."""
        return len(await asyncio.to_thread(self.tasks_of, split))

    async def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the public part of every task in ``split``."""
        return await self.get_task_range(split)

    async def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the public part of one task.

        Raises:
            IndexError: The split has no such task.
        """
        tasks = await asyncio.to_thread(self.tasks_of, split)
        if not 0 <= index < len(tasks):
            raise IndexError(f"split {split} has {self.TASKS} 0..{len(tasks) - 1}, not {index}")
        return self.public_task(tasks[index], index)

    async def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the public part of the tasks that the slice ``start:stop`` names."""
        return await asyncio.to_thread(self._range, split, start, stop)

    def _range(self, split: str, start: int | None, stop: int | None) -> list[dict[str, Any]]:
        tasks = self.tasks_of(split)
        return [self.public_task(tasks[index], index) for index in range(*slice(start, stop).indices(len(tasks)))]


def pick(split: str, tasks: Sequence[TaskT], index: int | None, seed: int | None, *, word: str = "tasks") -> TaskT:
    """Return the task of a split that a reset names by position or by seed.

    Args:
        split: Name of the split.
        tasks: Tasks of the split, in order.
        index: Position in the split; None to draw a task.
        seed: Seed of the draw.
        word: Word for the tasks in the error message.

    Raises:
        InvalidRequest: The split has no task at that position.
    """
    if index is None:
        return random.Random(seed).choice(tasks)
    if not 0 <= index < len(tasks):
        raise InvalidRequest(f"split {split} has {word} 0..{len(tasks) - 1}, not {index}")
    return tasks[index]
