"""The local service of `examples/tinker_service.py` with faults."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fastapi import Request, Response

from .example_modules import example

TinkerService: Any = example("tinker_service").TinkerService


@dataclass
class Faults:
    """What is wrong with a service.

    Attributes:
        hanging: Requests that are never answered, by the last part of their path.
        refused: Status of requests that are refused, by the last part of their path.
        moved: Places by which log-probabilities of prompts stand too early.
        lists_moved: Places by which likeliest tokens stand too early.
        has_first: Whether they have an entry for a prompt's first token; SkyRL's have none.
        has_top_k: Whether it returns likeliest tokens.
        has_lists: Whether it trains on several targets at a position.
    """

    hanging: set[str] = field(default_factory=set)
    refused: dict[str, int] = field(default_factory=dict)
    moved: int = 0
    lists_moved: int = 0
    has_first: bool = True
    has_top_k: bool = True
    has_lists: bool = True


class SpoiledService(TinkerService):
    """The service, whose ``faults`` may be changed at any time."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.faults = Faults()

    async def passed(self, name: str, request: Request, call_next: Any) -> Any:
        self.calls[name] += 1
        if name in self.faults.hanging:
            await asyncio.Event().wait()
        if name in self.faults.refused:
            return Response('{"detail": "refused by the test"}', self.faults.refused[name])
        return await call_next(request)

    def scored(self, tokens: Sequence[int], logprobs: list[float]) -> list[float]:
        moved = logprobs[self.faults.moved :] + logprobs[: self.faults.moved]
        return moved[0 if self.faults.has_first else 1 :]

    def listed(self, k: int) -> int:
        return k if self.faults.has_top_k else 0

    def moved_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.roll(-self.faults.lists_moved, 0)

    def refused(self, targets: torch.Tensor) -> str | None:
        return None if targets.ndim == 1 or self.faults.has_lists else "target_tokens has to be of rank 1"
