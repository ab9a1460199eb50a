"""Lists of episodes: filters, orders and pages, on every store that has them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from errata_protocol.episode_lists import MAX_BUCKETS, EpisodeFilter, EpisodeOrder, ListPlace, Status
from errata_protocol.errors import InvalidRequest
from errata_protocol.labels import NO_LABELS, Labels
from errata_protocol.replay import EpisodeBucket
from errata_server.journal import (
    ALL_OWNERS,
    DeliveryRow,
    IndexedJournal,
    Journal,
    MemoryJournal,
    ReadOnlyJournal,
    SessionChange,
)
from errata_server.journal.base import label_fields
from errata_server.journal.index import INDEX
from errata_server.journal.segments import Segments

from .journal_rows import delivery, episode, session
from .test_journal import STORES

LABELS = (
    NO_LABELS, Labels(run='a"b'), Labels(group="p-1é", step=0, run='a"b'), Labels(group="p-2", step=7),
    Labels(step=2**53 - 1),
)  # fmt: skip
KINDS = ("timeout", "path_not_found", 'a"b', "x")
ALL = {**STORES, "indexed, some waits for its index": lambda d: IndexedJournal(d, batch_rows=150, background=False)}


@dataclass
class Made:
    """An episode as the test knows that it is."""

    eid: str
    environment: str
    owner: str | None
    created: float
    alias: str | None
    task: str | None
    sid: str
    last: float
    reward: float = 0.0
    deliveries: int = 0
    done: bool = False
    kinds: dict[str, int] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    labels: Labels = NO_LABELS
    origin: str | None = None


@dataclass
class World:
    """A journal, what is in it, what its sessions' statuses are, and which have a connection, if that is known."""

    journal: Journal
    made: list[Made]
    statuses: dict[str, str]
    attached: frozenset[str] | None = None

    def status(self, one: Made) -> str:
        status = self.statuses[one.sid]
        if status == "open" and self.attached is not None and one.sid not in self.attached:
            status = "detached"
        return "done" if one.done else status

    def pages(self, limit: int, wanted: EpisodeFilter, order: EpisodeOrder, owner: str | None) -> list[str]:
        """Return the eids of all pages, one after the other."""
        found: list[str] = []
        after: ListPlace | None = None
        for _ in range(len(self.made) + 2):
            page, after = self.journal.episodes(
                limit=limit, after=after, wanted=wanted, order=order, principal=owner, attached=self.attached
            )
            found += [one.eid for one in page]
            assert len(page) == limit or after is None
            if after is None:
                return found
        raise AssertionError("the list does not end")


