"""Cursors and pages of lists of episodes, without a server."""

from __future__ import annotations

import base64
import json
import random
import sys

import pytest

from errata_protocol.episode_lists import (
    EVERY,
    FILTERS,
    NEWEST,
    EpisodeFilter,
    EpisodeOrder,
    ListPlace,
    Pages,
    aggregated,
    check_cursor,
    merged,
    page_query,
    summed,
)
from errata_protocol.errors import InvalidRequest
from errata_protocol.replay import EpisodePage, EpisodeSummary, Origin


def summary(eid: str, **over: object) -> EpisodeSummary:
    return EpisodeSummary.model_validate({"eid": eid, "environment": "e", "session": "s", "created": 1.0, **over})


def shard(held: list[EpisodeSummary], order: EpisodeOrder, asked: list[int] | None = None) -> Pages:
    """Return what answers pages of some episodes, as a server does."""

    def page(limit: int, cursor: str | None) -> EpisodePage:
        if asked is not None:
            asked.append(limit)
        after = order.place_of(cursor) if cursor is not None else None
        found, last = order.page((one for one in held if order.is_after(one, after)), limit)
        return EpisodePage(episodes=found, next=order.cursor(last) if last is not None else None)

    return page


@pytest.mark.parametrize("value", [0.1 + 0.2, -1e-300, 1_700_000_000.123456, 0.0, 1e16, float("inf"), 7])
@pytest.mark.parametrize("eid", ["ep_1", "", "é\U0001f600", "x" * 300])
def test_a_cursor_names_its_place_exactly(value: float, eid: str) -> None:
    for order in (EpisodeOrder("reward"), EpisodeOrder("deliveries", False)):
        text = order.cursor(ListPlace(value, eid))
        assert order.place_of(text) == (value, eid) and check_cursor(text) == text
        assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


@pytest.mark.parametrize("other", [EpisodeOrder(descending=False), EpisodeOrder("last"), EpisodeOrder("reward", False)])
def test_a_cursor_of_another_order_is_refused(other: EpisodeOrder) -> None:
    with pytest.raises(InvalidRequest, match="another list, sorted by created down"):
        other.place_of(NEWEST.cursor(ListPlace(1.0, "e")))


@pytest.mark.parametrize(
    "held",
    ["", "[]", "7", "{}", "null", "[[[", '["created",true,1.0]', '["created",true,NaN,"e"]', '["created",true,"1","e"]',
     '["created",true,false,"e"]', '["created",1,1.0,"e"]', '["name",true,1.0,"e"]', '["created",true,1.0,null]',
     '["created",true,1.0,"e",1]', '[["created"],true,1.0,"e"]', '["created",true,1' + "0" * 400 + ',"e"]',
     "[" * 700, "\udcff"],
)  # fmt: skip
def test_what_is_no_cursor_is_refused(held: str) -> None:
    text = base64.urlsafe_b64encode(held.encode("utf-8", "surrogateescape")).decode().rstrip("=")
    with pytest.raises(InvalidRequest, match="is not a cursor"):
        NEWEST.place_of(text)


