"""What the registry of a fleet knows of its members, without Ray."""

from __future__ import annotations

import pytest

from errata_ray.members import HEARD_S, Claim, Members, Record, Report, version_of


def serving(members: Members, slot: int, life: str, node: str, shard: str, now: float = 0.0) -> str:
    report = Report(life, node, shard, f"http://{node}:{slot}", True)
    return members.report(slot, report, now)


def fleet(is_shared: bool = False) -> Members:
    members = Members(2, is_shared)
    assert members.claim(0, "life-0", "n0", [], {"n0", "n1"}) == Claim()
    assert members.claim(1, "life-1", "n1", [], {"n0", "n1"}) == Claim()
    assert serving(members, 0, "life-0", "n0", "s0") == "serve"
    assert serving(members, 1, "life-1", "n1", "s1") == "serve"
    return members


def states(members: Members, now: float = 0.0) -> dict[str, str]:
    return {one.shard: one.state for one in members.records(now)}


def test_a_local_shard_is_lost_once_its_node_is_dead_and_its_slot_goes_on_with_another() -> None:
    members = fleet()
    members.see_nodes({"n0", "n1"})
    assert states(members) == {"s0": "up", "s1": "up"}
    members.see_nodes({"n0"})
    assert states(members) == {"s0": "up", "s1": "lost"}
    assert members.claim(1, "life-2", "n0", ["s0"], {"n0"}) == Claim(), "s0 is another keeper's"
    assert serving(members, 1, "life-2", "n0", "s2") == "serve"
    assert states(members) == {"s0": "up", "s2": "up", "s1": "lost"}
    assert serving(members, 1, "life-1", "n1", "s1") == "end", "its node was only away, and its shard is lost"
    members.see_nodes({"n1"})
    assert members.claim(1, "life-3", "n1", ["s1"], {"n1"}) == Claim(), "what is lost is not served again"


def test_a_local_shard_is_not_lost_while_its_node_is_alive() -> None:
    members = fleet()
    claim = members.claim(1, "life-2", "n0", ["s0"], {"n0", "n1"})
    assert "n1" in claim.wait and states(members) == {"s0": "up", "s1": "up"}
    assert states(members, HEARD_S + 1) == {"s0": "down", "s1": "down"}
    assert members.claim(1, "life-3", "n1", ["s1"], {"n0", "n1"}) == Claim("s1")


def test_a_local_shard_whose_directory_is_gone_from_its_node_is_lost() -> None:
    members = fleet()
    assert members.claim(1, "life-2", "n1", [], {"n0", "n1"}) == Claim()
    assert states(members) == {"s0": "up", "s1": "lost"}


def test_a_shared_shard_waits_for_its_next_keeper_and_comes_back_elsewhere() -> None:
    members = fleet(is_shared=True)
    members.see_nodes({"n0"})
    assert states(members) == {"s0": "up", "s1": "down"}
    assert members.claim(1, "life-2", "n0", ["s0", "s1"], {"n0"}) == Claim("s1")
    assert serving(members, 1, "life-1", "n1", "s1") == "end", "the keeper of before has it no more"
    assert "n1" in members.claim(1, "life-1", "n1", ["s0", "s1"], {"n0"}).wait, "nor is it given to that one again"
    assert serving(members, 1, "life-2", "n0", "s1") == "serve"
    assert states(members) == {"s0": "up", "s1": "up"}
    assert {one.shard: one.url for one in members.records(0.0)}["s1"] == "http://n0:1"


def test_two_keepers_are_given_different_directories() -> None:
    members = Members(3, True)
    found = ["a", "b"]
    claims = [members.claim(slot, f"life-{slot}", "n0", found, {"n0"}) for slot in range(3)]
    assert claims == [Claim("a"), Claim("b"), Claim()]


def test_a_keeper_that_drains_is_told_so_until_it_is_undone() -> None:
    members = fleet()
    assert members.drain("s1", True) and not members.drain("s9", True)
    assert serving(members, 1, "life-1", "n1", "s1") == "drain"
    assert states(members) == {"s0": "up", "s1": "draining"}
    members.report(1, Report("life-1", "n1", "s1", "http://n1:1", is_up=False), 0.0)
    ended = next(one for one in members.records(0.0) if one.shard == "s1")
    assert (ended.state, ended.is_drained) == ("down", True)
    assert members.drain("s1", False) and serving(members, 1, "life-1", "n1", "s1") == "serve"


def test_a_new_registry_knows_what_one_keeper_has_read_of_the_one_before() -> None:
    before = fleet()
    before.drain("s0", True)
    before.see_nodes({"n0"})
    before.claim(1, "life-2", "n0", [], {"n0"})
    serving(before, 1, "life-2", "n0", "s2")
    known = before.records(0.0)
    after = Members(2, False)
    after.learn(known)
    assert states(after) == {"s0": "down", "s2": "down", "s1": "lost"}, "no member is missing meanwhile"
    assert serving(after, 1, "life-2", "n0", "s2") == "serve"
    assert after.report(0, Report("life-0", "n0", "s0", "http://n0:0", True), 0.0) == "drain"
    after.learn(known)
    assert states(after) == {"s0": "draining", "s2": "up", "s1": "lost"}
    assert after.claim(0, "life-9", "n0", ["s0", "s2"], {"n0"}) == Claim("s0"), "a directory stays with its slot"


def test_a_registry_that_knows_less_than_the_node_lets_no_keeper_serve_another_shard() -> None:
    after = Members(1, False)
    after.learn([Record(0, "s0", "http://a:1", "n0", "up")])
    assert serving(after, 0, "life-1", "n0", "s1") == "end"


def test_a_version_changes_with_the_members_only() -> None:
    one, other = fleet(), fleet()
    assert version_of(one.records(0.0)) == version_of(other.records(5.0))
    assert version_of(one.records(0.0)) != version_of(one.records(HEARD_S + 1))


@pytest.mark.parametrize("is_shared", [False, True])
def test_two_keepers_that_begin_at_once_do_not_keep_one_directory(is_shared: bool) -> None:
    members = Members(2, is_shared)
    assert members.claim(0, "life-0", "n0", [], {"n0"}) == Claim()
    assert members.claim(1, "life-1", "n0", ["s0"], {"n0"}) == Claim("s0"), "the first has made it, and not reported it"
    assert serving(members, 0, "life-0", "n0", "s0") == "end"
    assert serving(members, 1, "life-1", "n0", "s0") == "serve"
    assert members.claim(0, "life-0", "n0", ["s0"], {"n0"}) == Claim(), "a fresh one"
    assert serving(members, 0, "life-0", "n0", "s1") == "serve"
    assert states(members) == {"s1": "up", "s0": "up"}
