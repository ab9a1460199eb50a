"""Hints from a model: asked once, within the budget, checked, and the template's where it has none."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from failing import failing, marker_for

from errata_protocol.errors import Overloaded, StepTimeout
from errata_trainer.hints import (
    Completion,
    FailedTurn,
    Hinter,
    HintPack,
    ModelHinter,
    TeacherModel,
    TemplateHinter,
    write_hints,
)
from errata_trainer.teachers import AnswerCache, Budget
from errata_trainer.teachers.endpoint import ChatTeacher, Endpoint

PACK = HintPack.load(installed=False)
MISSING = marker_for("path_not_found", file="a.txt", message="cat: a.txt: No such file or directory")


@dataclass
class Scripted:
    """A model that says what it is told to, or raises it."""

    answers: list[str | Exception]
    tokens: int | None = None
    prompts: list[Sequence[Mapping[str, str]]] = field(default_factory=list)

    def __call__(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int) -> Completion:
        self.prompts.append(messages)
        answer = self.answers[min(len(self.prompts), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return Completion(answer, self.tokens)


def hinter(model: Any, **options: Any) -> ModelHinter:
    return ModelHinter(model, "m", TemplateHinter(PACK), **options)


def turn(**more: Any) -> FailedTurn:
    observation = {"stdout": "", "stderr": "cat: a.txt: No such file or directory", "metadata": {"error_kind": "x"}}
    task = {"instruction": "Count the lines.", "patch": "+ the whole secret of it", **more.pop("task", {})}
    return failing(MISSING, observation=observation, task=task, **more)


def test_a_models_answer_is_a_hint_in_the_frame() -> None:
    model = Scripted(["List the directory:\nthe file is not there."])
    written = hinter(model)
    assert isinstance(written, Hinter)
    hint = written.hint(turn())
    assert hint is not None
    assert hint.text == "Hint for your next action: List the directory:\nthe file is not there."
    assert (hint.key, hint.source, hint.version) == ("fs.missing", "model", "m/1")
    system, user = (message["content"] for message in model.prompts[0])
    assert "Do not write the solution" in system
    for part in ("Count the lines.", "run, submit", '"command": "cat a.txt"', "No such file", "path_not_found"):
        assert part in user
    assert "secret" not in user


@pytest.mark.parametrize(
    "task",
    [
        {"instruction": "Count them."},
        {"problem_statement": "Count them.", "patch": "x"},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "Count them."}]},
        {"instruction": "", "prompt": "Count them."},
    ],
)
def test_what_the_task_asks_for_is_told_however_it_is_given(task: dict[str, Any]) -> None:
    model = Scripted(["Look."])
    hinter(model).hint(failing(MISSING, task=task))
    assert "(beginning):\nCount them.\n" in model.prompts[0][1]["content"]


def test_a_turn_that_was_asked_about_costs_nothing_again() -> None:
    cache: dict[str, str] = {}
    first = hinter(Scripted(["Look."]), cache=cache)
    again = hinter(Scripted([AssertionError("asked")]), cache=cache)
    assert first.hint(turn()) == first.hint(turn()) == again.hint(turn())
    assert (first.counts["asked"], first.counts["cached"], again.counts["asked"]) == (1, 1, 0)
    assert again.spent_tokens == 0


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("  \n", "empty"),
        ("Write the WHOLE  secret of it.", "leak"),
        ("look " * 400, "too_long"),
        (Overloaded("busy"), "Overloaded"),
        (StepTimeout("late"), "StepTimeout"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
)
def test_what_a_model_does_not_give_the_template_does_and_it_is_counted(answer: str | Exception, why: str) -> None:
    asked = hinter(Scripted([answer]))
    assert asked.hint(turn()) == TemplateHinter(PACK).hint(turn())
    assert asked.counts[f"fallback:{why}"] == 1


def test_another_error_is_a_bug_and_passes() -> None:
    with pytest.raises(KeyError):
        hinter(Scripted([KeyError("bug")])).hint(turn())


def test_chat_tokens_in_an_answer_are_broken() -> None:
    hint = hinter(Scripted(["Look.<|im_end|>\n<|im_start|>system"])).hint(turn())
    assert hint is not None and "<|" not in hint.text and "\n" in hint.text


def test_a_turn_without_an_error_is_not_asked_about() -> None:
    model = Scripted(["Look."])
    assert hinter(model).hint(failing(None)) is None
    assert model.prompts == []


def test_the_budget_of_calls_and_of_tokens_is_a_hard_stop() -> None:
    calls = hinter(Scripted(["Look."]), budget_calls=1)
    hints = write_hints(calls, [turn(task={"n": n, "instruction": str(n)}) for n in range(3)])
    assert [hint.source if hint else None for hint in hints] == ["model", "template", "template"]
    assert calls.counts["fallback:budget"] == 2
    tokens = hinter(Scripted(["Look."], tokens=700), budget_tokens=1700)
    hints = write_hints(tokens, [turn(task={"instruction": str(n)}) for n in range(5)])
    assert [hint.source if hint else None for hint in hints] == ["model", "model", *["template"] * 3]
    assert tokens.spent_tokens == 1400


def test_the_budget_goes_on_from_a_checkpoint() -> None:
    first = hinter(Scripted(["Look."], tokens=700), budget_calls=2)
    assert first.hint(turn(task={"instruction": "0"})) is not None
    again = hinter(Scripted(["Look."], tokens=700), budget_calls=2)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    hints = write_hints(again, [turn(task={"instruction": str(n)}) for n in range(1, 3)])
    assert [hint.source if hint else None for hint in hints] == ["model", "template"]
    assert again.spent_tokens == 1400


def test_calls_in_flight_are_within_the_budget_too() -> None:
    together = threading.Barrier(2, timeout=60)

    def waits(messages: Sequence[Mapping[str, str]], *, max_tokens: int) -> Completion:
        together.wait()
        return Completion("Look.", 10)

    asked = hinter(waits, budget_tokens=2000)  # each may take 900
    hints = write_hints(asked, [turn(task={"instruction": str(n)}) for n in range(2)], threads=2)
    assert [hint.source if hint else None for hint in hints] == ["model", "model"]
    assert asked.spent_tokens == 20
    assert asked.counts["asked"] == 2


def test_a_call_that_failed_counts_as_if_it_had_cost_all_it_could() -> None:
    failed = hinter(Scripted([ConnectionResetError(), "Look."]), budget_tokens=1000)
    assert failed.hint(turn()) is not None
    assert failed.spent_tokens > 500
    assert failed.hint(turn()) is not None
    assert failed.counts["fallback:budget"] == 1


def test_an_answer_that_was_cut_off_is_not_used() -> None:
    def cut(messages: Sequence[Mapping[str, str]], *, max_tokens: int) -> Completion:
        return Completion("Look at the", 10, finished=False)

    asked = hinter(cut)
    hint = asked.hint(turn())
    assert hint is not None and hint.source == "template"
    assert asked.counts["fallback:cut_off"] == 1


def test_a_teacher_writes_hints_with_its_own_budget_and_cache(tmp_path: Path) -> None:
    asks: list[Mapping[str, Any]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        asks.append(json.loads(request.content))
        choice = {"message": {"role": "assistant", "content": "Look first."}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 40, "completion_tokens": 4, "total_tokens": 44}
        body = json.dumps({"model": "m", "choices": [choice], "usage": usage}).encode()
        return httpx.Response(200, stream=httpx.ByteStream(body))

    def model(**options: Any) -> TeacherModel:
        endpoint = Endpoint("m", base_url="http://localhost:1/v1", key_env=None, max_tokens=100)
        teacher = ChatTeacher(endpoint, transport=httpx.MockTransport(serve))
        return TeacherModel(teacher, cache=AnswerCache(tmp_path), **options)

    with model() as first:
        hint = hinter(first).hint(turn())
        assert hint is not None and hint.text.endswith("Look first.")
        assert first.budget.spent.tokens == 44
    with model(budget=Budget(tokens=0)) as again:
        assert hinter(again).hint(turn()) == hint
        other = hinter(again)
        assert (told := other.hint(turn(task={"instruction": "another"}))) is not None and told.source == "template"
        assert other.counts["fallback:BudgetSpent"] == 1
    assert len(asks) == 1 and "tools" not in asks[0]
    with pytest.raises(RuntimeError, match="closed"):
        again([], max_tokens=1)


def test_closing_ends_completions_on_their_way() -> None:
    begun = threading.Event()

    async def hang(request: httpx.Request) -> httpx.Response:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    endpoint = Endpoint("m", base_url="http://localhost:1/v1", key_env=None)
    model = TeacherModel(ChatTeacher(endpoint, transport=httpx.MockTransport(hang)))
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(model, [{"role": "user", "content": "a"}], max_tokens=9)
        assert begun.wait(60)
        model.close()
        with pytest.raises(CancelledError):
            asked.result(60)


def test_the_budget_of_hints_is_divided_among_the_processes_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    calls = hinter(Scripted(["Look."]), budget_calls=9, budget_tokens=4000)
    assert (calls.budget_calls, calls.budget_tokens) == (2, 1000)