@pytest.mark.parametrize("text", ["=", "é", "a b", "****", "A" * 2000, "QUFB\n"])
def test_what_is_no_base64_is_no_cursor(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a cursor"):
        check_cursor(text)


def test_a_cursor_without_padding_and_one_with_other_spaces_are_read() -> None:
    text = base64.urlsafe_b64encode(json.dumps(["created", True, 1, "e"]).encode()).decode().rstrip("=")
    assert NEWEST.place_of(text) == (1.0, "e")


@pytest.mark.parametrize(
    "order",
    [
        NEWEST, EpisodeOrder("reward"), EpisodeOrder("deliveries", False), EpisodeOrder("errors"),
        EpisodeOrder.of("errors", True, EpisodeFilter(error_kind="a")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("limit", [1, 3, 50])
def test_pages_of_several_servers_have_each_episode_once_in_order(order: EpisodeOrder, limit: int) -> None:
    chance = random.Random(3)
    every = [
        summary(
            f"ep_{n}", created=float(chance.randrange(5)), reward=chance.choice((0.0, 1.0)), deliveries=n % 4,
            error_kinds={kind: count for kind in "ab" if (count := chance.randrange(4))},
        )
        for n in range(30)
    ]  # fmt: skip
    shards: list[list[EpisodeSummary]] = [[], [], [], []]
    for one in every:
        shards[chance.randrange(3)].append(one)  # the last one has none
    asked: list[int] = []
    found: list[str] = []
    cursor: str | None = None
    for pages in range(1, 40):
        page = merged([shard(held, order, asked) for held in shards], order, limit, cursor)
        assert len(asked) == pages * len(shards), "each is asked once a page"
        found += [one.eid for one in page.episodes]
        cursor = page.next
        if cursor is None:
            break
    assert found == [one.eid for one in order.page(every, 99)[0]] and len(set(found)) == 30


def test_a_merged_page_that_is_the_last_says_so() -> None:
    two = [shard([summary("a")], NEWEST), shard([summary("b")], NEWEST)]
    page = merged(two, NEWEST, 2, None)
    assert [one.eid for one in page.episodes] == ["b", "a"] and page.next is None
    assert merged(two, NEWEST, 1, None).next == NEWEST.cursor(ListPlace(1.0, "b"))
    assert merged([], NEWEST, 1, None) == EpisodePage(episodes=[])
    with pytest.raises(InvalidRequest):
        merged([], NEWEST, 1, "x")


def test_a_filter_without_fields_matches_all_and_each_field_can_refuse() -> None:
    one = summary("ep_A", episode_id="Mine", task="sort", status="done", reward=1.0, created=10.0, last=20.0,
                  error_kinds={"timeout": 1}, group="g", step=3, run="r", origin=Origin(eid="p", t=1))  # fmt: skip
    assert EVERY.matches(one) and EpisodeFilter.of({}) == EVERY
    holds = {
        "environment": "e", "task": "sort", "status": "done", "error_kind": "timeout", "episode_id": "Mine",
        "text": "MINE", "reward_min": 1.0, "reward_max": 1.0, "created_from": 10.0, "created_before": 10.5,
        "last_from": 20.0, "last_before": 20.5, "group": "g", "step": 3, "run": "r",
        "origin": "p",
    }  # fmt: skip
    fails = {
        "environment": "f", "task": "sor", "status": "open", "error_kind": "time", "episode_id": "mine",
        "text": "none", "reward_min": 1.5, "reward_max": 0.5, "created_from": 10.5, "created_before": 10.0,
        "last_from": 20.5, "last_before": 20.0, "group": "G", "step": 0, "run": "s",
        "origin": "ep_A",
    }  # fmt: skip
    assert holds.keys() == fails.keys() == set(FILTERS)
    assert EpisodeFilter.of(holds).matches(one) and EpisodeFilter.of(holds).parameters() == holds
    for name, value in fails.items():
        assert not EpisodeFilter.of({**holds, name: value}).matches(one), name
    assert not EpisodeFilter(text="\u212ailo").matches(summary("kilo")), "the Kelvin sign is no K of A to Z"
    assert EpisodeFilter(last_from=1.0).matches(summary("x")) and not EpisodeFilter(last_from=2.0).matches(summary("x"))


def test_a_query_of_the_default_order_is_as_earlier_servers_take_it() -> None:
    assert page_query(5, None, {"environment": "e", "error_kind": None}, EVERY, NEWEST) == {
        "limit": 5, "cursor": None, "environment": "e",
    }  # fmt: skip
    found = page_query(5, "c", {"error_kind": "b"}, EpisodeFilter(error_kind="a"), EpisodeOrder("last", False))
    assert found == {"limit": 5, "cursor": "c", "error_kind": "b", "sort": "last", "order": "asc"}


def test_errors_are_counted_of_the_kind_that_a_list_is_filtered_by() -> None:
    one = summary("e", error_kinds={"a": 2, "b": 3})
    kind = EpisodeFilter(error_kind="b")
    assert EpisodeOrder("errors").place(one) == EpisodeOrder.of("errors", True, EVERY).place(one) == (5, "e")
    assert EpisodeOrder.of("errors", False, kind).place(one) == (3, "e")
    assert EpisodeOrder.of("errors", True, kind).place(summary("f")) == (0, "f")
    assert EpisodeOrder.of("reward", True, kind) == EpisodeOrder("reward")
    assert EpisodeOrder.of_query({"error_kind": "a"}) == NEWEST
    assert EpisodeOrder.of_query({"sort": "errors", "order": "asc", "error_kind": "a"}) == EpisodeOrder(
        "errors", False, "a"
    )


def test_aggregates_of_shards_sum_to_those_of_all() -> None:
    chance = random.Random(4)
    every = [
        summary(
            f"ep_{n}", created=chance.uniform(0, 500), reward=chance.choice((0.0, 0.25, 1.0)), deliveries=n % 4,
            status=chance.choice(("done", "open")), error_kinds={chance.choice("ab"): n}, hint_keys={"k": 1},
        )
        for n in range(60)
    ]  # fmt: skip
    parts = [aggregated(every[n::4], 100) for n in range(4)]
    whole = aggregated(every, 100)
    assert summed(parts) == whole and summed([aggregated([], 100), *parts[::-1]]) == whole
    assert [bucket.start for bucket in whole.buckets] == [0, 100, 200, 300, 400]
    assert sum(bucket.episodes for bucket in whole.buckets) == 60
    assert sum(bucket.done for bucket in whole.buckets) == sum(one.status == "done" for one in every)
    assert sum(bucket.error_kinds.get("a", 0) for bucket in whole.buckets) == sum(
        one.error_kinds.get("a", 0) for one in every
    )
    assert parts[0] == aggregated(every[0::4], 100), "a sum leaves its parts as they are"
    with pytest.raises(InvalidRequest, match="different lengths"):
        summed([whole, aggregated(every, 50)])


def test_an_episode_belongs_to_the_bucket_that_it_began_in() -> None:
    edges = [0.0, 9.999, 10.0, 1_700_000_000.0, 1_700_000_009.999999]
    found = aggregated([summary(f"{n}", created=edge) for n, edge in enumerate(edges)], 10)
    assert [(b.start, b.episodes) for b in found.buckets] == [(0, 2), (10, 1), (1_700_000_000, 2)]


def test_a_sum_of_rewards_beyond_a_double_can_be_sent() -> None:
    high, low = summary("a", reward=float("inf")), summary("b", reward=float("-inf"))
    assert aggregated([high, high], 1).buckets[0].reward == sys.float_info.max
    assert aggregated([high, low], 1).buckets[0].reward == 0.0
