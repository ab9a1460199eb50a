"""Differences between two answers: where, how, and the likely cause; what is normalised before and what is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from errata_protocol.differences import Cause, differences, normalised, summary


def only(was: Any, now: Any) -> Any:
    (found,) = differences({"observation": {"x": was}}, {"observation": {"x": now}})
    assert found.where.startswith("$.observation.x")
    return found


def test_a_long_text_shows_a_window_around_the_first_character_that_differs() -> None:
    head = "Traceback (most recent call last):\n  " + "x" * 5000
    found = only(head + "['math', 'os']" + "y" * 500, head + "['os', 'math']" + "y" * 500)
    assert f"from character {len(head) + 2} on" in found.how
    assert "'math', 'os'" in found.how and "'os', 'math'" in found.how
    assert "Traceback" not in found.how and "\n" not in found.how and len(found.how) < 300


def test_every_field_that_differs_is_listed_with_its_path() -> None:
    was = {"observation": {"a": [{"b": 1}], "c": 1.0, "k k": None}, "reward": 1.0, "done": False}
    now = {"observation": {"a": [{"b": 2}], "c": 1, "new": 3}, "reward": 0.5, "done": True}
    found = {d.where: d.how for d in differences(was, now)}
    assert found == {
        "$.observation.a[0].b": "was 1 and is 2",
        '$.observation["k k"]': "was null and is not there any more",
        "$.observation.new": "was not there and is 3",
        "$.reward": "was 1.0 and is 0.5",
        "$.done": "was false and is true",
    }
    assert summary(differences(was, now), most=2).endswith("; 3 more")


def test_metadata_stands_twice_in_a_payload_and_is_told_once() -> None:
    was = {"observation": {"metadata": {"a": 1, "b": {"c": 1}}}, "metadata": {"a": 1, "b": {"c": 1}}}
    now = {"observation": {"metadata": {"a": 2, "b": {"c": 2}}}, "metadata": {"a": 2, "b": {"c": 2}}}
    assert [d.where for d in differences(was, now)] == ["$.metadata.a", "$.metadata.b.c"]
    assert [d.where for d in differences({"observation": was["observation"]}, {"observation": now["observation"]})] == [
        "$.observation.metadata.a",
        "$.observation.metadata.b.c",
    ]


def test_numbers_are_compared_by_value_and_a_bool_is_no_number() -> None:
    assert differences({"a": 1}, {"a": 1.0}) == []
    assert len(differences({"a": True}, {"a": 1})) == 1
    assert len(differences({"a": [0]}, {"a": [0, 1]})) == 1 and "had 1 items and has 2" in only([0], [0, 1]).how


@pytest.mark.parametrize(
    ("was", "now", "cause"),
    [
        ("<X object at 0x7f1122334455>", "<X object at 0x7f9922334455>", Cause.ADDRESS),
        ("0x7f1122334455", "0x7f9922334455", Cause.ADDRESS),
        ("took 0.03 s", "took 0.1 s", Cause.TIME),
        ("at 2026-11-23T03:17:16Z", "at 2026-11-23 03:18:00.5", Cause.TIME),
        ("id 8b1a9953-c461-4296-a827-abf8c47804d7", "id 0b1a9953-c461-4296-a827-abf8c47804d0", Cause.IDENTIFIER),
        ("in /tmp/tmpab12", "in /tmp/tmpxy34", Cause.IDENTIFIER),
        ("imports are: ['math', 're', 'os']", "imports are: ['os', 'math', 're']", Cause.ORDER),
        (["a", "b"], ["b", "a"], Cause.ORDER),
        (1.8e9 + 5.5, 1.8e9 + 9.5, Cause.TIME),
        (1.8e12, 1.8e12 + 50, Cause.TIME),
        (12345, 12399, None),
        (0.25, -0.75, None),
        ("you win", "you lose", None),
        ("a", "b", None),
        (None, 1, None),
        (["a", "a"], ["a", "b"], None),
    ],
)
def test_a_cause_is_told_only_where_the_values_show_it(was: Any, now: Any, cause: Cause | None) -> None:
    found = differences({"x": was}, {"x": now})
    assert found[0].cause is cause


@pytest.mark.parametrize("name", ["execution_time", "elapsed", "duration_s", "took_ms", "timestamp", "created_at"])
def test_a_number_is_a_time_by_its_fields_name(name: str) -> None:
    assert differences({name: 0.1}, {name: 0.2})[0].cause is Cause.TIME


@pytest.mark.parametrize("name", ["runtimes", "score", "steps", "items", "status", "evaluation"])
def test_a_number_of_another_name_is_none(name: str) -> None:
    assert differences({name: 0.1}, {name: 0.2})[0].cause is None


# -- normalising -------------------------------------------------------------------------------------------------------

EQUAL = [
    ("<function f at 0x7f1122334455>", "<function f at 0x7f9922334455>"),
    ("<bound method X.f of <X object at 0x7f1122334455>>", "<bound method X.f of <X object at 0x7f9922334400>>"),
    ("<weakref at 0x7f1122334455; to 'X' at 0x7f1122334400>", "<weakref at 0x7faa22334455; to 'X' at 0x7fbb22334400>"),
    ("{'a', 'b', 'it\\'s'}", "{'b', 'it\\'s', 'a'}"),
    ('x = frozenset({1, -2.5, None, "q\'"})\n', 'x = frozenset({"q\'", None, 1, -2.5})\n'),
    ("<a at 0x7f1122334455> <a at 0x7f1122334455>", "<a at 0x7f9922334455> <a at 0x7f9922334455>"),
]
DIFFERENT = [
    ("<a at 0x7f1122334455> <a at 0x7f1122334455>", "<a at 0x7f1122334455> <a at 0x7f9922334455>"),  # one object, two
    ("0x7f1122334455", "0x7f9922334455"),  # a number somebody printed
    ("jump at 0x00401000 taken", "jump at 0x00402000 taken"),
    ("jump at 0x00401000, taken", "jump at 0x00402000, taken"),
    ("['a', 'b']", "['b', 'a']"),
    ("{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}"),
    ("{'a', 'b'}", "{'a', 'c'}"),
    ("{'a', 'b'}", "{'a', 'b', 'b'}"),
    ("{'ab', 'c'}", "{'a', 'bc'}"),
    ("{a, b}", "{b, a}"),
    ("<f at 0x7f1122334455>", "<g at 0x7f1122334455>"),
]


@pytest.mark.parametrize(("was", "now"), EQUAL)
def test_addresses_in_reprs_and_the_order_of_printed_sets_do_not_count(was: str, now: str) -> None:
    assert normalised({"a": [was]}) == normalised({"a": [now]})


@pytest.mark.parametrize(("was", "now"), DIFFERENT)
def test_everything_else_counts(was: str, now: str) -> None:
    assert normalised({"a": was}) != normalised({"a": now})


def test_one_object_in_two_fields_stays_one_object() -> None:
    one, other = "<a at 0x7f1122334455>", "<a at 0x7f9922334455>"
    assert normalised({"a": one, "b": one}) == normalised({"b": other, "a": other})
    assert normalised({"a": one, "b": one}) != normalised({"a": one, "b": other})


def test_normalising_leaves_its_argument_alone() -> None:
    value = {"b": ["<a at 0x7f1122334455>"], "a": "{2, 1}"}
    before = json.dumps(value)
    normalised(value)
    assert json.dumps(value) == before
