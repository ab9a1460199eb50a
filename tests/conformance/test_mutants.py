"""Whatever field of a server's message is wrong, the kit notices, or `survivors.toml` says why it need not."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from errata_conformance.results import Outcome, Result
from errata_conformance.sample.episodes import World
from errata_conformance.sample.server import Server, running
from errata_conformance.server_side.run import prepared, run, selected
from errata_conformance.server_side.target import Target

from .conftest import RFCS, in_thread
from .mutation import Judge, Mutation, Mutator, Proxy, Seen, Switchboard, changed, fields, mutations, spaced

SAMPLE = (
    "server.Observation digest drop",
    "server.Observation digest zero",
    "server.Observation eid swap",
    "server.Observation t zero",
    "server.Observation repeat",
    "server.StateAtReply digest zero",
    "server.Resumed data.t zero",
    "plain.Observation digest swap",
    "plain.StateAtFrame data space",
    "http.State etag zero",
    "payload observation.error_kind repeat",
)
"""A few mutations for the suite that runs all the time; `test_every_mutation_is_noticed_or_explained` has all."""
WAIT_S = 2.0
"""How long a check waits for a reply that a mutation may have taken away, in seconds. A listed survivor gets the usual
time, so that on a slow machine no check seems to notice it."""


@cache
def listed(file: str = "survivors.toml") -> dict[str, set[str]]:
    """Return the mutations that a file lists as survivors, and the fields that it lists as unseen."""
    found = tomllib.loads(Path(__file__).with_name(file).read_text())
    every = {
        "survivors": [one for group in found["survivors"] for one in group["mutations"]],
        "unseen": [one for group in found["unseen"] for one in group["fields"]],
    }
    assert all(len(set(some)) == len(some) for some in every.values()), "one is listed twice"
    assert all(group["why"] for groups in found.values() for group in groups)
    return {name: set(some) for name, some in every.items()}


def judged(chosen: Collection[Mutation]) -> tuple[set[str], set[str]]:
    """Run the kit with each mutation; return those that survive, and messages and fields that no check meets."""
    switchboard = Switchboard()
    unseen: set[str] = set()
    survivors: set[str] = set()

    async def main(url: str) -> None:
        target = Target(url + switchboard.add(Mutator(None)))
        await prepared(target, "tally")
        judge = Judge(url, switchboard, target)
        checks = [one for one in selected(RFCS, "0.10") if not one.body.__module__.endswith("check_faults")]
        seen = await judge.seen(checks, jobs=8)
        places = asyncio.Semaphore(32)

        async def one(mutation: Mutation, again: bool = False) -> None:
            found: Seen | None = seen.get(f"{mutation.message} {mutation.path}".strip())
            if found is None:
                unseen.add(f"{mutation.message} {mutation.path}".strip())
            elif mutation.how != "swap" or len(found.values) > 1:
                reply_s = target.reply_s if again or str(mutation) in listed()["survivors"] else WAIT_S
                async with places:
                    survives = await judge.survives(mutation, found, reply_s)
                (survivors.add if survives else survivors.discard)(str(mutation))

        await asyncio.gather(*map(one, chosen))
        # Some checks measure times, which others at work beside them can spoil: what is unexpected is judged alone.
        for mutation in chosen:
            if (str(mutation) in survivors) != (str(mutation) in listed()["survivors"]):
                await one(mutation, again=True)

    with in_thread(running(World(), 0, server=switchboard)) as url:
        asyncio.run(main(url))
    return survivors, unseen


def test_a_sample_of_mutations_is_noticed() -> None:
    chosen = [one for one in mutations() if str(one) in SAMPLE]
    assert len(chosen) == len(SAMPLE)
    assert judged(chosen) == (set(), set())


@pytest.mark.conformance
def test_every_mutation_is_noticed_or_explained() -> None:
    survivors, unseen = judged(mutations())
    wanted = listed()
    assert survivors - wanted["survivors"] == set(), "no check notices these: write one, or list them with a reason"
    assert wanted["survivors"] - survivors == set(), "a check notices these: take them off the list"
    assert unseen == wanted["unseen"]


class Restarted:
    """A server that has a mutation as soon as a file exists, as if a new process had read its journal wrongly.

    It keeps its sessions and sockets: a server that lost nothing when it was killed.
    """

    def __init__(self, app: Any, mutation: Mutation | None, killed: Path) -> None:
        self._mutator, self._mutation, self._killed = Mutator(None), mutation, killed
        self._proxy = Proxy(app, self._mutator)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._killed.exists():
            self._mutator.mutation = self._mutation
        await self._proxy(scope, receive, send)


@pytest.mark.parametrize(
    ("name", "statement"),
    [
        (None, None),
        ("server.Observation digest zero", "R-016-46"),
        ("server.StateAtReply digest zero", "R-016-46"),
        ("server.Observation data space", "R-016-13"),
        ("server.Observation eid zero", "R-016-16"),
        ("http.State etag zero", "R-015-14"),
        ("payload observation.total zero", "R-016-13"),
    ],
)
def test_what_is_wrong_after_a_kill_is_noticed(name: str | None, statement: str | None, tmp_path: Path) -> None:
    total = Mutation("payload", "observation.total", "zero", {"type": "number"})
    mutation = next((one for one in (*mutations(), total) if str(one) == name), None)
    server = Server(World())
    server.app = Restarted(server.app, mutation, tmp_path / "killed")  # type: ignore[assignment]
    with in_thread(running(World(), 0, server=server)) as url:

        async def main() -> list[Result]:
            target = Target(url, kill=f"touch {tmp_path / 'killed'}", start="true", reply_s=2.0)
            await prepared(target, "tally")
            checks = [one for one in selected(RFCS, None, ["R-016-13"]) if one.name.startswith("after kill -9")]
            return await run(target, checks)

        (result,) = asyncio.run(main())
    found = result.blocked_by or (result.statement if result.outcome is Outcome.FAILED else None)
    assert (name is None) == (mutation is None) and found == statement, result


def test_mutations_are_of_every_field_of_the_schemas() -> None:
    known = fields()
    assert {"type", "data", "data.code", "request"} <= set(known["server.Error"])
    assert "observation.error_site.action_span" in known["payload"]
    named = {str(one) for one in mutations()}
    assert len(named) == len(mutations()) > 800
    assert listed()["survivors"] <= named
    every = {f"{message} {path}".strip() for message, paths in known.items() for path in ("", *paths)}
    assert listed()["unseen"] <= every


@pytest.mark.parametrize(
    ("path", "values", "wanted"),
    [
        ("b.c", ["1", "2"], '{"a":[ 1],"b":{"c":1,"c":2}}'),
        ("b", [], '{"a":[ 1]}'),
        ("x", ["0"], '{"a":[ 1],"b":{"c": 3}}'),
    ],
)
def test_a_change_keeps_the_rest_of_a_message(path: str, values: list[str], wanted: Any) -> None:
    text = '{"a":[ 1],"b":{"c": 3}}'
    made = changed(text, path.split("."), lambda _: values)
    assert made == wanted
    assert spaced('{"a":1}') == '{ "a":1}' and spaced("1") == " 1"
