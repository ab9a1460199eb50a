"""Long runs of the same world as `test_mux_stateful`, one seed one run: deeper than Hypothesis goes, and counted."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest

from errata_protocol.errors import JournalUnavailable
from tests.protocol.mux.world import World


def run(seed: int, steps: int = 1500) -> tuple[World, Counter[str]]:
    """Drive a world by one seed, then let it come to rest and check it."""
    rng, world = random.Random(seed), World()
    accidents = rng.choice([0.002, 0.01, 0.05])
    done: Counter[str] = Counter()
    for _ in range(steps):
        if len(world.keys) < 4 and rng.random() < 0.01:
            world.open()
        sessions = world.live()
        if sessions and rng.random() < 0.15:
            session = rng.choice(sessions)
            for kind in rng.choices(["reset", "step", "mcp"], [1, 5, 1], k=rng.randint(1, 7)):
                world.request(session, kind)
        if sessions and rng.random() < 0.02:
            more = (
                {"condition": (rng.randint(0, 3), None)} if rng.random() < 0.5 else {"deadline_ms": rng.randint(0, 99)}
            )
            world.request(rng.choice(sessions), "step", **more)
        if sessions and rng.random() < 0.02:
            session = rng.choice(sessions)
            if waiting := [*session.sent.values(), *session.unsent]:
                world.client.cancel(session, rng.choice(waiting))
        if sessions and rng.random() < 0.01 and len(world.keys) < 8:
            world.fork(rng.choice(sessions), rng.randint(0, 2))
        if len(sessions) > 1 and rng.random() < 0.002:
            world.request(rng.choice(sessions), "close")
        if sessions and rng.random() < 0.02:
            world.client.read("state", rng.choice(sessions))
        if world.journal.rows and rng.random() < 0.03:
            sid = rng.choice(sorted(world.journal.rows))
            if world.journal.rows[sid].status == "open":
                world.push(sid)
        if world.wire is None:
            if rng.random() < 0.5:
                world.connect()
        elif rng.random() < accidents:
            world.hang_up()
        if world.wire is not None:
            if rng.random() < 0.7:
                world.client_sends(rng.choice([None, 1]))
            if world.wire.down and rng.random() < 0.7:
                world.client_hears(twice=rng.random() < 0.05)
        busy = [wire for wire in world.wires if wire.up]
        if busy and rng.random() < 0.8:
            world.server_hears(rng.choice(busy), twice=rng.random() < 0.05)
        if world.shell.due and rng.random() < 0.7:
            index = rng.randrange(len(world.shell.due))
            done[type(world.shell.due[index]).__name__] += 1
            world.shell.perform(index, world.now, fail=rng.random() < 0.05)
        if rng.random() < 0.7:
            world.server_sends()
        lost = [wire for wire in world.wires if wire.server is not None and wire is not world.wire]
        if lost and rng.random() < 0.1:
            world.server_notices(rng.choice(lost))
        if rng.random() < 0.01:
            world.shell.protocol.refuse(rng.choice([None, JournalUnavailable("no space", retry_after=0.1)]))
        if rng.random() < 0.1:
            world.pass_time(rng.choice([0.05, 0.5, 0.5, 11.0]))
        if rng.random() < accidents / 2:
            done["server crash"] += 1
            world.server_crashes()
        if rng.random() < accidents / 4:
            done["client crash"] += 1
            world.client_crashes()
    world.settle()
    world.check_rest()
    done.update(type(event).__name__ for event in world.events)
    done.update(event.error.code for event in world.events if hasattr(event, "error") and event.error is not None)
    return world, done


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_whatever_happens_replies_are_in_order_and_nothing_runs_twice(first: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(first, first + 50):
        total += run(seed)[1]
    # What the runs are for did happen in them.
    for name in (
        "ReadReplies",
        "ReadPushes",
        "Hibernate",
        "RecordError",
        "RunRequest",
        "Pushed",
        "Replied",
        "Answered",
        "server crash",
    ):
        assert total[name] > 3, (name, total)
    for code in ("OVERLOADED", "JOURNAL_UNAVAILABLE", "PRECONDITION_FAILED", "CANCELLED", "TIMEOUT", "T_OUT_OF_RANGE"):
        assert total[code], (code, total)


if __name__ == "__main__":
    counted: Counter[str] = Counter()
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            counted += run(number)[1]
        except BaseException:
            print("seed", number)
            raise
    print(counted)
