"""Ids name their shard, and new groups are placed (PROTOCOL F5)."""

from __future__ import annotations

import string
import uuid
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errata_protocol.errors import InvalidRequest, Misdirected, error_from_wire
from errata_protocol.names import EPISODE, SESSION, InvalidName
from errata_protocol.shards import Placement, check_shard, named, shard_of

SHARDS = st.text(string.ascii_lowercase + string.digits, min_size=12, max_size=12)
RESTS = st.text(string.ascii_letters + string.digits + "_-", min_size=21, max_size=90)
GROUPS = [f"group-{n}" for n in range(2000)]


@given(SHARDS, RESTS)
def test_an_id_names_the_shard_that_it_was_made_with(shard: str, rest: str) -> None:
    sid = named(shard, rest)
    assert shard_of(sid) == shard_of(f"ep_{sid}") == shard
    assert SESSION.matches(sid) and EPISODE.matches(f"ep_{sid}") and sid.endswith(rest)


@given(RESTS)
def test_an_id_of_a_directory_without_a_name_is_what_it_was(rest: str) -> None:
    assert named(None, rest) == rest


@pytest.mark.parametrize(
    "id",
    [
        "",
        str(uuid.UUID(int=7)),
        "ep_y0rsiJrIWNUoEqRMxH0cEIVn",
        "sh-abc-" + "x" * 40,
        "sh-abcdefghijkl-tooshort",
        "sh-abcdefghijkL-" + "x" * 36,
        "sh-abcdefghijkl0-" + "x" * 36,
        "sh-abcdefghijkl-" + "x" * 36 + "\n",
        "xsh-abcdefghijkl-" + "x" * 36,
        "ep_ep_sh-abcdefghijkl-" + "x" * 24,
        "sh-abcdefghijk\u0664-" + "x" * 36,
    ],
)
def test_other_ids_name_none(id: str) -> None:
    assert shard_of(id) is None
    check_shard("abcdefghijkl", id)


@given(st.text(string.ascii_letters + string.digits + "_-", min_size=32, max_size=32))
def test_no_id_of_a_client_or_server_of_before_names_one(rest: str) -> None:
    """They have 36 characters (UUID), 32 (our clients' sids) or 27 (eids); one that names a shard has 37 or more."""
    assert shard_of(rest) is None and shard_of("sh-abcdefghijkl-" + rest[:16]) is None


@pytest.mark.parametrize("name", ["", "abc", "ABCDEFGHIJKL", "abcdefghijk-", "abcdefghijklm", "../../../../"])
def test_what_is_no_name_makes_no_id(name: str) -> None:
    with pytest.raises(InvalidName):
        named(name, "x" * 36)


def test_an_id_of_another_shard_is_refused_with_its_name() -> None:
    mine, other = named("a" * 12, "x" * 36), named("b" * 12, "x" * 36)
    check_shard("a" * 12, mine, "ep_" + mine, "ep_unnamed")
    for own in ("a" * 12, None):
        with pytest.raises(Misdirected) as caught:
            check_shard(own, "unnamed", other)
        assert caught.value.details == {"shard": "b" * 12, "retry_after": 1.0} and caught.value.retryable
    told = Misdirected("b" * 12, "http://b:8000").to_wire()
    assert (told["code"], told["shard"], told["url"]) == ("MISDIRECTED", "b" * 12, "http://b:8000")
    back = error_from_wire(told)
    assert isinstance(back, Misdirected) and back.details["shard"] == "b" * 12 and back.info.http_status == 421


def shards(count: int) -> list[str]:
    return [f"{n:012d}" for n in range(count)]


@given(st.lists(SHARDS, min_size=1, max_size=8, unique=True), SHARDS, st.lists(st.text(max_size=8), max_size=40))
@settings(max_examples=50)
def test_a_shard_more_takes_groups_and_moves_none_between_the_others(
    there: list[str], added: str, groups: list[str]
) -> None:
    before, after = Placement(dict.fromkeys(there, 1.0)), Placement(dict.fromkeys([*there, added], 1.0))
    for group in groups:
        assert after.place(group) in (before.place(group), added)


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_a_shard_more_gets_its_share(count: int) -> None:
    before = Placement(dict.fromkeys(shards(count), 1.0))
    after = Placement(dict.fromkeys(shards(count + 1), 1.0))
    moved = sum(before.place(group) != after.place(group) for group in GROUPS)
    assert (
        abs(moved / len(GROUPS) - 1 / (count + 1)) < 0.05
    )  # five times the standard deviation at most; names are fixed


def test_weights_are_shares() -> None:
    one, two, drained = shards(3)
    placed = Counter(map(Placement({one: 1.0, two: 3.0, drained: 0.0}).place, GROUPS))
    assert set(placed) == {one, two} and abs(placed[two] / len(GROUPS) - 0.75) < 0.05


def test_the_order_of_the_shards_changes_nothing() -> None:
    there = dict(zip(shards(5), (1.0, 2.0, 0.5, 1.0, 4.0), strict=True))
    turned = dict(reversed(there.items()))
    assert [Placement(there).place(group) for group in GROUPS] == [Placement(turned).place(group) for group in GROUPS]


def test_a_placement_stays_as_it_is_over_versions() -> None:
    placement = Placement(dict.fromkeys(shards(4), 1.0))
    assert [placement.place(f"group-{n}")[-1] for n in range(12)] == list("031110303033")


@given(SHARDS, RESTS, st.text(max_size=20))
def test_a_fork_is_where_its_parent_is_also_if_that_shard_gets_no_new_groups(shard: str, rest: str, group: str) -> None:
    placement = Placement(dict.fromkeys(shards(3), 1.0))
    assert placement.place(group, fork_of=named(shard, rest)) == shard
    assert placement.place(group, fork_of="ep_unnamed") == placement.place(group)


@pytest.mark.parametrize(
    "weights", [{}, {"0" * 12: 0.0}, {"0" * 12: -1.0}, {"0" * 12: float("nan")}, {"0" * 12: 1e999}]
)
def test_weights_that_place_nothing_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        Placement(weights)
