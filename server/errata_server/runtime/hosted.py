"""`HostedEnvironments`: the environments of one data directory, where one needs something of all."""

from __future__ import annotations

from typing import Protocol

from .capacity import Capacity


class HostedEnvironment(Protocol):
    """What one environment does for the others of its data directory."""

    async def end_session(self, sid: str) -> bool:
        """End a session; False where it belongs to another environment."""

    async def free_instance(self, capacity: Capacity) -> bool:
        """Close the instance of a detached session where that makes room in ``capacity``; False where none can be."""


class HostedEnvironments:
    """The environments that share a data directory and the limits of its principals."""

    def __init__(self) -> None:
        self._environments: list[HostedEnvironment] = []

    def add(self, environment: HostedEnvironment) -> None:
        """Add an environment of this process."""
        self._environments.append(environment)

    async def end_session(self, sid: str) -> bool:
        """End a session, whichever environment has it; False where none has."""
        for environment in self._environments:
            if await environment.end_session(sid):
                return True
        return False

    async def free_instance(self, capacity: Capacity) -> bool:
        """Close the instance of a detached session to make room in ``capacity``; False where there is none."""
        for environment in self._environments:
            if await environment.free_instance(capacity):
                return True
        return False
