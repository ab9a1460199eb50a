"""`PerLoop`: one object for each event loop, created at first use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class PerLoop(dict[asyncio.AbstractEventLoop, T]):
    """Maps event loops to objects; ``per_loop[loop]`` creates a missing one. Thread-safe.

    A dict, because each step looks some up, and a successful dict lookup calls no Python function.

    Args:
        make: Creates the object of a loop.
    """

    def __init__(self, make: Callable[[asyncio.AbstractEventLoop], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, loop: asyncio.AbstractEventLoop) -> T:
        for other in [known for known in list(self) if known.is_closed()]:
            self.pop(other, None)
        return self.setdefault(loop, self._make(loop))
