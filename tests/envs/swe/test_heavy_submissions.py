"""Submissions whose size an agent chose: linear work, off the event loop, within a budget, and a verdict in any case.

The watch on event loops (`tests.loop_watch`) fails each of these tests if something of it runs on the loop.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from errata_protocol.markers import ErrorKind
from errata_server.sandbox.base import Backend, CommandResult
from errata_server.workers import Budget
from swe_bench_lite_env import SweAction
from swe_bench_lite_env.server import grading, patches, readings, workspaces
from swe_bench_lite_env.server.environment import SweBenchLiteEnvironment
from swe_bench_lite_env.server.grading import Graded
from swe_bench_lite_env.server.readings import MOST_CHANGED, NoVerdict, changes, placed
from tests.counted_work import Costs, calls_of

from .test_grading_decisions import Played, graded

FILES = 2_000


class Name(str):
    """A path whose comparisons are counted, which those of texts are not."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return str.__hash__(self)


def program() -> ModuleType:
    """inside/workspace.py as a module."""
    spec = importlib.util.spec_from_file_location("workspace_program", workspaces._SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answered(**found: Any) -> CommandResult:
    answer = {"nonce": "n", "refused": [], "read": {}, "survey": {}, **found}
    return CommandResult(0, f"\n{json.dumps(answer)}\n", "", 0.1)


# -- the survey -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["test", "configuration", "module"])
def test_comparing_surveys_takes_a_few_calls_for_each_file(kind: str) -> None:
    survey = {Name(f"tests/d/test_{n}.py"): (kind, "digest") for n in range(FILES)}
    calls_of(lambda: changes({}, survey, frozenset()), at_most=50 * FILES)
    calls_of(lambda: changes(survey, {}, frozenset()), at_most=50 * FILES)


def test_added_tests_change_nothing_and_every_other_change_is_seen() -> None:
    base = {
        "a_test.py": ("test", "1"),
        "b_test.py": ("test", "1"),
        "conftest.py": ("configuration", "1"),
        "abc.py": ("module", ""),
        "given.py": ("test", "1"),
    }
    survey = {
        "a_test.py": ("test", "2"),
        "c_test.py": ("test", "1"),
        "tox.ini": ("configuration", "1"),
        "ast.py": ("module", ""),
        "given.py": ("test", "2"),
    }
    found = changes(base, survey, {"given.py"})
    assert found == readings.Changes(("a_test.py", "b_test.py"), ("conftest.py", "tox.ini", "ast.py"))


@pytest.mark.parametrize(("bound", "said"), [("most", "more than 99 files"), ("most_bytes", "exceed 99 bytes")])
def test_a_survey_ends_at_its_bounds(tmp_path: Path, bound: str, said: str) -> None:
    inside = program()
    for number in range(200):
        (tmp_path / f"test_{number}.py").touch()
    with pytest.raises(inside.TooMany, match=said):
        inside.survey(str(tmp_path), {**workspaces.SURVEY, bound: 99})
    assert len(inside.survey(str(tmp_path), workspaces.SURVEY)) == 200


def test_a_state_with_too_many_files_has_no_verdict_that_could_pay() -> None:
    with pytest.raises(NoVerdict, match="more than 50000 files"):
        placed(answered(survey={}, excess="more than 50000 files are tests"), "n", {}, frozenset())
    survey = {f"tests/helper_{n}.py": ["configuration", "digest"] for n in range(MOST_CHANGED + 1)}
    with pytest.raises(NoVerdict, match=f"more than {MOST_CHANGED} files"):
        placed(answered(survey=survey), "n", {}, frozenset())
    assert len(placed(answered(survey=survey), "n", {}, set(list(survey)[:1])).changes.configuration) == MOST_CHANGED


def test_caches_are_dropped_in_time_linear_in_the_files(tmp_path: Path) -> None:
    inside = program()
    for number in range(5_000):
        (tmp_path / f"module_{number}.pyc").touch()
    walked = Costs(lambda: list(inside.walk(str(tmp_path))))
    assert not walked.exceed(lambda: inside.drop_caches(str(tmp_path)), times=8)
    assert len(list(tmp_path.iterdir())) == 5_000


def test_a_survey_that_finds_nothing_is_not_one_that_was_not_asked_for() -> None:
    base = {"a_test.py": ("test", "1"), "conftest.py": ("configuration", "1")}
    assert placed(answered(), "n", base, frozenset()).changes == readings.Changes(("a_test.py",), ("conftest.py",))
    not_asked = CommandResult(0, '\n{"nonce": "n", "refused": [], "read": {}}\n', "", 0.1)
    assert placed(not_asked, "n", base, frozenset()).changes == readings.NO_CHANGES


# -- the log ----------------------------------------------------------------------------------------------------------


class Flooding(Played):
    """The agent's state prints what it likes; the start does not."""

    def __init__(self, flood: str) -> None:
        super().__init__({})
        self.flood = flood
        self.states: list[str] = []

    async def run_tests(self, *arguments: Any, more: Any = None, **others: Any) -> workspaces.TestRun:
        run = await super().run_tests(*arguments, more=more, **others)
        self.states.append(arguments[1].ref.id)
        if arguments[1].ref.id != "agents":
            return run
        return replace(run, result=replace(run.result, stdout=self.flood + run.result.stdout))


async def flooded(monkeypatch: pytest.MonkeyPatch, played: Flooding) -> Graded:
    from .test_grading_decisions import AGENTS

    return await graded(monkeypatch, played, state=AGENTS)


async def test_a_flood_of_results_is_read_elsewhere_and_judged_as_any_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MiB: what is kept of 60 MB of distinct lines."""
    flood = "".join(f"PASSED t{n}\n" for n in range(1_200_000))
    assert len(flood) > workspaces.GRADING_LIMITS.keep_bytes
    found = await flooded(monkeypatch, Flooding(flood))
    assert (found.resolved, found.reward) == (True, 1.0)
    assert len(found.resolution.statuses) < 100, "of the agent's lines none is kept"


async def test_a_log_that_exceeds_its_budget_is_not_resolved_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "_BUDGET", Budget(cpu_s=1.0, memory_bytes=600 * 1024**2))
    flood = "".join(f"PASSED t{n}\n" for n in range(8_000_000))
    found = await flooded(monkeypatch, played := Flooding(flood))
    assert (found.resolved, found.reward, found.tampering) == (False, 0.0, ())
    assert "the output of the tests is too large" in found.resolution.invalid
    assert played.states == ["agents", "default"], "the start shows that the machine is sound"


# -- patches ----------------------------------------------------------------------------------------------------------


def hunk(number: int) -> str:
    return f"--- a/f{number}\n+++ b/f{number}\n@@ -1 +1 @@\n-a\n+b\n"


def test_the_refusal_of_a_patch_with_many_hunks_takes_a_few_calls_for_each_line() -> None:
    count = 5_000
    patch = "".join(map(hunk, range(count)))
    refused = "".join(f"error: f{n}: No such file or directory\n" for n in range(count))
    failed = "".join(f"error: patch failed: f{n}:1\nerror: corrupt patch at line {5 * n}\n" for n in range(count))
    for stderr in (refused, failed):
        calls_of(lambda stderr=stderr: patches.refusal(patch, stderr), at_most=200 * count)  # type: ignore[misc]


def test_a_refusal_names_what_is_wrong_in_any_of_many_hunks_and_ends() -> None:
    patch = "".join(map(hunk, range(1_000)))
    text, detection = patches.refusal(patch, "error: f999: No such file or directory\n")
    assert text == "f999: No such file or directory\nnothing was changed"
    assert detection.error_site is not None and detection.error_site.action_span is not None
    assert patch[slice(*detection.error_site.action_span)] == "@@ -1 +1 @@\n-a\n+b"
    text, detection = patches.refusal(patch, "error: corrupt patch at line 4\n")
    assert text.startswith("hunk 1 of f0, line 4 of the patch")
    text, detection = patches.refusal(patch, "".join(f"error: f{n}: wrong type\n" for n in range(1_000)))
    assert len(text.splitlines()) == 202 and len(detection.error_sites) == 20
    assert detection.error_kind is ErrorKind.PATCH_FAILED


# -- arguments and files ----------------------------------------------------------------------------------------------

SIZE = 15 * 1024**2
ARGUMENTS = {
    "run": ("command",),
    "read_file": ("path",),
    "write_file": ("path", "content"),
    "edit": ("path", "old_text", "new_text"),
    "apply_patch": ("patch",),
    "search": ("pattern", "path"),
    "no_such_tool": ("tool",),
}


@pytest.mark.sandbox
async def test_tools_take_arguments_and_files_of_any_size_off_the_event_loop(real: Backend) -> None:
    environment = SweBenchLiteEnvironment()
    await environment.reset_async(seed=1)
    shorts = {
        "command": "x",
        "path": "f",
        "content": "x",
        "old_text": "a",
        "new_text": "b",
        "patch": "x",
        "pattern": "x",
    }

    async def call(**arguments: Any) -> None:
        await asyncio.sleep(0)  # what the test itself computed is no part of the step
        seen = await asyncio.create_task(environment.step_async(SweAction(**arguments)))
        assert len(seen.stderr or "") < 100_000 and len(seen.content or "") < 100_000

    for text in ("a", "../", "\n", "a;", "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n"):
        large = text * (SIZE // len(text))
        for tool, fields in ARGUMENTS.items():
            for field in fields:
                await call(**{"tool": tool, **shorts, field: large})
        await call(tool="write_file", path="f", content=large)
        await call(tool="read_file", path="f", first_line=large.count("\n"))
        await call(tool="edit", path="f", old_text=" \n" * 1_000, new_text="x")
    await environment.aclose()
