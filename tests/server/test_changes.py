"""`Changes`: each reader learns of each change, or that it has to list again, whatever the others do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from errata_protocol.errors import Overloaded
from errata_protocol.replay import EpisodeEvent, LateValue
from errata_server.ids import name_of
from errata_server.journal import MemoryJournal, SessionChange
from errata_server.journal.base import Record
from errata_server.runtime import changes as module
from errata_server.runtime.attached import Attached
from errata_server.runtime.changes import MAX_KIND, MAX_LATE, Changes, Reader

from .journal_rows import delivery, episode, reward, session


class World:
    """Changes and a journal that has what is noted."""

    def __init__(self) -> None:
        self.changes = Changes(lambda: 7)
        self.journal = MemoryJournal()

    def commit(self, *records: Record) -> None:
        self.journal.submit(records, lambda _, error: None if error is None else pytest.fail(str(error)))
        self.changes.note(records)

    def reader(self, cursor: str | None = None, **more: object) -> tuple[Reader, str | None]:
        given = {"principal": None, "environment": None, "episode": None, "wake": lambda: None, **more}
        reader = Reader(**given)  # type: ignore[arg-type]
        return reader, self.changes.open(reader, cursor)

    def take(self, reader: Reader) -> list[EpisodeEvent]:
        """Return all that a reader has not read."""
        found: list[EpisodeEvent] = []
        while True:
            events, unknown, why = self.changes.take(reader)
            assert why is None
            self.changes.look_up(self.journal, unknown)
            found += [EpisodeEvent.model_validate(event) for _, event in events]
            if reader.waits:
                return found


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.journal.close()


def test_what_happened_since_a_reader_read_is_one_event_for_an_episode(world: World) -> None:
    reader, why = world.reader()
    assert why == "start" and world.take(reader) == []
    world.commit(session(), episode("e1"), delivery("e1", 0, id=1, reward=None))
    (event,) = world.take(reader)
    assert event == EpisodeEvent(
        eid="e1", session=name_of("s"), environment="e", what=["created", "delivered"], t=0, done=False, late_rewards=[]
    )  # fmt: skip
    assert world.take(reader) == []
    for t in range(1, 9):
        world.commit(delivery("e1", t, id=t + 1, error_kind="k" * 500 if t == 3 else None, done=t == 8, reward=t / 4))
    (event,) = world.take(reader)
    assert event.what == ["delivered", "marked", "ended"] and (event.t, event.reward, event.done) == (8, 2.0, True)
    assert (event.error_kind, event.error_t) == ("k" * MAX_KIND, 3)
    world.commit(reward("e1", 3, value=0.5))
    world.commit(reward("e1", 4, value=0.75, reward_id="b", seq=2))
    (event,) = world.take(reader)
    assert (event.what, event.late_t, event.late_reward) == (["rewarded"], 4, 0.75)
    assert event.late_rewards == [LateValue(t=3, value=0.5), LateValue(t=4, value=0.75)]
    assert (event.t, event.error_kind, event.error_t, event.done) == (8, None, None, True)
    world.commit(SessionChange("s", given_out=True))
    assert world.take(reader) == []
    world.commit(SessionChange("s", status="lost", lost="why"))
    (event,) = world.take(reader)
    assert (event.eid, event.session, event.what, event.status) == ("e1", name_of("s"), ["session"], "lost")
    assert event.t is event.done is None  # that is not of this message
    row = world.journal.episode("e1")
    assert row is not None and world.journal.delete_episode("e1") == 9
    world.changes.deleted(row)
    assert [event.what for event in world.take(reader)] == [["deleted"]]


def test_a_connection_that_is_lost_and_comes_back_is_a_change_of_the_sessions_status(world: World) -> None:
    attached = Attached(world.changes)
    assert attached.now() is None, "nobody serves the sessions"
    attached.known = True
    reader, _ = world.reader()
    world.commit(session(), episode("e1"))
    attached.add("s", tell=False)
    assert attached.now() == {"s"} and attached.now() is attached.now()
    world.take(reader)
    told = []
    for change in (attached.discard, attached.discard, attached.add, attached.add):
        change("s", tell=True)
        told += [(event.eid, event.what, event.status) for event in world.take(reader)]
    assert told == [("e1", ["session"], "detached"), ("e1", ["session"], "open")]
    attached.discard("s", tell=True)
    attached.add("s", tell=True)
    assert [event.status for event in world.take(reader)] == ["open"]
    attached.discard("s", tell=False)
    assert world.take(reader) == [] and attached.now() == set()


def test_replies_that_deliver_nothing_are_no_event(world: World) -> None:
    reader, _ = world.reader()
    world.commit(session(), episode("e1"), delivery("e1", 0, id=1))
    world.take(reader)
    world.commit(delivery("e1", None, id=2, status="EXECUTION_ERROR"))
    world.commit(delivery("", None, id=3))
    assert world.take(reader) == []


def test_whose_an_episode_of_before_is_is_looked_up(world: World) -> None:
    world.commit(session(), session("s2", principal="bob"))
    world.commit(episode("e1"), episode("e2", "s2", principal="bob", environment="other"))
    readers = [world.reader(principal=owner)[0] for owner in (None, "bob")]
    world.commit(delivery("e1", 0, id=1))
    world.commit(delivery("e2", 0, sid="s2", id=1))
    world.commit(SessionChange("s2", status="closed"))
    nobodys, bobs = map(world.take, readers)
    assert [(event.eid, event.environment) for event in nobodys] == [("e1", "e")]
    assert [(event.eid, event.environment) for event in bobs] == [("e2", "other"), ("e2", "e")]
    world.changes.note([delivery("gone", 0), SessionChange("gone", status="closed")])
    assert [world.take(reader) for reader in readers] == [[], []]


def test_readers_of_an_environment_and_of_an_episode_see_no_other(world: World) -> None:
    world.commit(session(), session("s2"), episode("e1"), episode("e2", "s2", environment="other"))
    one, _ = world.reader(episode=world.journal.episode("e1"))
    other, _ = world.reader(environment="other")
    for t in range(3):
        world.commit(delivery("e1", t, id=t + 1))
        world.commit(delivery("e2", t, sid="s2", id=t + 1))
    world.commit(SessionChange("s", status="closed"))
    assert [(event.eid, event.what) for event in world.take(one)] == [("e1", ["delivered"]), ("e1", ["session"])]
    assert [event.eid for event in world.take(other)] == ["e2"]
    world.commit(delivery("e1", 3, id=9))
    assert [event.t for event in world.take(one)] == [3] and world.take(other) == []


def test_a_cursor_goes_on_behind_what_was_read_and_no_other_reader_can_use_it(world: World) -> None:
    reader, _ = world.reader()
    world.commit(session(), *(episode(f"e{n}") for n in range(5)))
    events, _, _ = world.changes.take(reader)
    cursors = [cursor for cursor, _ in events]
    assert len(set(cursors)) == 5
    again, why = world.reader(cursors[1])
    assert why is None and [event.eid for event in world.take(again)] == ["e2", "e3", "e4"]
    for cursor, more in (
        (cursors[1], {"principal": "bob"}), (cursors[1], {"environment": "e"}),
        (cursors[1], {"episode": episode("e1")}), ("00000009" + cursors[1][8:], {}), ("", {}), ("x", {}),
        ("-", {}), (cursors[1] + "x", {}), (cursors[1] + "\u0661", {}), (cursors[1] + "9" * 20, {}),
    ):  # fmt: skip
        assert world.reader(cursor, **more)[1] == "restart", cursor
    assert world.reader(cursors[1] + "0")[1] == "behind"  # of what has not happened


def test_nothing_is_kept_without_readers_and_a_cursor_of_before_lists(world: World) -> None:
    assert not world.changes.active
    world.commit(session(), episode("e1"))
    reader, _ = world.reader()
    assert world.changes.active and world.take(reader) == []
    cursor = world.changes.cursor(reader)
    world.changes.begin()  # the journal is opened again
    assert not world.changes.active
    world.commit(delivery("e1", 0, id=1))
    assert world.take(reader) == []  # of before, too
    assert world.reader(cursor)[1] in ("restart", "behind")
    assert world.changes.take(reader)[2] == "behind"


def test_places_are_bounded_for_all_and_for_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READERS", 3)
    monkeypatch.setattr(module, "MAX_READERS_OF_ONE", 2)
    for principal in (None, None, "bob"):
        world.reader(principal=principal)
    with pytest.raises(Overloaded, match="3 streams of events are open, 1 of them yours"):
        world.reader(principal="bob")
    with pytest.raises(Overloaded, match="2 of them yours"):
        world.reader()
    assert world.changes.readers == 3


@dataclass
class Followed:
    """A reader of the test, what it saw last of each episode, and what it would have to see."""

    reader: Reader
    seen: dict[str, int] = field(default_factory=dict)
    marked: set[tuple[str, int]] = field(default_factory=set)
    lists: int = 0


@pytest.mark.parametrize("seed", range(20))
def test_every_reader_learns_the_newest_of_each_episode_or_has_to_list(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of different haste and different filters, in a ring that is too small for the slowest."""
    chance = random.Random(seed)
    for name, value in (("RING", chance.choice((16, 64, 4096))), ("MAX_EVENTS", 5), ("MAX_WALK", 12)):
        monkeypatch.setattr(module, name, value)
    world = World()
    eids = [f"e{n}" for n in range(30)]
    world.commit(session(), *(episode(eid, environment="ab"[n % 2]) for n, eid in enumerate(eids)))
    at = dict.fromkeys(eids, -1)
    id = 0

    def follow(cursor: str | None = None, **more: object) -> Followed:
        return Followed(world.reader(cursor, **more)[0], dict(at))

    def read(one: Followed) -> bool:
        events, unknown, why = world.changes.take(one.reader)
        world.changes.look_up(world.journal, unknown)
        if why is not None:
            one.lists += 1
            one.seen = dict(at)  # as it lists now
        for _, event in events:
            assert event["t"] > one.seen[event["eid"]], "nothing new was told"
            one.seen[event["eid"]] = event["t"]
        return not one.reader.waits

    filters: list[dict[str, object]] = [{}, {}, {"environment": "a"}, {"episode": world.journal.episode("e3")}]
    followers = [follow(**more) for more in filters]
    haste = [chance.choice((0.05, 0.3, 0.9)) for _ in followers]
    for _ in range(1500):
        for eid in chance.sample(eids, chance.choice((1, 1, 5))):
            at[eid] += 1
            id += 1
            world.commit(delivery(eid, at[eid], id=id))
        for n, one in enumerate(followers):
            if chance.random() < haste[n]:
                read(one)
            elif chance.random() < 0.01:  # its connection is lost, and it comes back with its cursor
                back, why = world.reader(world.changes.cursor(one.reader), **filters[n])
                world.changes.close(one.reader)
                one.reader = back
                if why is not None:
                    one.lists += 1
                    one.seen = dict(at)
    for n, one in enumerate(followers):
        while read(one):
            pass
        for eid in eids:
            followed = (n < 2) or (n == 2 and int(eid[1:]) % 2 == 0) or (n == 3 and eid == "e3")
            assert not followed or one.seen[eid] == at[eid], (n, eid)
    world.journal.close()


