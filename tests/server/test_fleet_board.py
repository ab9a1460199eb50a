"""The memory that workers share (`errata_server.fleet.board`), in one process and with a clock of its own."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from errata_protocol.errors import CapacityReached
from errata_server.fleet.board import COUNTS, RECENT_SIDS, STALE_S, Board
from errata_server.fleet.member import FleetCapacity


class Clock:
    """A clock that stands."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_new_connection_goes_to_the_lesser_of_two() -> None:
    board = Board(3, Clock())
    for worker, connections in enumerate((5, 2, 9)):
        board.beat(worker, connections)
    assert board.place(0, lambda alive, _: [alive[0], alive[2]]) == 0
    assert board.place(0, lambda alive, _: [alive[0], alive[1]]) == 1


def test_connections_on_their_way_count_until_they_are_taken() -> None:
    board = Board(3, Clock())
    board.pass_on(0, 1, 1)
    board.pass_on(2, 1, 2)
    board.beat(1, 5)
    assert board.connections(1) == 8, "a heartbeat of who has not taken them forgets none"
    board.pass_on(1, 1, -1)
    board.tell(1, 6)
    assert board.connections(1) == 8
    board.clear(1)
    board.pass_on(2, 1, -2)
    assert [board.connections(worker) for worker in range(3)] == [0, 0, 0], "others take them where it does not run"


def test_a_worker_is_silent_since_its_last_heartbeat() -> None:
    clock = Clock()
    board = Board(2, clock)
    board.beat(1, 0)
    clock.now += 5.0
    assert board.silent_s(1) == 5.0 and board.stuck(4.0) == [1] and board.stuck(5.0) == []
    board.clear(1)
    assert board.stuck(4.0) == [], "one that has ended is not stuck"
    assert board.silent_s(1) == clock.now, "one that has ended has no last heartbeat"


def test_a_burst_spreads_evenly_without_a_heartbeat() -> None:
    board = Board(4, Clock())
    for worker in range(4):
        board.beat(worker, 0)
    own: Counter[int] = Counter()
    for _ in range(400):
        chosen = board.place(0)
        own[chosen] += 1
        if chosen == 0:
            board.tell(0, own[0])
        else:
            board.pass_on(0, chosen, 1)
    assert all(90 <= count <= 110 for count in own.values()), own


def test_a_worker_without_a_heartbeat_gets_no_connection() -> None:
    clock = Clock()
    board = Board(3, clock)
    board.beat(2, 0)
    clock.now += STALE_S + 0.01
    board.beat(1, 50)
    seen: list[Sequence[int]] = []

    def choose(alive: Sequence[int], count: int) -> Sequence[int]:
        seen.append(alive)
        return alive[:count]

    board.place(0, choose)
    assert seen == [[0, 1]], "the worker that has accepted it is alive, whatever its heartbeat says"


def test_the_board_knows_the_recent_sids_of_all_workers_also_from_another_process() -> None:
    board = Board(2, Clock())
    board.take_sid(0, "a")
    if (pid := os.fork()) == 0:
        board.take_sid(1, "b")
        os._exit(0)
    os.waitpid(pid, 0)
    assert [board.owner_of(sid) for sid in "abc"] == [0, 1, None]
    board.clear(1)
    assert board.owner_of("b") == 1, "sids outlive their worker: its journal has the sessions"


def test_the_oldest_sids_make_room() -> None:
    board = Board(1, Clock())
    for n in range(RECENT_SIDS + 3):
        board.take_sid(0, f"{n}")
    assert [board.owner_of(f"{n}") for n in (0, 2, 3, RECENT_SIDS + 2)] == [None, None, 0, 0]


def test_bytes_of_two_neighbours_are_no_sid() -> None:
    board = Board(1, Clock())
    hashes = {"one": b"AAAABBBB", "two": b"CCCCDDDD", "third": b"BBBBCCCC", "last": b"DDDDEEEE", "fifth": b"EEEEBBBB"}
    board._hash = hashes.__getitem__  # type: ignore[method-assign]
    for sid in ("one", "two", "last"):
        board.take_sid(0, sid)
    assert board.owner_of("third") is None and board.owner_of("fifth") is None
    board.take_sid(0, "third")
    assert board.owner_of("third") == 0, "behind a place where its bytes are those of two neighbours"


def test_counts_are_those_of_all_workers_and_end_with_their_worker() -> None:
    board = Board(3, Clock())
    board.count(0, "environment a", 2)
    board.count(1, "environment a", 5)
    board.count(1, "principal a", 7)
    board.count(1, "environment a", 6)
    assert (board.total("environment a"), board.total("principal a"), board.total("other")) == (8, 7, 0)
    board.clear(1)
    assert (board.total("environment a"), board.total("principal a")) == (2, 0)
    board.count(1, "principal a", 1)
    assert board.total("principal a") == 1, "a worker that starts again counts anew"


def test_a_worker_has_a_bounded_number_of_counts() -> None:
    board = Board(2, Clock())
    for n in range(COUNTS):
        board.count(1, f"principal {n}", 1)
    with pytest.raises(CapacityReached, match=str(COUNTS)):
        board.count(1, "one more", 1)
    board.count(1, "principal 0", 3)
    assert (board.total("principal 0"), board.total("one more")) == (3, 0)


def test_a_count_is_not_found_in_the_bytes_of_another() -> None:
    board = Board(1, Clock())
    hashes = {"a": b"hash of ", "b": (5).to_bytes(8, sys.byteorder)}
    board._hash = hashes.__getitem__  # type: ignore[method-assign]
    board.count(0, "a", 5)
    assert board.total("b") == 0
    board.count(0, "b", 2)
    assert (board.total("a"), board.total("b")) == (5, 2)


def test_a_limit_counts_the_instances_of_all_workers() -> None:
    board = Board(2, Clock())
    here, there = (FleetCapacity(3, board, worker, "principal a") for worker in range(2))
    there.used += 2
    assert (here.used, here.in_use, here.full) == (0, 2, False)
    here.used += 1
    assert here.full and there.full
    refusal = here.refusal(takes_several=True, soon_free=False)
    assert (refusal.details["active_sessions"], refusal.details["max_sessions"]) == (3, 3)
    there.used -= 1
    assert not here.full


def test_a_fleet_has_started_once_each_worker_has() -> None:
    board = Board(2, Clock())
    board.start(0)
    assert not board.all_started
    board.start(1)
    board.clear(0)
    assert board.all_started and board.has_started(0), "its sids stay on the board"
