"""Whatever field of a client's message is wrong, the kit notices, or `client_survivors.toml` says why it need not."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from tests.machine_speed import SLOWDOWN

from .client_mutation import REPLY_S, client_fields, client_mutations, seen_by, survives
from .mutation import Mutation
from .test_mutants import listed

SAMPLE = (
    "client.Open data.key zero",
    "client.Open data.fence repeat",
    "client.Resume data.[].last zero",
    "client.Step id zero",
    "client.Step sid swap",
    "client.Fork data.t zero",
    "client.Ack data.last_seq repeat",
    "client.Part data.n swap",
    "client.Close drop",
    "plain.Step repeat",
    "plain.StateAtRequest data.t zero",
    "http.ForkRequest request_id zero",
)
"""A few mutations for the suite that runs all the time; the test below has all."""
WHOLE_REPLY_S = 15.0 * SLOWDOWN


def judged(chosen: Collection[Mutation]) -> tuple[set[str], set[str]]:
    """Run the kit with each mutation; return those that survive, and messages and fields that no scenario meets."""
    unseen: set[str] = set()
    survivors: set[str] = set()
    known = listed("client_survivors.toml")["survivors"]

    async def main() -> None:
        seen = await seen_by(jobs=4, reply_s=WHOLE_REPLY_S)
        places = asyncio.Semaphore(12)

        async def one(mutation: Mutation, again: bool = False) -> None:
            key = f"{mutation.message} {mutation.path}".strip()
            found = seen.get(key)
            if found is None:
                unseen.add(key)
            elif mutation.how != "swap" or len(found.values) > 1:
                # A listed survivor gets long, so that on a slow machine no scenario seems to notice it.
                reply_s = WHOLE_REPLY_S if again or str(mutation) in known else 2 * REPLY_S
                async with places:
                    survived = await survives(mutation, found, reply_s)
                (survivors.add if survived else survivors.discard)(str(mutation))

        await asyncio.gather(*map(one, chosen))
        for mutation in chosen:  # what is unexpected is judged again, alone
            if (str(mutation) in survivors) != (str(mutation) in known):
                await one(mutation, again=True)

    asyncio.run(main())
    return survivors, unseen


def test_a_sample_of_mutations_of_clients_is_noticed() -> None:
    chosen = [one for one in client_mutations() if str(one) in SAMPLE]
    assert len(chosen) == len(SAMPLE)
    assert judged(chosen) == (set(), set())


@pytest.mark.conformance
def test_every_mutation_of_a_client_is_noticed_or_explained() -> None:
    survivors, unseen = judged(client_mutations())
    wanted = listed("client_survivors.toml")
    assert survivors - wanted["survivors"] == set(), "nothing notices these: write a check, or list them with a reason"
    assert wanted["survivors"] - survivors == set(), "these are noticed: take them off the list"
    assert unseen == wanted["unseen"]


def test_mutations_of_clients_are_of_every_field_of_the_schemas() -> None:
    known = client_fields()
    assert {"sid", "id", "if.eid", "deadline_ms", "data.child.key"} <= set(known["client.Fork"])
    assert {"data.[].last", "data.[].fence"} <= set(known["client.Resume"])
    named = {str(one) for one in client_mutations()}
    assert len(named) == len(client_mutations()) > 400
    wanted = listed("client_survivors.toml")
    assert wanted["survivors"] <= named
    assert wanted["unseen"] <= {f"{message} {path}".strip() for message in known for path in ("", *known[message])}
