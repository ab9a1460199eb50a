"""Which states are asked about, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from errata_protocol.rollouts import ErrorMarker
from errata_trainer import Call, Rollout, Turn, state_of_turns
from errata_trainer.rollouts.transcript import MALFORMED
from errata_trainer.teachers import Action, ask_of, choose, surprisal

ERROR = ErrorMarker(error_kind="path_not_found", severity="error")
WARNING = ErrorMarker(error_kind="output_truncated", severity="warning")


def rollout(*calls: tuple[Call, ...], **more: Any) -> Rollout:
    turns = tuple(Turn(index, 2 * index, 2 * index + 2, made) for index, made in enumerate(calls))
    ids = tuple(range(2 * len(calls)))
    return Rollout((0,), ids, (1,) * len(ids), turns, **{"eid": "e", **more})


FINE = rollout((Call("run", {}, 1),), (Call("run", {}, 2),))
FAILS_LATE = rollout((Call("run", {}, 1),), (Call("run", {}, 2, ERROR),), (Call("run", {}, 3, ERROR),))
FAILS_FIRST = rollout((Call("run", {}, 1, ERROR),), (Call("run", {}, 2, WARNING),))
LOST = rollout((Call("run", {}, 1, ERROR),), lost="the machine broke")
ALL = [FINE, FAILS_LATE, FAILS_FIRST, LOST]


def places(found: list[Any]) -> list[tuple[int, int]]:
    return [(site.rollout, site.turn.index) for site in found]


def test_error_sites_are_asked_about_the_first_of_each_rollout_first() -> None:
    assert places(choose(ALL)) == [(1, 1), (2, 0), (1, 2)]
    assert places(choose(ALL, most=2)) == [(1, 1), (2, 0)]


def test_all_are_all_but_those_of_lost_rollouts() -> None:
    assert places(choose(ALL, "all")) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (1, 2)]


def test_the_least_sure_turns_come_first_by_their_surprisal_or_by_given_entropies() -> None:
    sampled = rollout((), (), logprobs=(-1.0, -0.5, -3.0, -1.0))
    assert surprisal(sampled, sampled.turns[1]) == 2.0
    assert places(choose([FINE, sampled], "entropy")) == [(1, 1), (1, 0)], "without log-probabilities there is none"
    assert places(choose([FINE, sampled], "entropy", scores=[[0.1, None], [0.3, 0.1]])) == [(1, 0), (0, 0), (1, 1)]


def test_a_value_gap_is_the_trainers_to_tell() -> None:
    assert places(choose([FINE], "value_gap", scores=[[0.0, 1.0]], most=1)) == [(0, 1)]
    with pytest.raises(ValueError):
        choose([FINE], "value_gap")
    with pytest.raises(ValueError):
        choose([FINE], "best")  # type: ignore[arg-type]


@given(st.lists(st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]), min_size=3, max_size=3), max_size=4))
def test_a_choice_of_fewer_is_the_beginning_of_a_choice_of_more(scores: list[list[float | None]]) -> None:
    rollouts = [FAILS_LATE] * len(scores)
    whole = choose(rollouts, "entropy", scores=scores)
    assert [site.score for site in whole] == sorted((s for row in scores for s in row if s is not None), reverse=True)
    for most in range(len(whole) + 1):
        assert choose(rollouts, "entropy", scores=scores, most=most) == whole[:most]


def test_the_state_of_a_turn_is_the_delivery_before_its_first_one() -> None:
    made = rollout(
        (Call("run", {}, 1), Call("run", {}, 2)),
        (Call("fly", {}),),
        (Call("fly", {}), Call("run", {}, 3)),
        (Call("run", {}, 7),),
        (),
    )
    assert state_of_turns(made) == {0: 0, 1: 2, 2: 2, 3: 6, 4: 7}
    assert set(state_of_turns(rollout((Call("run", {}, 1),), eid=None)).values()) == {None}


def test_an_ask_has_the_students_action_and_the_turns_before_it() -> None:
    site = choose([FAILS_LATE], most=1)[0]
    asked = ask_of(site, FAILS_LATE, text="hm", transcript=[{"role": "user", "content": "a"}])
    assert asked.student == Action.of_calls(FAILS_LATE.turns[1].calls, "hm")
    assert (asked.eid, asked.t, asked.turns, asked.tag) == ("e", 1, FAILS_LATE.turns[:1], (0, 1))
    malformed = rollout((Call(MALFORMED, {}, None, ERROR),))
    assert ask_of(choose([malformed])[0], malformed).student is None
