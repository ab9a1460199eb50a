"""Late rewards: posted over HTTP, or computed by the environment at the end of its episode (PROTOCOL D8, F4).

Pushes to a multiplexed session are numbered from 1 without a gap. They come from the environment when its episode is
done, and from anybody over HTTP. So `Rewards` gives out the numbers for all doors of a data directory, one session at a
time. The next number is read from the journal, so that a restart does not repeat one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic_core import to_json

from errata_protocol.errors import Conflict, InvalidRequest, UnknownEpisode
from errata_protocol.replay import RewardPost, RewardRecord

from ..clock import Clock
from ..concurrency.fair_lock import FairLock
from ..journal.base import DeliveryRow, Record, RewardRow, SessionRow
from .metrics import Metrics
from .store import Store

ENVIRONMENT = "environment"
"""The source of what the environment itself computed; nobody else may post under it."""

_OWN_IDS = f"{ENVIRONMENT}:"
"""What its reward ids begin with; likewise."""

T = TypeVar("T")


def push_data(row: RewardRow) -> bytes:
    """Return the ``data`` of the ``reward`` message that carries this row."""
    return to_json(
        {"eid": row.eid, "t": row.t, "value": row.value, "source": row.source, "reward_id": row.reward_id},
        inf_nan_mode="constants",
    )


def reward_record(row: RewardRow) -> RewardRecord:
    """Return a row as ``GET /episodes/{eid}/rewards`` lists it."""
    return RewardRecord(t=row.t, value=row.value, source=row.source, reward_id=row.reward_id)


class Rewards:
    """All late rewards of one data directory.

    Args:
        store: The journal.
        clock: Source of times.
        metrics: Counts them.
    """

    def __init__(self, store: Store, clock: Clock, metrics: Metrics) -> None:
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._subscribers: list[Callable[[str, RewardRow], None]] = []
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[FairLock, int]] = {}
        self._owned: set[asyncio.Task[Any]] = set()

    def subscribe(self, committed: Callable[[str, RewardRow], None]) -> None:
        """Call ``committed(sid, row)`` after the commit of each numbered row.

        It is called on the event loop of the post, in the order of the numbers that one call here committed.
        """
        self._subscribers.append(committed)

    async def post(
        self, eid: str, t: int, value: float, source: str, reward_id: str, principal: str | None
    ) -> RewardRow:
        """Append one reward and return it as committed; see `post_all`.

        Raises:
            InvalidRequest: Its value is no finite number, or its source or id is not allowed.
        """
        try:
            post = RewardPost(t=t, value=value, source=source, reward_id=reward_id)
        except ValueError as error:
            raise InvalidRequest(f"not a reward: {error}") from error
        (row,) = await self.post_all(eid, [post], principal)
        return row

    async def post_all(self, eid: str, posts: Sequence[RewardPost], principal: str | None) -> Sequence[RewardRow]:
        """Append rewards in one transaction, and return a row for each post, as committed now or before.

        A post that was committed before is left as it is. A caller that goes away does not take the posts with it.

        Raises:
            UnknownEpisode: No such episode, or somebody else's.
            StateOutOfRange: The episode has no delivery of that t; nothing was written.
            NoReset: The same for the t=0 of an episode that began without a reset.
            Conflict: A reward_id of the episode stands for another reward; nothing was written.
            InvalidRequest: A post claims to be the environment's own.
            JournalUnavailable: Nothing can be made durable now.
        """
        for post in posts:
            if post.source == ENVIRONMENT or post.reward_id.startswith(_OWN_IDS):
                raise InvalidRequest(
                    f"the source {ENVIRONMENT!r} and reward ids that begin with {_OWN_IDS!r} are the environment's "
                    "own: name yourself as the source"
                )
        session = await self._store.owned_session(eid, principal)
        if session is None:
            raise UnknownEpisode(eid)
        await self._store.wait_until_writable()
        return await asyncio.shield(self._own(self._append(session, eid, posts)))

    async def commit(
        self, session: SessionRow, values: Mapping[int, float], delivered: DeliveryRow, before: Collection[Record] = ()
    ) -> None:
        """Commit a delivery and what the environment credits its episode with, all of it or nothing.

        Args:
            session: Whose delivery it is.
            values: Rewards of committed deliveries, and of this one, by t. One that was credited before stays as it is.
            delivered: The delivery.
            before: What is committed in front of it.

        Raises:
            Conflict, UnknownEpisode, JournalUnavailable: See `errata_server.journal.Journal.commit`.
        """
        if not values:
            await self._store.commit(*before, delivered)
            return
        eid = delivered.eid
        async with self._numbering(session):
            known = {row.reward_id for row in await self._store.rewards(eid)}
            posts = [
                RewardPost.model_construct(t=t, value=value, source=ENVIRONMENT, reward_id=f"{_OWN_IDS}{t}")
                for t, value in sorted(values.items())
                if f"{_OWN_IDS}{t}" not in known
            ]
            rows = await self._rows(session, eid, posts)
            await self._store.commit(*before, delivered, *rows)
            self._tell(session, rows)

    async def _append(self, session: SessionRow, eid: str, posts: Sequence[RewardPost]) -> Sequence[RewardRow]:
        wanted: dict[str, RewardPost] = {}
        for post in posts:
            if not _same(wanted.setdefault(post.reward_id, post), post):
                raise _other(eid, post)
        committed: dict[str, RewardRow] = {}
        async with self._numbering(session):
            while True:
                rows = await self._rows(session, eid, [p for id, p in wanted.items() if id not in committed])
                try:
                    if rows:
                        await self._store.commit(*rows)
                except Conflict:
                    found = {r.reward_id: r for r in await self._store.rewards(eid)}
                    for id in found.keys() & wanted.keys():
                        if not _same(found[id], wanted[id]):
                            raise _other(eid, wanted[id]) from None
                    earlier, committed = committed, {id: found[id] for id in found.keys() & wanted.keys()}
                    if committed.keys() == earlier.keys():
                        raise  # not for a reward_id
                except UnknownEpisode:
                    for row in rows:
                        if await self._store.delivery(eid, row.t) is None:
                            raise await self._store.delivery_error(eid, row.t) from None
                    raise
                else:
                    self._tell(session, rows)
                    committed |= {row.reward_id: row for row in rows}
                    return [committed[post.reward_id] for post in posts]

    async def _rows(self, session: SessionRow, eid: str, posts: Iterable[RewardPost]) -> Sequence[RewardRow]:
        """Return rows with the numbers that come next; the caller holds `_numbering` until they are committed."""
        seq: int | None = None
        if session.key_hash is not None:
            seq = await self._store.last_seq(session.sid)
        created = self._clock.time()
        return [
            RewardRow(
                eid,
                post.t,
                float(post.value),
                post.source,
                post.reward_id,
                session.sid,
                None if seq is None else seq + n,
                created,
            )
            for n, post in enumerate(posts, start=1)
        ]

    def _tell(self, session: SessionRow, rows: Sequence[RewardRow]) -> None:
        for row in rows:
            self._metrics.rewarded(session.environment, ENVIRONMENT if row.source == ENVIRONMENT else "posted")
            if row.seq is not None:
                for committed in self._subscribers:
                    committed(session.sid, row)

    @asynccontextmanager
    async def _numbering(self, session: SessionRow) -> AsyncIterator[None]:
        """Let one caller at a time number the pushes of a session."""
        sid = session.sid
        with self._guard:
            lock, users = self._locks.get(sid, (FairLock(), 0))
            self._locks[sid] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            with self._guard:
                lock, users = self._locks.pop(sid)
                if users > 1:
                    self._locks[sid] = (lock, users - 1)

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._owned.add(task)
        task.add_done_callback(self._owned.discard)
        return task


def _same(one: RewardPost | RewardRow, other: RewardPost) -> bool:
    return (one.t, one.value, one.source) == (other.t, other.value, other.source)


def _other(eid: str, post: RewardPost) -> Conflict:
    return Conflict(
        f"reward_id {post.reward_id!r} of episode {eid} stands for another reward: rewards are never changed, "
        "post a new one under a new reward_id",
        eid=eid,
    )
