"""`Losses`: what is known of lost members, and that not knowing ends no session."""

from __future__ import annotations

from typing import Any

import pytest

from errata_client import Endpoint, Fleet
from errata_client.fleet import losses
from errata_client.fleet.losses import Losses
from errata_protocol.errors import NotSupported, SessionLost

NAMES = ("aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc", "dddddddddddd")


class Scripted:
    """A source of members that answers what it is given, one after the other."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    async def read(self, after: str | None, wait_s: float) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return "1", answer

    async def aclose(self) -> None: ...


def losses_from(*answers: Any) -> Losses:
    made = Losses("http://localhost", {})
    made._fleet = Fleet(Scripted(*answers))
    return made


async def test_only_a_member_that_is_lost_ends_sessions_and_members_are_read_once_for_a_while() -> None:
    states = ("lost", "down", "draining", "up")
    found = losses_from([Endpoint(name, "http://h", state) for name, state in zip(NAMES, states, strict=True)])  # type: ignore[arg-type]
    error = await found.of(NAMES[0])
    assert isinstance(error, SessionLost) and NAMES[0] in error.message
    for other in (*NAMES[1:], "eeeeeeeeeeee", None, 5, ["a"]):
        assert await found.of(other) is None


async def test_what_cannot_be_read_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "FRESH_S", 0.0)
    lost = [Endpoint(NAMES[0], "http://h", "lost")]
    found = losses_from(ConnectionError(), NotSupported("no /fleet"), TimeoutError(), lost, ConnectionError())
    assert [await found.of(NAMES[0]) is not None for _ in range(5)] == [False, False, False, True, True]
