"""`Elsewhere`: what sessions of one worker read of other workers' episodes, which are kept for their forks here.

A fork whose parent is another worker's episode has a copy of the parent's delivery, and of nothing else: what leads
there is read from its worker whenever it is run again. So a parent must not be deleted as unused while it has a fork
anywhere. Its worker asks all others first, and each answers for its journal and for forks that are being made. A fork
is noted before its parent is read, and a deletion before the others are asked, so that one of the two sees the other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import msgspec

from errata_protocol.episode_lists import EpisodeFilter
from errata_protocol.errors import JournalUnavailable, Misdirected, UnknownEpisode
from errata_protocol.names import EPISODE

from ..journal.base import ALL_OWNERS, DeliveryRow, Journal, RewardRow
from ..runtime.lineage import Lineage, lineage
from ..runtime.ownership import ForkParent, find_episode, find_parent, opens
from ..runtime.store import Store
from .routes import of_id

PATH = "/fleet/elsewhere/"
"""Beginning of the paths on which workers ask each other; the question's name follows."""
FORKED = PATH + "forked"

T = TypeVar("T")

Ask = Callable[[int, str, Mapping[str, Any]], Awaitable[bytes]]
"""Sends a worker a question at a path, and returns the body of the answer."""


class Elsewhere:
    """One worker's side of it; implements `errata_server.runtime.fleet.EpisodesElsewhere`.

    Args:
        names: Returns the names of the fleet's shards, in order; "" for one whose worker has been drained.
        worker: Number of this worker.
        ask: Asks another worker; raises the error that it answers with, or JournalUnavailable.
    """

    def __init__(self, names: Callable[[], Sequence[str]], worker: int, ask: Ask) -> None:
        self._names = names
        self._worker = worker
        self._ask = ask
        self._forking: Counter[str] = Counter()
        self._deleting: Counter[str] = Counter()

    # -- what this worker asks ----------------------------------------------------------------------------------------

    def has(self, eid: str) -> bool:
        """Return whether an episode is another worker's, by its id alone."""
        return self.owner_of(eid) is not None

    def owner_of(self, eid: str) -> int | None:
        """Return the other worker that an episode belongs to; None if that is this one, or the id is no episode's."""
        owner = of_id(eid, self._names()) if EPISODE.matches(eid) else None
        return owner if owner != self._worker else None

    @asynccontextmanager
    async def parent(self, eid: str, t: int, principal: str | None, key: str | None) -> AsyncIterator[ForkParent]:
        """Return the parent of a fork, which is kept while the context is entered."""
        with _noted(self._forking, eid):
            asked = {"eid": eid, "t": t, "principal": principal, "key": key}
            yield await self._answer_of(eid, "parent", asked, ForkParent)

    async def lineage(self, eid: str, t: int, whole_session: bool) -> Lineage:
        """Return what `lineage` returns of the episode's journal."""
        return await self._answer_of(eid, "lineage", {"eid": eid, "t": t, "whole_session": whole_session}, Lineage)

    async def recorded(self, eid: str, t: int) -> list[DeliveryRow]:
        """Return a delivery, and the errors that followed it."""
        return await self._answer_of(eid, "recorded", {"eid": eid, "t": t}, list[DeliveryRow])

    async def rewards(self, eid: str, principal: str | None, key: str | None) -> list[RewardRow]:
        """Return the late rewards of an episode."""
        return await self._answer_of(eid, "rewards", {"eid": eid, "principal": principal, "key": key}, list[RewardRow])

    @asynccontextmanager
    async def deleting(self, eid: str) -> AsyncIterator[bool]:
        """Return whether an episode of this worker has a fork at another one; while entered, none can be made there."""
        with _noted(self._deleting, eid):
            others = [other for other in range(len(self._names())) if other != self._worker]
            asked = [self._decoded(other, "forked", {"eid": eid}, bool) for other in others]
            yield any(await asyncio.gather(*asked))

    async def _answer_of(self, eid: str, question: str, asked: Mapping[str, Any], answer: type[T]) -> T:
        owner = self.owner_of(eid)
        assert owner is not None, "`has` was asked"
        return await self._decoded(owner, question, asked, answer)

    async def _decoded(self, other: int, question: str, asked: Mapping[str, Any], answer: type[T]) -> T:
        found = await self._ask(other, PATH + question, asked)
        return await asyncio.to_thread(msgspec.msgpack.decode, found, type=answer)

    # -- what it answers ----------------------------------------------------------------------------------------------

    async def answer(self, store: Store, path: str, asked: Mapping[str, Any]) -> bytes:
        """Answer another worker's question, on a thread of the journal: rows may be large, and lists long.

        Args:
            store: This worker's journal.
            path: Path of the question, which begins with `PATH`.
            asked: The question.

        Raises:
            UnknownEpisode, StateOutOfRange, NoReset, Misdirected: See `errata_server.runtime.fleet.EpisodesElsewhere`.
            JournalUnavailable: The parent is being deleted, or the journal cannot be read.
        """
        read: Callable[..., Any]
        match path.removeprefix(PATH):
            case "parent":
                if asked["eid"] in self._deleting:
                    text = f"episode {asked['eid']} may be about to be deleted, so nothing was run: try again"
                    raise JournalUnavailable(text, retry_after=1.0)
                read = self._parent
            case "forked":
                if asked["eid"] in self._forking:
                    return msgspec.msgpack.encode(True)
                read = _forked
            case "lineage":
                read = lineage
            case "recorded":
                read = _recorded
            case _:
                read = _rewards
        return await store.scan(lambda journal: msgspec.msgpack.encode(read(journal, **asked)))

    def _parent(self, journal: Journal, eid: str, t: int, principal: str | None, key: str | None) -> ForkParent:
        _check(journal, eid, key)
        found = find_parent(journal, eid, t, principal)
        if found.row.refs:
            raise Misdirected(self._names()[self._worker])  # the layers of its sandbox are in this directory alone
        return found


def _recorded(journal: Journal, eid: str, t: int) -> list[DeliveryRow]:
    return journal.recorded(eid, t)


def _rewards(journal: Journal, eid: str, principal: str | None, key: str | None) -> list[RewardRow]:
    _check(journal, eid, key)
    find_episode(journal, eid, principal)
    return journal.rewards(eid)


def _forked(journal: Journal, eid: str) -> bool:
    forks, _ = journal.episodes(limit=1, wanted=EpisodeFilter(origin=eid), principal=ALL_OWNERS)
    return bool(forks)


def _check(journal: Journal, eid: str, key: str | None) -> None:
    """Refuse an episode that a read key does not open, as `errata_server.doors.readers.Reader` does."""
    if key is not None and not opens(journal, eid, key, None):
        raise UnknownEpisode(eid)


@contextmanager
def _noted(counts: Counter[str], eid: str) -> Iterator[None]:
    counts[eid] += 1
    try:
        yield
    finally:
        counts[eid] -= 1
        if not counts[eid]:
            del counts[eid]
