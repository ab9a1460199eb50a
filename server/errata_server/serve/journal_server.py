"""Serves the episodes of data directories, read-only: the routes and the viewer of a live server, also beside one.

Who can read a data directory may see the episodes of all its owners, so there are no principals here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.episode_lists import EVERY, NEWEST, EpisodeFilter, EpisodeOrder, merged, summed
from errata_protocol.errors import UnknownEpisode
from errata_protocol.replay import AgentText, EpisodeAggregates, EpisodeDetail, EpisodePage, RewardRecord, TurnPage

from ..doors import http_routes
from ..doors.auth import guard
from ..episodes.interface import Delivered
from ..episodes.reads import JournalReads
from ..journal.base import ALL_OWNERS
from ..runtime.changes import Changes
from ..runtime.runtime import Runtime
from ..settings import Settings
from .server import Bind, checked_settings, run_read_only

R = TypeVar("R")


class DirectoryReads:
    """Reads the episodes of several data directories as if they were in one.

    Args:
        runtimes: A runtime on the journal of each directory, opened for reading.
    """

    def __init__(self, runtimes: Mapping[Path, Runtime]) -> None:
        self._runtimes = list(runtimes.values())
        self._reads = [JournalReads(runtime.store) for runtime in self._runtimes]

    async def page(
        self,
        *,
        limit: int,
        cursor: str | None,
        wanted: EpisodeFilter = EVERY,
        order: EpisodeOrder = NEWEST,
        principal: str | None,
    ) -> EpisodePage:
        """Return one page of episodes."""
        pages = await asyncio.gather(
            *(
                reads.page(limit=limit, cursor=cursor, wanted=wanted, order=order, principal=ALL_OWNERS)
                for reads in self._reads
            )
        )
        return merged([lambda *_, page=page: page for page in pages], order, limit, cursor)

    async def aggregates(
        self, *, bucket_s: int, wanted: EpisodeFilter = EVERY, principal: str | None
    ) -> EpisodeAggregates:
        """Return what episodes add up to, by the time of their creation."""
        return summed(
            await asyncio.gather(
                *(reads.aggregates(bucket_s=bucket_s, wanted=wanted, principal=ALL_OWNERS) for reads in self._reads)
            )
        )

    async def detail(self, eid: str, principal: str | None) -> EpisodeDetail:
        """Return an episode and its turns."""
        return await self._of(eid, lambda reads: reads.detail(eid, ALL_OWNERS))

    async def turns(self, eid: str, *, after: int, limit: int, principal: str | None) -> TurnPage:
        """Return turns of an episode."""
        return await self._of(eid, lambda reads: reads.turns(eid, after=after, limit=limit, principal=ALL_OWNERS))

    async def action(self, eid: str, t: int, principal: str | None) -> bytes:
        """Return the whole request that delivery t answered."""
        return await self._of(eid, lambda reads: reads.action(eid, t, ALL_OWNERS))

    async def agent_text(self, eid: str, t: int, principal: str | None) -> AgentText:
        """Return what the agent read of delivery t."""
        return await self._of(eid, lambda reads: reads.agent_text(eid, t, ALL_OWNERS))

    async def rewards(self, eid: str, principal: str | None) -> Sequence[RewardRecord]:
        """Return the late rewards of an episode."""
        return await self._of(eid, lambda reads: reads.rewards(eid, ALL_OWNERS))

    async def delivered(self, eid: str, t: int, principal: str | None) -> Delivered:
        """Return the exact payload of delivery t."""
        return await self._of(eid, lambda reads: reads.delivered(eid, t, ALL_OWNERS))

    async def environments(self) -> list[str]:
        """Return the names of the environments that the newest episodes belong to."""
        page = await self.page(limit=500, cursor=None, principal=None)
        return sorted({one.environment for one in page.episodes})

    async def _of(self, eid: str, read: Callable[[JournalReads], Awaitable[R]]) -> R:
        for runtime, reads in zip(self._runtimes, self._reads, strict=True):
            if await runtime.store.read(lambda journal: journal.episode(eid)) is not None:
                return await read(reads)
        raise UnknownEpisode(eid)


def journal_app(
    runtimes: Mapping[Path, Runtime], settings: Settings, *, insecure: bool = False, changes: Changes
) -> FastAPI:
    """Create an application with the read routes of a live server, and the viewer, over data directories.

    Args:
        runtimes: As for `DirectoryReads`; they are closed when the application ends.
        settings: Tokens, hosts and origins, as of a server.
        insecure: Accept requests from other machines without a token.
        changes: Ended by the caller when the server begins to stop; nothing happens in it, also where a server writes
            to one of the directories meanwhile.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        for runtime in runtimes.values():
            await runtime.close()

    app = FastAPI(title="Errata journals", version="1.0.0", lifespan=lifespan)
    reads = DirectoryReads(runtimes)

    @app.get("/capabilities", tags=["Errata"])
    async def capabilities() -> dict[str, Any]:
        offered = {"protocol": PROTOCOL_NAME, "extensions": {"error_markers": 1, "state_at": 1}, "recovery": "none"}
        return {"environments": {name: {**offered, "environment": name} for name in await reads.environments()}}

    @app.get("/health", tags=["Health"])
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    http_routes.register_reads(app, reads, changes=changes, warned=lambda: True)
    http_routes.answer_errors(app)
    guard(app, settings, insecure=insecure)
    return app


def serve_journals(runtimes: Mapping[Path, Runtime], bind: Bind, ready: Callable[[str], None]) -> None:
    """Serve data directories until SIGTERM or SIGINT.

    Args:
        runtimes: As for `DirectoryReads`.
        bind: Address to listen on.
        ready: Called with the server's URL once it listens.

    Raises:
        InvalidRequest: Other machines could use the server without a token, or the address cannot be listened on.
    """
    settings = checked_settings(Settings(), bind)
    changes = Changes()
    app = journal_app(runtimes, settings, insecure=bind.insecure, changes=changes)
    run_read_only(app, bind, f"{', '.join(map(str, runtimes))}, read-only", changes.end, ready)
