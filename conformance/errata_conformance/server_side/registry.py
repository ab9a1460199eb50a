"""The list of checks, in the order in which they are reported."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .target import Target

Body = Callable[[Target], Awaitable[None]]


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        statement: The statement that it checks.
        name: What holds if it passes, in a few words.
        body: Raises `Broken` if the statement does not hold.
        alone: Whether it must run alone, because it floods or stops the server.
        profiles: For a check of the released protocol, the versions that it applies to.
    """

    statement: str
    name: str
    body: Body
    alone: bool = False
    profiles: tuple[str, ...] = ()


CHECKS: list[Check] = []
"""All checks; importing `errata_conformance.server_side.run` fills it."""


def check(statement: str, name: str, *, alone: bool = False, profiles: tuple[str, ...] = ()) -> Callable[[Body], Body]:
    """Register a check."""

    def registered(body: Body) -> Body:
        CHECKS.append(Check(statement, name, body, alone, profiles))
        return body

    return registered
