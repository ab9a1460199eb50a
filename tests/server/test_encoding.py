"""`encoded` has a short way for the usual step: it refuses what `check` refuses, whatever shares the transaction."""

from __future__ import annotations

import random
from collections.abc import Sequence

from errata_protocol.errors import ErrataError
from errata_server.journal.base import Record
from errata_server.journal.claims import Claims, check
from errata_server.journal.encoding import encoded
from errata_server.journal.memory import MemoryJournal

from .journal_rows import delivery, episode, session


def outcomes(groups: Sequence[Sequence[Record]], journal: MemoryJournal) -> list[type[ErrataError] | None]:
    """Check each group against the store and all groups before it, one rule for all."""
    claims: Claims = set()
    found: list[type[ErrataError] | None] = []
    for group in groups:
        try:
            claims |= check(group, journal, claims)
        except ErrataError as error:
            found.append(type(error))
        else:
            found.append(None)
    return found


async def test_the_short_way_of_a_step_refuses_what_check_refuses() -> None:
    journal = MemoryJournal()
    for sid, eid in (("s1", "e1"), ("s2", "e2")):
        await journal.commit(session(sid), episode(eid, sid=sid), delivery(eid, 0, sid=sid, id=1))
    draw, refused = random.Random(3), 0

    def record() -> Record:
        n = draw.choice("123")
        if draw.random() < 0.1:
            return episode(f"e{n}", sid=f"s{n}")
        t = draw.choice((None, 0, 1, 1, 2, 3))
        sid = f"s{n}" if draw.random() < 0.9 else "s1"
        return delivery(f"e{n}", t, sid=sid, id=draw.choice((None, 1, 2, 2, 3, 4)))

    for _ in range(3_000):
        groups = [[record() for _ in range(draw.choice((1, 1, 1, 2)))] for _ in range(draw.randrange(1, 8))]
        expected = outcomes(groups, journal)
        body = encoded(groups, journal)
        assert [error and type(error) for error in body.errors] == expected
        kept = [record for group, error in zip(groups, body.errors, strict=True) if error is None for record in group]
        assert body.records == kept and len(body.parts) == len(kept)
        refused += sum(error is not None for error in expected)
    assert refused > 3_000
    journal.close()
