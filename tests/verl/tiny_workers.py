"""An agent loop worker and a batch of prompts for it, in a module that imports little: each process of Ray loads it."""

from __future__ import annotations

import asyncio
from typing import Any


class Prompts:
    """In the place of VeRL's batch of prompts.

    Args:
        **columns: Columns by name; what is no list is of all rows.
    """

    def __init__(self, **columns: Any) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns["uid"])

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]

    def chunk(self, chunks: int) -> list[Prompts]:
        """Return parts of the batch; fewer than asked for where it has fewer rows."""
        most = -(-len(self) // chunks)
        return [
            Prompts(**{name: of[n : n + most] if isinstance(of, list) else of for name, of in self._columns.items()})
            for n in range(0, len(self), most)
        ]


class TinyWorker:
    """In the place of VeRL's worker. It loses a rollout of each prompt.

    Args:
        *given: Arguments of VeRL's worker.
    """

    def __init__(self, *given: Any) -> None:
        self._given, self._sent = len(given), 0
        self._go = asyncio.Event()
        self._go.set()

    async def generate_sequences(self, batch: Any) -> None:
        self._sent += len(batch)

    async def take_lost(self) -> dict[str, dict[str, int]]:
        await self._go.wait()
        lost, self._sent = self._sent, 0
        return {"train": {"SESSION_LOST": lost}} if lost else {}

    async def be_busy(self, is_busy: bool) -> int:
        if is_busy:
            self._go.clear()
        else:
            self._go.set()
        return self._given
