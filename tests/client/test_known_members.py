"""`Members`: what is known of the members of a fleet, and that not knowing ends no session."""

from __future__ import annotations

from typing import Any

import pytest

from errata_client import Endpoint, Fleet
from errata_client.fleet import members
from errata_client.fleet.members import Members, lost_error
from errata_protocol.errors import NotSupported, SessionLost
from errata_protocol.fleet import State

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


def members_from(*answers: Any, address: str = "http://localhost") -> Members:
    made = Members(address, {})
    made._fleet = Fleet(Scripted(*answers))
    return made


async def test_members_are_read_once_for_a_while() -> None:
    states: tuple[State, ...] = ("lost", "down", "draining", "up")
    listed = [Endpoint(name, "http://localhost", state) for name, state in zip(NAMES, states, strict=True)]
    found = members_from(listed)
    assert [await found.of(name) for name in NAMES] == listed
    for other in ("eeeeeeeeeeee", None, 5, ["a"]):
        assert await found.of(other) is None
    error = lost_error(listed[0])
    assert isinstance(error, SessionLost) and NAMES[0] in error.message


async def test_what_cannot_be_read_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "FRESH_S", 0.0)
    lost = [Endpoint(NAMES[0], "http://localhost", "lost")]
    found = members_from(ConnectionError(), NotSupported("no /fleet"), TimeoutError(), lost, ConnectionError())
    assert [await found.of(NAMES[0]) is not None for _ in range(5)] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("address", "listed", "found"),
    [
        ("http://a:8000", ["http://a:8000", "http://b:8000"], ["http://a:8000", "http://b:8000"]),
        ("ws://a:8000/maze", ["http://a:8000", "http://b:8000"], ["http://a:8000/maze", "http://b:8000/maze"]),
        ("http://a/x/maze", ["http://a/x", "http://b/y"], ["http://a/x/maze", "http://b/y/maze"]),
        ("http://balancer/maze", ["http://a", "http://b"], ["http://a/maze", "http://b/maze"]),
        ("https://a", ["https://a", "http://b"], ["https://a"]),
        ("file:///fleet", ["http://a", "https://b"], ["http://a", "https://b"]),
    ],
)
async def test_members_are_those_of_the_environment_of_the_address(
    address: str, listed: list[str], found: list[str]
) -> None:
    """And a token that is given to a server with TLS is sent to none without."""
    known = members_from([Endpoint(None, url, "up") for url in listed], address=address)
    assert [one.url for one in await known.read()] == found