def test_what_is_kept_does_not_grow_with_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RING", 64)
    world = World()
    reader, _ = world.reader()
    world.commit(session(), *(episode(f"e{n}") for n in range(1000)))
    assert len(world.changes._changes) == 64
    assert world.changes.take(reader)[2] == "behind"
    assert world.take(reader) == []
    for _ in range(1000):
        world.changes.note([delivery("e1", 0)])
    assert [event.eid for event in world.take(reader)] == ["e1"]
    assert len(world.changes._changes) <= 64


def test_each_late_reward_is_in_one_event_of_each_reader(world: World) -> None:
    often, _ = world.reader()
    seldom, _ = world.reader()
    world.commit(session(), episode("e1"), *(delivery("e1", t, id=t + 1) for t in range(9)))
    for reader in (often, seldom):
        (event,) = world.take(reader)
        assert event.late_rewards == []
    seen: list[list[LateValue] | None] = []
    for first in (0, 3, 6):
        world.commit(
            *(reward("e1", t, value=t / 2, reward_id=f"r{t}", seq=t + 1) for t in (first, first + 1)),
            reward("e1", first, value=-1.0, reward_id=f"again {first}", seq=first + 3),
        )
        (event,) = world.take(often)
        seen.append(event.late_rewards)
        assert (event.late_t, event.late_reward) == (first, -1.0)
    expected = [
        [LateValue(t=t, value=value) for t, value in ((n, n / 2), (n + 1, (n + 1) / 2), (n, -1))] for n in (0, 3, 6)
    ]
    assert seen == expected
    (event,) = world.take(seldom)
    assert event.late_rewards == [one for rewards in expected for one in rewards]


def test_more_late_rewards_than_an_event_has_are_told_as_such(world: World) -> None:
    often, _ = world.reader()
    seldom, _ = world.reader()
    world.commit(session(), episode("e1"), delivery("e1", 0, id=1))
    for reader in (often, seldom):
        world.take(reader)
    world.commit(*(reward("e1", 0, value=float(n), reward_id=f"r{n}", seq=n + 1) for n in range(MAX_LATE)))
    (event,) = world.take(often)
    assert event.late_rewards is not None and len(event.late_rewards) == MAX_LATE
    world.commit(reward("e1", 0, value=0.25, reward_id="one more", seq=MAX_LATE + 1))
    (event,) = world.take(often)
    assert event.late_rewards == [LateValue(t=0, value=0.25)], "it has read the others"
    (event,) = world.take(seldom)
    assert event.late_rewards is None and event.what == ["rewarded"] and event.late_reward == 0.25
