"""OpenEnv's Task API over the offered tasks. Tests, set-up and solutions never leave the server through it."""

from __future__ import annotations

import asyncio
from typing import Any

from errata_protocol.errors import InvalidRequest

from .tasks import Task, offered_tasks


class UnknownSplit(InvalidRequest, IndexError):
    """No split of that name. An IndexError too, because OpenEnv's routes answer those with 400."""


class TaskApi:
    """The methods of OpenEnv's ``TaskProvider``; they work on a fresh instance, and read files only, in a thread."""

    async def list_splits(self) -> list[dict[str, str]]:
        """Return the splits: ``bundled``, and ``local`` where the operator added tasks."""
        return [{"name": name, "type": "train"} for name in (await asyncio.to_thread(offered_tasks)).splits]

    async def num_tasks(self, split: str) -> int:
        """Return the number of tasks in ``split``."""
        return len(await asyncio.to_thread(_tasks, split))

    async def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the public part of every task in ``split``."""
        return await self.get_task_range(split)

    async def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the public part of one task.

        Raises:
            IndexError: The split has no such task.
        """
        tasks = await asyncio.to_thread(_tasks, split)
        if not 0 <= index < len(tasks):
            raise IndexError(f"split {split} has tasks 0..{len(tasks) - 1}, not {index}")
        return tasks[index].public(index)

    async def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the public part of the tasks that the slice ``start:stop`` names."""
        return await asyncio.to_thread(_range, split, start, stop)


def _range(split: str, start: int | None, stop: int | None) -> list[dict[str, Any]]:
    tasks = _tasks(split)
    return [tasks[index].public(index) for index in range(*slice(start, stop).indices(len(tasks)))]


def _tasks(split: str) -> tuple[Task, ...]:
    splits = offered_tasks().splits
    if split not in splits:
        raise UnknownSplit(f"no split {split!r}: there are {', '.join(splits)}", known=list(splits))
    return splits[split]
