"""OpenEnv's Task API over the offered instances: ids and issues, nothing of the tests or the solutions."""

from __future__ import annotations

import asyncio
from typing import Any

from ..dataset import TEST_SPLIT, Dataset, Instance
from .offered import offered
from .settings import read_settings


class TaskApi:
    """The methods of OpenEnv's ``TaskProvider``; they work on a fresh instance, and read files only, in a thread."""

    async def list_splits(self) -> list[dict[str, str]]:
        """Return the splits; ``test`` is among them only where the operator named it."""
        splits = (await asyncio.to_thread(offered, read_settings())).splits
        return [{"name": name, "type": TEST_SPLIT if name == TEST_SPLIT else "train"} for name in splits]

    async def num_tasks(self, split: str) -> int:
        """Return the number of instances in ``split``."""
        return len(await asyncio.to_thread(_instances, split))

    async def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the public part of every instance in ``split``."""
        return await self.get_task_range(split)

    async def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the public part of one instance.

        Raises:
            IndexError: The split has no such instance.
        """
        instances = await asyncio.to_thread(_instances, split)
        if not 0 <= index < len(instances):
            raise IndexError(f"split {split} has instances 0..{len(instances) - 1}, not {index}")
        return _public(instances[index])

    async def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the public part of the instances that the slice ``start:stop`` names."""
        return await asyncio.to_thread(lambda: [_public(instance) for instance in _instances(split)[start:stop]])


def _instances(split: str) -> Dataset:
    return offered(read_settings()).split(split)[1]


def _public(instance: Instance) -> dict[str, Any]:
    return {"instance_id": instance.instance_id, "prompt": instance.problem_statement}
