"""The memory that workers share (`errata_server.fleet.board`), in one process and with a clock of its own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from errata_server.fleet import board as boards
from errata_server.fleet.board import RECENT_SIDS, STALE_S, Board


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
    assert board.connections(1) == 3, "it counts at once, so that a burst spreads"
    board.beat(1, 2)
    assert board.connections(1) == 2, "its owner knows better"


def test_a_worker_is_silent_since_its_last_heartbeat() -> None:
    clock = Clock()
    board = Board(2, clock)
    board.beat(1, 0)
    clock.now += 5.0
    assert board.silent_s(1) == 5.0
    board.clear(1)
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
            board.beat(0, own[0])  # the acceptor's own are counted when it serves them
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


def test_instances_are_those_of_all_workers_and_end_with_their_worker() -> None:
    board = Board(3, Clock())
    board.count(0, 0, 2)
    board.count(1, 0, 5)
    board.count(1, 1, 7)
    assert (board.instances(0), board.instances(1)) == (7, 7)
    board.clear(1)
    assert (board.instances(0), board.instances(1)) == (2, 0)
    assert boards.ENVIRONMENTS > 1


def test_a_fleet_has_started_once_each_worker_has() -> None:
    board = Board(2, Clock())
    board.start(0)
    assert not board.all_started
    board.start(1)
    board.clear(0)
    assert board.all_started and board.has_started(0), "its sids stay on the board"
