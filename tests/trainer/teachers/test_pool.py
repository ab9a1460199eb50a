"""The pool: submits at once, loses no pair, hangs on nothing, and ends clean."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from errata_protocol.errors import LocalProtocolError
from errata_trainer.teachers import (
    Action,
    Answer,
    AnswerCache,
    Ask,
    Ballot,
    Budget,
    FakeTeacher,
    Prompt,
    Prompter,
    RawCall,
    Spend,
    TeacherBroken,
    TeacherPool,
    ToolCall,
    message_of,
    preferences,
    reward_post,
    says,
)
from terminal_env import SPEC

PROMPTER = Prompter(SPEC.tools)
LS, PWD = says("run", command="ls"), says("run", command="pwd")


def ask(number: int = 0, command: str = "cat", **more: Any) -> Ask:
    student = Action((ToolCall("run", {"command": command}),))
    return Ask(student, transcript=({"role": "user", "content": f"state {number}"},), tag=number, **more)


def teachers(*scripts: Any) -> list[FakeTeacher]:
    return [FakeTeacher(script, name=f"t{number}") for number, script in enumerate(scripts)]


def run(pool: TeacherPool, *asks: Ask) -> list[Ballot]:
    with pool:
        return pool.submit(asks or [ask()]).result(60)


def test_teachers_that_agree_in_other_words_give_a_pair() -> None:
    (ballot,) = run(TeacherPool(teachers(says("run", command="ls 'a'"), says("run", command="ls   a"), PWD), PROMPTER))
    (preference,) = preferences(ballot)
    assert preference.chosen == Action((ToolCall("run", {"command": "ls 'a'"}),)), "the first of them, in its words"
    assert preference.rejected == ballot.ask.student
    assert (preference.weight, preference.tag) == (1.0, 0)
    assert len(set(preference.votes.values())) == 2
    assert ballot.margin == pytest.approx(-2 / 3)


def test_a_student_that_could_not_be_parsed_is_rejected_by_its_tokens() -> None:
    (ballot,) = run(TeacherPool(teachers(LS, LS), PROMPTER), Ask(None, transcript=({"role": "user", "content": "a"},)))
    assert preferences(ballot)[0].rejected is None


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (lambda prompt: TeacherBroken("500"), "server_error"),
        (lambda prompt: "hang", "deadline"),
        (lambda prompt: 1 / 0, "error"),
        (says("fly"), "unknown_tool"),
        (says("run"), "wrong_arguments"),
        (Answer(calls=(RawCall("run", "{"),)), "invalid_json"),
        (Answer(calls=(RawCall("run", "[]"),)), "wrong_arguments"),
        (Answer(calls=(RawCall("run", '{"command": ' + '{"a":' * 5000),)), "invalid_json"),
        (Answer(), "empty"),
        (Answer("partly", finish_reason="length"), "truncated"),
        (Answer("no", finish_reason="content_filter"), "refused"),
    ],
)
def test_a_teacher_that_fails_is_a_missing_vote_with_a_reason(script: Any, reason: str) -> None:
    pool = TeacherPool(teachers(LS, script, LS), PROMPTER, deadline_s=2 if reason == "deadline" else 50)
    (ballot,) = run(pool)
    assert ballot.failures == {"t1": reason}
    assert (ballot.vote.reason, len(ballot.vote.pairs)) == ("consensus", 1)
    assert pool.metrics()[f"teachers/failed/{reason}"] == 1


def test_submitting_does_not_wait_and_results_come_in_the_order_of_the_asks() -> None:
    gate = threading.Event()

    def slow(prompt: Prompt) -> Answer:
        gate.wait(60)
        return LS

    with TeacherPool(teachers(slow, LS), PROMPTER) as pool:
        batch = pool.submit([ask(number) for number in range(5)])
        assert not batch.done
        with pytest.raises(TimeoutError):
            batch.result(0.01)
        assert pool.metrics()["teachers/waiting"] == 5
        gate.set()
        assert [ballot.ask.tag for ballot in batch.result(60)] == [0, 1, 2, 3, 4]
        metrics = pool.metrics()
    assert (metrics["teachers/states"], metrics["teachers/pairs"], metrics["teachers/waiting"]) == (5, 5, 0)


def test_the_same_state_is_asked_about_once_and_never_again_from_a_cache(tmp_path: Any) -> None:
    first = teachers(LS, LS)
    for teacher in first:
        teacher._script = lambda prompt: says("run", command="ls", spent=Spend(0.1, 5))
    pool = TeacherPool(first, PROMPTER, cache=AnswerCache(tmp_path))
    run(pool, *(ask(0) for _ in range(8)))
    assert [len(teacher.asked) for teacher in first] == [1, 1], "eight rollouts begin in one state"
    again = TeacherPool(teachers(PWD, PWD), PROMPTER, cache=AnswerCache(tmp_path), budget=Budget(usd=0))
    (ballot,) = run(again, ask(0))
    assert preferences(ballot)[0].chosen == Action((ToolCall("run", {"command": "ls"}),))
    assert (again.budget.spent, again.metrics()["teachers/cached"]) == (Spend(), 2)


def test_a_failure_is_not_cached(tmp_path: Any) -> None:
    cache = AnswerCache(tmp_path)
    run(TeacherPool(teachers(lambda prompt: TeacherBroken("500")), PROMPTER, cache=cache))
    (ballot,) = run(TeacherPool(teachers(LS), PROMPTER, cache=cache, min_agree=1))
    assert ballot.vote.pairs


@pytest.mark.parametrize("useless", [Answer(""), says("no_such_tool"), Answer("no", finish_reason="content_filter")])
def test_an_answer_that_is_no_vote_is_not_cached(tmp_path: Any, useless: Answer) -> None:
    cache = AnswerCache(tmp_path)
    run(TeacherPool(teachers(useless), PROMPTER, cache=cache))
    (ballot,) = run(TeacherPool(teachers(LS), PROMPTER, cache=cache, min_agree=1))
    assert ballot.vote.pairs


def test_the_budget_stops_the_last_states_first() -> None:
    pair = [
        FakeTeacher(lambda p: says("run", command="ls", spent=Spend(0.1, 1)), name=name, bound=Spend(0.1, 1))
        for name in "ab"
    ]
    pool = TeacherPool(pair, PROMPTER, budget=Budget(usd=0.6))
    ballots = run(pool, *(ask(number) for number in range(5)))
    assert [bool(ballot.vote.pairs) for ballot in ballots] == [True, True, True, False, False]
    assert pool.budget.spent.usd == pytest.approx(0.6)
    assert pool.metrics()["teachers/failed/budget"] == 4


def test_more_than_may_wait_is_skipped_and_counted() -> None:
    pool = TeacherPool(teachers(LS, LS), PROMPTER, most_waiting=2)
    ballots = run(pool, *(ask(number) for number in range(3)))
    assert [ballot.vote.reason for ballot in ballots] == ["consensus", "consensus", "queue_full"]
    assert pool.metrics()["teachers/skipped/queue_full"] == 1


def test_a_state_that_nobody_can_read_is_skipped() -> None:
    pool = TeacherPool(teachers(LS, LS), PROMPTER)
    assert run(pool, Ask(None, eid="e", t=3))[0].vote.reason == "no_state"


def test_without_asks_or_teachers_a_batch_ends_at_once() -> None:
    with TeacherPool([], PROMPTER) as pool:
        assert pool.submit([]).result(60) == []
        assert pool.submit([ask()]).result(60)[0].vote.reason == "no_teachers"


def test_a_call_that_nobody_waits_for_any_more_is_ended_and_counted_as_spent() -> None:
    hanging = FakeTeacher(lambda prompt: "hang", name="hangs", bound=Spend(0.5, 7))
    with TeacherPool([hanging], PROMPTER, deadline_s=0.2) as pool:
        pool.submit([ask(), ask()]).result(60)
        assert len(hanging.asked) == 1
    assert (pool.budget.reserved, pool.budget.spent) == (Spend(), Spend(0.5, 7))


def test_closing_ends_what_hangs_and_gives_every_batch_its_result() -> None:
    pool = TeacherPool(teachers(lambda prompt: "hang", LS), PROMPTER)
    batch = pool.submit([ask(), ask(1)])
    pool.close()
    pool.close()
    assert [ballot.vote.reason for ballot in batch.result(0)] == ["closed", "closed"]
    assert not [thread for thread in threading.enumerate() if thread.name == "teachers"]
    with pytest.raises(LocalProtocolError):
        pool.submit([ask()])


def test_a_pool_that_was_never_used_has_no_thread() -> None:
    before = threading.active_count()
    with TeacherPool(teachers(LS), PROMPTER):
        assert threading.active_count() == before


def test_families_and_ties_are_the_votes() -> None:
    pair = [FakeTeacher(LS, name="a", family="x"), FakeTeacher(LS, name="b", family="x")]
    assert run(TeacherPool(pair, PROMPTER, one_per_family=True))[0].vote.reason == "too_few_teachers"
    tied = TeacherPool(teachers(PWD, LS), PROMPTER, min_agree=1, tie_break="first")
    assert preferences(run(tied)[0])[0].chosen.calls[0].arguments == {"command": "pwd"}


@pytest.mark.parametrize(
    "options", [{"deadline_s": 0}, {"most_waiting": 0}, {"min_agree": 0}, {"tie_break": "?"}, {"names": "same"}]
)
def test_options_without_meaning_are_refused(options: dict[str, Any]) -> None:
    names = ("a", "a") if options.pop("names", None) else ("a", "b")
    with pytest.raises(ValueError):
        TeacherPool([FakeTeacher(LS, name=name) for name in names], PROMPTER, **options)


def test_an_action_is_rendered_by_a_students_chat_template() -> None:
    calls = [{"type": "function", "function": {"name": "run", "arguments": {"command": "ls"}}}]
    action = Action((ToolCall("run", {"command": "ls"}),), "I think")
    assert message_of(action) == {"role": "assistant", "content": "", "tool_calls": calls}
    assert message_of(action, with_text=True)["content"] == "I think"
    assert message_of(Action(text="42")) == {"role": "assistant", "content": "42"}


def test_a_vote_is_posted_under_an_id_of_its_own_and_a_skip_without_votes_is_not() -> None:
    pool = TeacherPool(teachers(LS, LS, PWD), PROMPTER)
    one, same, other = run(pool, ask(0, eid="e", t=3), ask(0, eid="e", t=3), ask(0, "pwd", eid="e", t=3))
    posts = [reward_post(ballot) for ballot in (one, same, other)]
    assert posts[0] == posts[1]
    assert posts[0] is not None and posts[2] is not None
    assert posts[0].reward_id.startswith("teachers:3:consensus:2of3:")
    assert posts[0].reward_id != posts[2].reward_id
    assert (posts[0].t, posts[0].source) == (3, "teachers")
    assert (posts[0].value, posts[2].value) == (pytest.approx(-2 / 3), pytest.approx(-1 / 3))
    assert reward_post(run(TeacherPool([], PROMPTER), ask(0, eid="e", t=3))[0]) is None