async def fill(journal: Journal, episodes: int = 60) -> World:
    """Fill a journal with sessions of all statuses and episodes of all sorts, some of them forks, some deleted."""
    chance = random.Random(5)
    statuses, made = dict[str, str](), list[Made]()
    for n in range(20):
        sid = f"s{n}"
        await journal.commit(session(sid))
        statuses[sid] = chance.choice(("open", "open", "closed", "lost", "expired"))
    for n in range(episodes):
        sid, created = f"s{n % 20}", float(1000 + n // 2)
        task = chance.choice((None, "Sort-Numbers", "django__django-11099", "50%_\\"))
        parent = chance.choice(made) if n % 7 == 6 else None
        one = Made(
            f"ep_{chance.randrange(10**6):06}", chance.choice(("count", "shell")), chance.choice((None, "alice")),
            created, chance.choice((None, "Alias", f"alias-{n}")), task, sid, created,
        )  # fmt: skip
        row: dict[str, Any] = {"origin_eid": parent.eid, "origin_t": 0} if parent is not None else {}
        one.labels = chance.choice(LABELS)
        row |= label_fields(one.labels)
        one.origin = parent.eid if parent is not None else None
        if parent is not None and task is None:
            one.task = parent.task
        await journal.commit(
            episode(one.eid, sid, environment=one.environment, principal=one.owner, created=created,
                    episode_id=one.alias, **row)
        )  # fmt: skip
        made.append(one)
        for t in range(chance.randrange(1, 6)):
            kind = chance.choice((None, None, *KINDS))
            ends = chance.random() < 0.1
            reward, when = chance.choice((None, 0.25, 0.5, -1.0)), created + chance.randrange(5)
            key = chance.choice((None, "fs.missing", "k"))
            payload = json.dumps({"observation": {"task_id": task} if task is not None and t == 0 else {"task_id": 9}})
            if t == 0 and task is None:
                payload = '{"observation":{}}'
            await journal.commit(
                delivery(one.eid, t, sid=sid, reward=reward, done=ends, error_kind=kind, created=when,
                         payload=payload.encode(), hint_template_key=key)
            )  # fmt: skip
            one.deliveries, one.reward, one.last = t + 1, one.reward + (reward or 0.0), max(one.last, when)
            one.done = one.done or ends
            if kind is not None:
                one.kinds[kind] = one.kinds.get(kind, 0) + 1
            if key is not None:
                one.keys[key] = one.keys.get(key, 0) + 1
    for sid, status in statuses.items():
        if status != "open":
            await journal.commit(SessionChange(sid, status=status))  # type: ignore[arg-type]
    for one in made[30:33]:
        journal.delete_episode(one.eid)
    del made[30:33]
    return World(journal, made, statuses)


@pytest.fixture(params=ALL, scope="module")
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A journal that tests read and leave as it is."""
    journal = ALL[request.param](tmp_path_factory.mktemp("filled"))
    yield asyncio.run(fill(journal))
    journal.close()


@pytest.fixture
def world(filled: World) -> World:
    return replace(filled)


@pytest.fixture
def journal_in_tmp(tmp_path: Path) -> Callable[[str], Journal]:
    """Opens a store by name, in a directory of its own."""
    return lambda store: ALL[store](tmp_path / str(list(ALL).index(store)))


Wanted = tuple[EpisodeFilter, Callable[[Made, str], bool]]

FILTERED: dict[str, Wanted] = {
    "all": (EpisodeFilter(), lambda e, s: True),
    "environment": (EpisodeFilter(environment="shell"), lambda e, s: e.environment == "shell"),
    "task": (EpisodeFilter(task="Sort-Numbers"), lambda e, s: e.task == "Sort-Numbers"),
    **{
        status: (EpisodeFilter(status=status), lambda e, s, status=status: s == status)  # type: ignore[arg-type, misc]
        for status in ("open", "detached", "closed", "lost", "expired", "done")
    },
    "kind": (EpisodeFilter(error_kind='a"b'), lambda e, s: 'a"b' in e.kinds),
    "part of a kind": (EpisodeFilter(error_kind="b"), lambda e, s: False),
    "alias": (EpisodeFilter(episode_id="Alias"), lambda e, s: e.alias == "Alias"),
    "text of a task": (EpisodeFilter(text="NUMBERS"), lambda e, s: e.task == "Sort-Numbers"),
    "text that is a pattern elsewhere": (EpisodeFilter(text="%_\\"), lambda e, s: e.task == "50%_\\"),
    "text of an alias": (EpisodeFilter(text="aLiAs"), lambda e, s: e.alias is not None),
    "text of an eid": (EpisodeFilter(text="EP_1"), lambda e, s: e.eid.startswith("ep_1")),
    "text of none": (EpisodeFilter(text="_-_"), lambda e, s: False),
    "reward": (EpisodeFilter(reward_min=0.5, reward_max=1.0), lambda e, s: 0.5 <= e.reward <= 1.0),
    "created": (EpisodeFilter(created_from=1005, created_before=1020), lambda e, s: 1005 <= e.created < 1020),
    "last": (EpisodeFilter(last_from=1005, last_before=1020), lambda e, s: 1005 <= e.last < 1020),
    "group": (EpisodeFilter(group="p-1é"), lambda e, s: e.labels.group == "p-1é"),
    "step": (EpisodeFilter(step=0), lambda e, s: e.labels.step == 0),
    "a large step": (EpisodeFilter(step=2**53 - 1), lambda e, s: e.labels.step == 2**53 - 1),
    "run": (EpisodeFilter(run='a"b'), lambda e, s: e.labels.run == 'a"b'),
    "part of a run": (EpisodeFilter(run="a"), lambda e, s: False),
    "group of a step": (
        EpisodeFilter(group="p-2", step=7), lambda e, s: (e.labels.group, e.labels.step) == ("p-2", 7)
    ),
    "no child": (EpisodeFilter(origin="ep_none"), lambda e, s: False),
    "several": (
        EpisodeFilter(environment="count", error_kind="timeout", reward_max=0.0, text="sort"),
        lambda e, s: e.environment == "count" and "timeout" in e.kinds and e.reward <= 0 and e.task == "Sort-Numbers",
    ),
}  # fmt: skip

SORTED: dict[str, Callable[[Made], float]] = {
    "created": lambda e: e.created,
    "last": lambda e: e.last,
    "reward": lambda e: e.reward,
    "deliveries": lambda e: e.deliveries,
    "errors": lambda e: sum(e.kinds.values()),
}


def check_lists(world: World, every: int = 1) -> int:
    """Compare lists with what was made, and return how many episodes they had.

    Args:
        every: 1 compares each filter for each owner in each order, 7 every seventh: each filter for some of them.
    """
    found = 0
    lists = itertools.product(FILTERED.items(), (None, "alice", ALL_OWNERS), SORTED.items(), (True, False))
    for (name, (wanted, is_wanted)), owner, (by, value), descending in itertools.islice(lists, 0, None, every):
        expected = [one for one in world.made if owner in (one.owner, ALL_OWNERS) and is_wanted(one, world.status(one))]
        expected.sort(key=lambda one: (value(one), one.eid), reverse=descending)
        order = EpisodeOrder(by, descending)  # type: ignore[arg-type]
        assert world.pages(7, wanted, order, owner) == [one.eid for one in expected], (name, by, owner)
        found += len(expected)
    return found


def test_a_list_has_what_its_filter_names_once_in_its_order(world: World) -> None:
    assert check_lists(world) > 1000


@pytest.mark.parametrize("kind", [*KINDS, "none"])
@pytest.mark.parametrize("descending", [True, False])
async def test_a_list_by_errors_counts_those_of_the_kind_that_it_is_filtered_by(
    world: World, kind: str, descending: bool
) -> None:
    wanted = EpisodeFilter(error_kind=kind)
    order = EpisodeOrder.of("errors", descending, wanted)
    expected = sorted(
        (one for one in world.made if kind in one.kinds),
        key=lambda one: (one.kinds[kind], one.eid),
        reverse=descending,
    )
    assert world.pages(3, wanted, order, ALL_OWNERS) == [one.eid for one in expected]
    if kind == "timeout":
        assert len({one.kinds[kind] for one in expected}) > 1, "the counts differ, so their order says something"
        assert any(sum(one.kinds.values()) > one.kinds[kind] for one in expected), "some have other kinds too"


async def test_the_children_of_an_episode_are_listed_also_where_it_was_deleted(world: World) -> None:
    children: dict[str, list[str]] = {}
    for one in sorted(world.made, key=lambda one: (one.created, one.eid), reverse=True):
        if one.origin is not None:
            children.setdefault(one.origin, []).append(one.eid)
    assert len(children) > 3
    for origin, eids in children.items():
        assert world.pages(1, EpisodeFilter(origin=origin), EpisodeOrder(), ALL_OWNERS) == eids


async def test_what_a_list_says_of_an_episode_is_what_was_delivered(world: World) -> None:
    listed = {one.eid: one for one in world.journal.episodes(limit=99, principal=ALL_OWNERS)[0]}
    assert listed.keys() == {one.eid for one in world.made}
    for made in world.made:
        one = listed[made.eid]
        assert (one.task, one.status, one.last) == (made.task, world.status(made), made.last)
        assert (one.reward, one.deliveries, one.error_kinds) == (made.reward, made.deliveries, made.kinds)
        assert one.hint_keys == made.keys
        assert (one.group, one.step, one.run) == (made.labels.group, made.labels.step, made.labels.run)
        assert list(one.error_kinds) == sorted(one.error_kinds) and list(one.hint_keys) == sorted(one.hint_keys)
        assert world.journal.episode_stats(made.eid) == one
    assert world.journal.episode_stats("ep_none") is None


@pytest.mark.parametrize("bucket_s", [1, 7, 86_400])
async def test_aggregates_are_the_sums_of_what_a_list_has(world: World, bucket_s: int) -> None:
    buckets = 0
    for name, (wanted, is_wanted) in FILTERED.items():
        for owner in (None, "alice", ALL_OWNERS):
            expected: dict[int, EpisodeBucket] = {}
            for one in world.made:
                if owner not in (one.owner, ALL_OWNERS) or not is_wanted(one, world.status(one)):
                    continue
                start = int(one.created) // bucket_s * bucket_s
                bucket = expected.setdefault(start, EpisodeBucket(start=start))
                bucket.episodes, bucket.done = bucket.episodes + 1, bucket.done + one.done
                bucket.deliveries, bucket.reward = bucket.deliveries + one.deliveries, bucket.reward + one.reward
                for counts, more in ((bucket.error_kinds, one.kinds), (bucket.hint_keys, one.keys)):
                    for key, count in more.items():
                        counts[key] = counts.get(key, 0) + count
            found = world.journal.aggregates(bucket_s=bucket_s, wanted=wanted, principal=owner)
            assert found.bucket_s == bucket_s
            assert found.buckets == [expected[start] for start in sorted(expected)], (name, owner)
            buckets += len(expected)
    assert buckets > 30


@pytest.mark.parametrize("status", get_args(Status))
async def test_open_sessions_without_a_connection_are_detached(world: World, status: Status) -> None:
    opened = sorted(sid for sid, status in world.statuses.items() if status == "open")
    attached = frozenset([*opened[::2], "of-another-environment"])
    wanted, listed = EpisodeFilter(status=status), Counter[str]()
    for world.attached in (None, frozenset[str](), attached):
        expected = [one for one in world.made if world.status(one) == status]
        for order, limit in ((EpisodeOrder(), 3), (EpisodeOrder("reward", descending=False), 99)):
            found = world.pages(limit, wanted, order, ALL_OWNERS)
            assert sorted(found) == sorted(one.eid for one in expected) and len(found) == len(expected)
        sums = world.journal.aggregates(bucket_s=7, wanted=wanted, principal=ALL_OWNERS, attached=world.attached)
        assert sum(bucket.episodes for bucket in sums.buckets) == len(expected)
        assert sum(bucket.deliveries for bucket in sums.buckets) == sum(one.deliveries for one in expected)
        for one in expected:
            stats = world.journal.episode_stats(one.eid, world.attached)
            assert stats is not None and stats.status == status
        listed[str(world.attached)] = len(expected)
    everywhere, nowhere, some = listed.values()
    if status == "open":
        assert everywhere > some > nowhere == 0
    elif status == "detached":
        assert nowhere > some > everywhere == 0
    else:
        assert everywhere == nowhere == some > 0


async def test_too_many_buckets_are_refused_by_every_store(
    journal_in_tmp: Callable[[str], Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    for store in ALL:
        journal = journal_in_tmp(store)
        await journal.commit(session(), *(episode(f"e{n}", created=float(n)) for n in range(MAX_BUCKETS)))
        assert len(journal.aggregates(bucket_s=1, principal=None).buckets) == MAX_BUCKETS
        await journal.commit(episode("more", created=float(MAX_BUCKETS)))
        with pytest.raises(InvalidRequest, match="longer bucket_s"):
            journal.aggregates(bucket_s=1, principal=None)
        assert journal.aggregates(bucket_s=2, principal=None).buckets[-1].episodes == 1
        many = delivery("e0", 0, error_kind="x", hint_template_key="y")
        await journal.commit(many)
        monkeypatch.setattr("errata_protocol.episode_lists.MAX_COUNTS", 1)
        with pytest.raises(InvalidRequest, match="more than 1 counts"):
            journal.aggregates(bucket_s=2, principal=None)
        monkeypatch.undo()
        journal.close()


async def test_sums_beyond_a_double_are_its_largest(journal_in_tmp: Callable[[str], Journal]) -> None:
    for store in ALL:
        journal = journal_in_tmp(store)
        await journal.commit(session(), episode("e1"), episode("e2"), episode("e3", created=100.0))
        await journal.commit(delivery("e1", 0, reward=1.5e308), delivery("e2", 0, reward=1.5e308))
        await journal.commit(delivery("e3", 0, reward=-1.5e308))
        first, second = journal.aggregates(bucket_s=50, principal=None).buckets
        assert (first.reward, second.reward) == (sys.float_info.max, -1.5e308), store
        journal.close()


@pytest.mark.parametrize("store", ALL)
async def test_pages_go_on_from_where_they_were_while_episodes_are_added(
    store: str, journal_in_tmp: Callable[[str], Journal]
) -> None:
    world = await fill(journal_in_tmp(store))
    order = EpisodeOrder()
    expected = world.pages(99, EpisodeFilter(), order, None)
    first, after = world.journal.episodes(limit=5, principal=None)
    for n in range(5):
        await world.journal.commit(episode(f"new-{n}", "s1", created=2000.0 + n), delivery(f"new-{n}", 0, sid="s1"))
    rest, _ = world.journal.episodes(limit=99, after=after, principal=None)
    assert [one.eid for one in (*first, *rest)] == expected
    up, after = world.journal.episodes(limit=len(expected), order=EpisodeOrder(descending=False), principal=None)
    more, _ = world.journal.episodes(limit=9, after=after, order=EpisodeOrder(descending=False), principal=None)
    assert [one.eid for one in up] == expected[::-1] and [one.eid for one in more] == [f"new-{n}" for n in range(5)]
    world.journal.close()


@pytest.mark.parametrize("batch_rows", [1, 150, 10**6])
async def test_an_index_made_again_and_a_reader_of_the_files_list_the_same(tmp_path: Path, batch_rows: int) -> None:
    journal = IndexedJournal(tmp_path, batch_rows=batch_rows, background=False, segment_bytes=4096)
    world = await fill(journal)
    listed = journal.episodes(limit=99, principal=ALL_OWNERS)
    world.journal = looked = ReadOnlyJournal(tmp_path)
    check_lists(world)
    looked.close()
    journal.close()
    for spoil in (lambda: None, (tmp_path / INDEX).unlink):
        spoil()
        for opens in (ReadOnlyJournal, IndexedJournal):
            world.journal = again = opens(tmp_path)
            assert again.episodes(limit=99, principal=ALL_OWNERS) == listed
            check_lists(world, every=7)
            again.close()


async def test_a_session_that_ends_while_the_index_has_it_open_is_listed_as_ended(tmp_path: Path) -> None:
    journal = IndexedJournal(tmp_path, background=False)
    await journal.commit(session("a"), session("b"), episode("e1", "a"), episode("e2", "b"))
    journal._bring_up()
    await journal.commit(SessionChange("a", status="lost"))

    def listed(status: Any) -> list[str]:
        return [one.eid for one in journal.episodes(limit=9, wanted=EpisodeFilter(status=status), principal=None)[0]]

    assert (listed("open"), listed("lost"), listed("closed")) == (["e2"], ["e1"], [])
    await journal.commit(SessionChange("b", status="closed"))
    assert (listed("open"), listed("lost"), listed("closed")) == ([], ["e1"], ["e2"])
    assert [one.status for one in journal.episodes(limit=9, principal=None)[0]] == ["closed", "lost"]
    journal.close()


async def test_what_the_index_has_of_an_episode_with_newer_rows_is_not_listed(tmp_path: Path) -> None:
    journal = IndexedJournal(tmp_path, background=False)
    await journal.commit(session(), episode("e1"), delivery("e1", 0), episode("e2"), delivery("e2", 0))
    journal._bring_up()
    looked = ReadOnlyJournal(tmp_path)
    await journal.commit(delivery("e1", 1, reward=1.0, done=True, error_kind="timeout"))

    def listed(of: Journal, **wanted: Any) -> list[str]:
        return [one.eid for one in of.episodes(limit=9, wanted=EpisodeFilter(**wanted), principal=None)[0]]

    for of in (journal, looked):
        assert listed(of, reward_max=0.6) == ["e2"] == listed(of, status="open") and listed(of, status="done") == ["e1"]
        (bucket,) = of.aggregates(bucket_s=10, principal=None).buckets
        assert (bucket.episodes, bucket.deliveries, bucket.reward, bucket.error_kinds) == (2, 3, 2.0, {"timeout": 1})
    journal.delete_episode("e1")
    for of in (journal, looked):
        assert listed(of) == ["e2"] and of.episode_stats("e1") is None
        (bucket,) = of.aggregates(bucket_s=10, principal=None).buckets
        assert (bucket.episodes, bucket.deliveries) == (1, 1)
    journal.delete_episode("e2")  # of which no row waits
    for of in (journal, looked):
        assert listed(of) == [] and of.aggregates(bucket_s=10, principal=None).buckets == []
    looked.close()
    journal.close()


async def test_a_fork_has_the_task_of_its_parent_that_memory_has_forgotten(tmp_path: Path) -> None:
    journal = IndexedJournal(tmp_path, background=False, batch_rows=1)
    first = delivery("e1", 0, payload=b'{"observation":{"task":"mend it"}}')
    await journal.commit(session(), episode("e1"), first, delivery("e1", 1, payload=b'{"observation":{}}'))
    journal._live.forget_unused()
    journal._live.forget_unused()
    assert not journal._live.episodes
    child = episode("e2", origin_eid="e1", origin_t=1)
    await journal.commit(child, delivery("e2", 0, kind="fork", payload=b'{"observation":{}}'))
    grandchild = episode("e3", origin_eid="e2", origin_t=0)
    await journal.commit(grandchild, delivery("e3", 0, kind="fork", payload=b'{"observation":{}}'))
    assert [one.task for one in journal.episodes(limit=9, principal=None)[0]] == ["mend it"] * 3
    journal.close()


async def test_a_list_reads_no_row_of_the_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = IndexedJournal(tmp_path, background=False, batch_rows=150)
    world = await fill(journal)
    monkeypatch.setattr(Segments, "read", lambda *_: pytest.fail("a row was read"))
    await test_what_a_list_says_of_an_episode_is_what_was_delivered(world)
    journal.close()


async def test_a_page_of_the_index_is_one_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = IndexedJournal(tmp_path, background=False, batch_rows=1)
    await fill(journal)
    asked: list[str] = []
    listing = journal._reads._listing
    rows = listing._rows
    monkeypatch.setattr(listing, "_rows", lambda sql, values: asked.append(sql) or rows(sql, values))
    assert len(journal.episodes(limit=50, wanted=EpisodeFilter(status="open"), principal=ALL_OWNERS)[0]) > 10
    assert len(asked) == 1
    journal.close()


async def test_a_list_has_what_was_committed_once_while_batches_leave_for_the_index(tmp_path: Path) -> None:
    journal = IndexedJournal(tmp_path, batch_rows=10)
    await journal.commit(session())
    committed, ended, wrong = [0], threading.Event(), list[BaseException]()

    def read() -> None:
        try:
            for name in itertools.cycle(("reward", "created")):
                known, done = committed[0], ended.is_set()
                page, _ = journal.episodes(limit=999, order=EpisodeOrder(name), principal=None)  # type: ignore[arg-type]
                found = [one.eid for one in page]
                assert len(set(found)) == len(found) and set(found) >= {f"e{n}" for n in range(known)}
                assert all(one.deliveries == 1 for one in page if int(one.eid[1:]) < known)
                (bucket,) = journal.aggregates(bucket_s=9, principal=None).buckets or [EpisodeBucket(start=0)]
                assert bucket.episodes >= known and bucket.deliveries >= known
                if done:
                    assert bucket.episodes == bucket.deliveries == len(found) == known
                    return
        except BaseException as error:
            wrong.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(300):
        await journal.commit(episode(f"e{n}"), delivery(f"e{n}", 0, id=n + 1))
        committed[0] = n + 1
    ended.set()
    await asyncio.to_thread(reader.join)
    journal.close()
    assert not wrong, wrong


async def test_a_list_in_memory_goes_on_while_rows_are_added() -> None:
    journal = MemoryJournal()
    world = await fill(journal)
    rows = journal._all_stats(None)
    next(rows)
    await journal.commit(episode("late"), delivery("late", 0))
    journal.delete_episode(world.made[-1].eid)
    assert len(list(rows)) == sum(one.owner is None for one in world.made) - 1


def test_the_totals_of_a_row_without_a_delivery_are_not_those_of_one(tmp_path: Path) -> None:
    row = delivery("e1", None, created=9.0, error_kind="timeout", status="EXECUTION_ERROR")
    from errata_server.journal.live import Episode

    totals = Episode(1, 1, last=1.0)
    totals.add(row)
    assert (totals.last, totals.newest, totals.deliveries, totals.error_kinds) == (1.0, 9.0, 0, None)
    assert isinstance(row, DeliveryRow)
