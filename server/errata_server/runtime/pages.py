"""`Pages`: the sessions of OpenEnv's web interface in this process, one for each environment that has pages."""

from __future__ import annotations

from typing import Protocol


class PageSession(Protocol):
    """The pages of one environment and their session."""

    @property
    def is_used(self) -> bool:
        """Whether a session is open, or a page is connected."""

    async def leave(self) -> None:
        """Close the session, after what runs on it, and the connections of pages: both are another process's now."""


class Pages:
    """See the module."""

    def __init__(self) -> None:
        self._sessions: list[PageSession] = []

    def add(self, session: PageSession) -> None:
        """Add the pages of an environment."""
        self._sessions.append(session)

    @property
    def are_used(self) -> bool:
        """Whether one of the sessions is open, or a page is connected."""
        return any(session.is_used for session in self._sessions)

    async def leave(self) -> None:
        """Close all sessions, and the connections of pages."""
        for session in self._sessions:
            await session.leave()
