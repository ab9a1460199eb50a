"""Who comes to the simulated server beside its sockets: judges that post rewards, readers, and those who delete."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from errata_protocol.errors import ErrataError, JournalUnavailable, UnknownEpisode
from errata_server.episodes import retention

if TYPE_CHECKING:
    from .server import Server
    from .world import World


class Visitors:
    """What the HTTP doors do, at random.

    Args:
        world: What they live in.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Somebody has no answer yet."""
        return bool(self._under_way)

    def forget(self) -> None:
        """Take that their server is gone, and their loop with it."""
        self._under_way.clear()

    def _come(self, server: Server, visit: Coroutine[Any, Any, None]) -> None:
        task = server.loop.create_task(visit)
        self._under_way.add(task)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    def post_reward(self, server: Server, eid: str, t: int, principal: str) -> None:
        """Let somebody credit a delivery."""
        reward_id = f"r{self._world.chance.getrandbits(32)}"
        value = self._world.chance.choice([0.0, 0.5, 1.0])
        self._come(server, self._post(server, (eid, t, value), reward_id, principal))

    async def _post(self, server: Server, reward: tuple[str, int, float], reward_id: str, principal: str) -> None:
        world, (eid, t, value) = self._world, reward
        try:
            await server.runtime.rewards.post(eid, t, value, "judge", reward_id, principal)
        except ErrataError as error:
            world.machine.note(f"reward {reward_id} refused: {error.code}")
            if not (isinstance(error, UnknownEpisode) and eid in world.ledger.deleting):
                assert error.code == "JOURNAL_UNAVAILABLE", error
        else:
            world.machine.note(f"reward {reward_id} of t={t}")
            world.ledger.rewards[reward_id] = (eid, t, value)

    def delete(self, server: Server, eids: Sequence[str], principal: str) -> None:
        """Let a principal delete episodes, its own or not, one or many."""
        self._world.machine.note(f"{principal} deletes {', '.join(eids)}")
        self._come(server, self._delete(server, eids, principal))

    async def _delete(self, server: Server, eids: Sequence[str], principal: str) -> None:
        world, ledger = self._world, self._world.ledger
        mine = [eid for eid in eids if ledger.sessions[ledger.session_of[eid]].principal == principal]
        ledger.will_delete(mine, by_hand=True)
        try:
            if len(eids) == 1:
                await server.episodes.deletion.delete(eids[0], principal)
                deleted, unknown = list(eids), list[str]()
            else:
                told = await server.episodes.deletion.delete_all(eids, principal)
                deleted, unknown = list(told.deleted), told.unknown
                world.deleted_together += len(deleted)
        except UnknownEpisode:
            deleted, unknown = [], list(eids)
        except JournalUnavailable as error:
            world.machine.note(f"deletion refused: {error.message}")
            return
        world.machine.note(f"deleted {', '.join(deleted)}")
        there = [eid for eid in unknown if eid in mine and ledger.deleting[eid] == 1]
        assert not there, f"{principal} cannot delete {there}"
        foreign = set(deleted).difference(mine)
        assert not foreign, f"{principal} deleted {foreign} of others"
        self._gone(server, deleted)

    def retain(self, server: Server) -> None:
        """Let the server delete what is kept no longer."""
        chance = self._world.chance
        days, size = chance.choice([(0.0, None), (None, 0), (None, 2000), (None, 10_000)])
        self._come(server, self._retain(server, days, size))

    async def _retain(self, server: Server, days: float | None, size: int | None) -> None:
        world, runtime = self._world, server.runtime
        try:
            chosen = await retention.plan(runtime.store, now=runtime.clock.time(), keep_days=days, max_bytes=size)
            eids = [held.row.eid for held in chosen.delete]
            world.machine.note(f"retention deletes {', '.join(eids)}")
            for held in chosen.delete:
                world.ledger.session_of.setdefault(held.row.eid, held.row.sid.removeprefix("mux."))
            world.ledger.will_delete(eids, by_hand=False)
            await retention.apply(runtime.store, runtime.collect, chosen.delete)
        except JournalUnavailable as error:
            world.machine.note(f"retention refused: {error.message}")
            return
        gone = [eid for eid in eids if await runtime.store.episode(eid) is None]
        world.retained += len(gone)
        self._gone(server, gone)

    def _gone(self, server: Server, eids: Sequence[str]) -> None:
        """What was deleted is gone for good, and no session goes on from it."""
        ledger = self._world.ledger
        ledger.deleted.update(eids)
        for session in server.sessions.table.live.values():
            if session.eid not in eids or session.closed or session.lost is not None:
                continue
            # A request that began another episode may be committed, and its session not know it yet.
            last = server.runtime.store.journal.last_delivery(session.sid) if session.lock.busy else None
            goes_on = last is not None and last.eid not in eids
            assert goes_on, f"{session.sid[:10]} stands on {session.eid}, which was deleted"

    def read(self, server: Server, eid: str, principal: str) -> None:
        """Let somebody read an episode, delivery by delivery."""
        self._come(server, self._read(server, eid, principal))

    async def _read(self, server: Server, eid: str, principal: str) -> None:
        world, ledger = self._world, self._world.ledger
        deleted = eid in ledger.deleted
        heard = dict(ledger.sessions[ledger.session_of[eid]].deliveries_of(eid))
        found: dict[int, bytes] = {}
        try:
            for turn in (await server.episodes.reads.detail(eid, principal)).turns:
                found[turn.t] = (await server.episodes.reads.delivered(eid, turn.t, principal)).payload
        except UnknownEpisode:
            assert eid in ledger.deleting, f"{eid} is unknown, and nobody deleted it"
            return
        except JournalUnavailable as error:
            assert "shutting down" in error.message, error  # nothing but its end keeps a journal from being read
            return
        assert not deleted, f"{eid} was deleted and is read"
        world.machine.note(f"{principal} has read {eid}")
        for t, payload in heard.items():
            if t not in found and eid in ledger.deleting:
                continue  # it went while it was read
            assert found.get(t) == payload, f"t={t} of {eid} is read as {found.get(t)!r}, was {payload!r}"
        world.histories += 1
