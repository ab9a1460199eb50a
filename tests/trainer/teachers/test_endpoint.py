"""A chat endpoint over a real socket: one call ends in time, costs what is counted, and never tells the key."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from errata_trainer.teachers import (
    Action,
    AnswerCache,
    AnswerInvalid,
    Ask,
    Budget,
    BudgetSpent,
    KeyMissing,
    Prompt,
    Prompter,
    Spend,
    TeacherBroken,
    TeacherBusy,
    TeacherFailed,
    TeacherHungUp,
    TeacherPool,
    TeacherRefused,
    TeacherTimeout,
    TeacherUnreachable,
    ToolCall,
)
from errata_trainer.teachers.endpoint import ChatTeacher, Endpoint, retry_after_s
from terminal_env import SPEC

from .misbehaving import ANSWER_TOKENS, PROMPT_TOKENS, MisbehavingServer

KEY = "sk-or-v1-0123456789abcdef"
PROMPT = Prompt(({"role": "user", "content": "what now?"},))
PROMPTER = Prompter(SPEC.tools)
ASK = Ask(Action((ToolCall("run", {"command": "pwd"}),)), transcript=({"role": "user", "content": "list"},))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", KEY)


@pytest.fixture(scope="module")
def server() -> Iterator[MisbehavingServer]:
    with MisbehavingServer() as server:
        yield server


def endpoint(server: MisbehavingServer, model: str, **options: Any) -> Endpoint:
    chosen = {"first_wait_s": 0.01, "deadline_s": 5.0, "usd_per_million_prompt": 1.0, "usd_per_million_answer": 1.0}
    return Endpoint(model, base_url=server.url, key_env="A_KEY", **{**chosen, **options})


async def ask(server: MisbehavingServer, model: str, budget: Budget | None = None, **options: Any) -> Any:
    teacher = ChatTeacher(endpoint(server, model, **options))
    try:
        return await teacher.ask(PROMPT, budget if budget is not None else Budget())
    finally:
        await teacher.aclose()


async def test_an_answer_has_its_calls_and_costs_what_its_tokens_do(server: MisbehavingServer) -> None:
    budget = Budget(usd=1)
    answer = await ask(server, "x/good", budget, temperature=0.5, extra={"tool_choice": "auto"})
    assert answer.action() == Action((ToolCall("run", {"command": "ls"}),))
    tokens = PROMPT_TOKENS + ANSWER_TOKENS
    assert budget.spent == answer.spent == Spend(pytest.approx(tokens / 1e6), tokens)
    headers, body = server.requests[-1]
    assert headers["authorization"] == f"Bearer {KEY}"
    assert body["temperature"] == 0.5
    assert body["tool_choice"] == "auto"


async def test_a_cost_that_the_endpoint_tells_is_the_cost(server: MisbehavingServer) -> None:
    assert (await ask(server, "priced")).spent.usd == 0.25


@pytest.mark.parametrize(
    ("model", "error", "calls"),
    [
        ("broken", TeacherBroken, 3),
        ("busy-for-long", TeacherBusy, 1),
        ("busy-inside", TeacherBusy, 3),
        ("denies", TeacherRefused, 1),
        ("no-json", AnswerInvalid, 1),
        ("no-choice", AnswerInvalid, 1),
        ("drops", TeacherHungUp, 3),
        ("floods", AnswerInvalid, 1),
        ("streams", AnswerInvalid, 1),
    ],
)
async def test_a_failure_has_its_type_and_is_tried_again_where_that_can_help(
    server: MisbehavingServer, model: str, error: type[TeacherFailed], calls: int
) -> None:
    before = server.asked[model]
    with pytest.raises(error):
        await ask(server, model, attempts=3)
    assert server.asked[model] - before == calls


@pytest.mark.parametrize("model", ["hangs", "trickles"])
async def test_the_deadline_is_of_the_whole_call(server: MisbehavingServer, model: str) -> None:
    with pytest.raises(TeacherTimeout, match=r"had no answer within 0\.5 s"):  # a client of HTTP has other words
        await ask(server, model, deadline_s=0.5)


async def test_a_server_that_heals_is_asked_again(server: MisbehavingServer) -> None:
    assert (await ask(server, "heals")).calls


async def test_retry_after_is_waited_for(server: MisbehavingServer) -> None:
    teacher = ChatTeacher(endpoint(server, "busy", concurrency=1))
    begun = time.monotonic()
    await teacher.ask(PROMPT, Budget())
    assert time.monotonic() - begun >= 0.2
    assert server.asked["busy"] == 2
    await teacher.aclose()


async def test_nobody_there_is_free_and_tried_again() -> None:
    budget = Budget(tokens=100_000)
    teacher = ChatTeacher(Endpoint("m", base_url="http://127.0.0.1:9/v1", key_env=None, attempts=2, first_wait_s=0.01))
    with pytest.raises(TeacherUnreachable):
        await teacher.ask(PROMPT, budget)
    assert budget.spent == Spend()
    await teacher.aclose()


async def test_a_call_that_tells_no_cost_counts_in_full_and_a_refused_one_not(server: MisbehavingServer) -> None:
    budget = Budget(usd=1)
    with pytest.raises(TeacherRefused):
        await ask(server, "denies", budget)
    assert budget.spent == Spend()
    with pytest.raises(AnswerInvalid):
        await ask(server, "no-json", budget)
    assert budget.spent.tokens > 1024
    assert budget.reserved.tokens == 0


async def test_no_call_is_made_that_may_not_fit_the_budget(server: MisbehavingServer) -> None:
    before = server.asked["good"]
    with pytest.raises(BudgetSpent):
        await ask(server, "good", Budget(tokens=500))
    assert server.asked["good"] == before


async def test_calls_at_once_and_calls_a_minute_have_bounds(server: MisbehavingServer) -> None:
    server.release.set()
    teacher = ChatTeacher(endpoint(server, "bounded/slow", concurrency=2, per_minute=600))
    begun = time.monotonic()
    await asyncio.gather(*(teacher.ask(PROMPT, Budget()) for _ in range(6)))
    assert time.monotonic() - begun >= 0.5
    assert server.most_at_once["bounded/slow"] <= 2
    await teacher.aclose()


def test_the_key_is_in_no_log_error_repr_cache_or_metric(
    server: MisbehavingServer, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("httpcore.http11").setLevel(logging.INFO)  # at DEBUG it writes down what servers' headers say
    teachers = [ChatTeacher(endpoint(server, model)) for model in ("repeats-the-key", "denies", "broken", "good")]
    with TeacherPool(teachers, PROMPTER, cache=AnswerCache(tmp_path), min_agree=1, deadline_s=20) as pool:
        (ballot,) = pool.submit([ASK]).result(60)
        told = [repr(ballot), repr(pool.metrics()), *(repr(vars(teacher)) for teacher in teachers), caplog.text]
    assert "repeats-the-key" in ballot.actions
    files = [path.read_text() for path in tmp_path.rglob("*.json")]
    assert len(files) == 2
    assert not [text for text in (*told, *files) if KEY in text]


async def test_an_error_does_not_repeat_the_key(server: MisbehavingServer) -> None:
    with pytest.raises(TeacherRefused) as caught:
        await ask(server, "denies")
    assert KEY not in f"{caught.value!r} {caught.value}"
    assert "[key]" in str(caught.value)


def test_a_missing_key_is_told_at_once(monkeypatch: pytest.MonkeyPatch, server: MisbehavingServer) -> None:
    for value in (None, "", "a\x7fb", "ä"):
        monkeypatch.delenv("A_KEY") if value is None else monkeypatch.setenv("A_KEY", value)
        with pytest.raises(KeyMissing, match="A_KEY") as caught:
            ChatTeacher(endpoint(server, "m"))
        assert not value or value not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"base_url": "ftp://x"},
        {"base_url": "https://me:secret@x/v1"},
        {"model": ""},
        {"attempts": 0},
        {"deadline_s": 0},
    ],
)
def test_an_endpoint_without_meaning_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        Endpoint(**{"model": "m", **options})
    assert "secret" not in str(caught.value)


def test_money_needs_prices(server: MisbehavingServer) -> None:
    teacher = ChatTeacher(endpoint(server, "good", usd_per_million_answer=None))
    with pytest.raises(ValueError, match="prices"):
        TeacherPool([teacher], PROMPTER, budget=Budget(usd=1))
    TeacherPool([teacher], PROMPTER, budget=Budget(tokens=1)).close()


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after_s("2.5") == 2.5
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after_s("-3") == 0
    assert [retry_after_s(text) for text in (None, "soon", "nan", "inf")] == [None] * 4


BAD = ["broken", "busy-for-long", "hangs", "no-json", "no-arguments", "wrong-tool", "streams", "trickles", "drops"]


@pytest.mark.parametrize("bad", BAD)
def test_one_bad_teacher_costs_its_vote_and_nothing_else(server: MisbehavingServer, bad: str) -> None:
    teachers = [
        ChatTeacher(endpoint(server, model, name=name, deadline_s=deadline_s, attempts=2))
        for name, model, deadline_s in (("one", "good", 50), ("bad", bad, 0.6), ("two", "good", 50))
    ]
    with TeacherPool(teachers, PROMPTER, deadline_s=50) as pool:
        (ballot,) = pool.submit([ASK]).result(60)  # by the bad one's deadline; the pool's and the good ones' come later
    assert ballot.vote.reason == "consensus"
    assert ballot.vote.pairs[0].chosen.raw == Action((ToolCall("run", {"command": "ls"}),))
    assert list(ballot.failures) == ["bad"]


def test_a_batch_ends_at_its_deadline_with_the_votes_that_are_there(server: MisbehavingServer) -> None:
    models = ("good", "good", "hangs")
    teachers = [ChatTeacher(endpoint(server, m, name=f"{n}", deadline_s=60)) for n, m in enumerate(models)]
    with TeacherPool(teachers, PROMPTER, deadline_s=3) as pool:
        (ballot,) = pool.submit([ASK]).result(60)
    assert (ballot.vote.reason, dict(ballot.failures)) == ("consensus", {"2": "deadline"})


def test_a_budget_is_not_exceeded_by_many_states_at_once(server: MisbehavingServer) -> None:
    teachers = [ChatTeacher(endpoint(server, "priced", name=name, concurrency=8)) for name in "abc"]
    budget = Budget(usd=2.0, tokens=40_000)
    asks = [Ask(ASK.student, transcript=({"role": "user", "content": f"state {n}"},)) for n in range(30)]
    before = server.asked["priced"]
    with TeacherPool(teachers, PROMPTER, budget=budget, deadline_s=30) as pool:
        ballots = pool.submit(asks).result(60)
        metrics = pool.metrics()
    bound_usd = 0.25  # the endpoint charges more than its prices say, so what is in flight is exceeded by
    assert budget.spent.usd <= 2.0 + 24 * bound_usd
    assert budget.spent.tokens <= 40_000
    assert budget.reserved.tokens == 0
    assert metrics["teachers/failed/budget"] == 90 - (server.asked["priced"] - before) > 0
    assert len(ballots) == 30
