"""What a grading decides from its runs: which runs it makes, remembers, and what their results mean. No test runs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from errata_protocol.environment import SnapshotRef
from errata_server.sandbox.base import CommandResult, SandboxSnapshot
from errata_server.sandbox.fake.backend import FakeBackend
from swe_bench_lite_env import SweAction, SweObservation
from swe_bench_lite_env.server import grading, workspaces
from swe_bench_lite_env.server.canaries import Outcome
from swe_bench_lite_env.server.offered import bundled
from swe_bench_lite_env.server.prepare.store import Prepared
from swe_bench_lite_env.server.rubric import rubric

from .sessions import NAME, instance

START = SandboxSnapshot(ref=SnapshotRef("base", "default"))
EMPTY: workspaces.Survey = MappingProxyType({})
TESTS = workspaces.Tests({"tests/test_links.py": {"content": "", "mode": 0o644}}, {})
USABLE = Outcome({"<passes 00>": "PASSED", "<fails 00>": "FAILED"}, 1)


def start() -> Prepared:
    return Prepared(instance(), bundled()[1].find(NAME), "default", START, "/usr/bin/python3", {}, "digest", True)


async def test_a_slow_run_of_the_expected_canaries_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [Outcome({}, None), USABLE]

    async def canaries(*arguments: Any) -> Outcome:
        return shown.pop(0)

    monkeypatch.setattr(grading, "_canaries", canaries)
    backend = FakeBackend()
    found = [await grading._expected_canaries(backend, start(), TESTS, 5, 1.0, False) for _ in range(3)]
    assert found == [None, USABLE, USABLE] and not shown


class Played:
    """Runs of the tests whose results a test says: by test, ``PASSED`` unless it says something else.

    Args:
        results: Of a run with the agent's configuration of the tests.
        plain: Of a run with the base commit's; None: the same.
        survey: What stands in the state.
    """

    def __init__(
        self, results: Mapping[str, str], plain: Mapping[str, str] | None = None, survey: workspaces.Survey = EMPTY
    ) -> None:
        self.results, self.plain, self.survey = results, results if plain is None else plain, survey
        self.canaries: list[bool] = []

    async def run_tests(self, *arguments: Any, more: Any = None, **others: Any) -> workspaces.TestRun:
        results = dict.fromkeys((*instance().fail_to_pass, *instance().pass_to_pass), "PASSED")
        results |= self.results if more is None else self.plain
        log = "".join(f"{status} {test}\n" for test, status in results.items())
        failed = int("FAILED" in results.values())
        return workspaces.TestRun(CommandResult(failed, log, "", 0.1), self.survey)

    async def expected(self, *arguments: Any) -> Outcome:
        self.canaries.append(arguments[-1])
        return USABLE


async def graded(monkeypatch: pytest.MonkeyPatch, played: Played, rules: int = 5) -> grading.Graded:
    async def of_base(*arguments: Any) -> Any:
        return TESTS if len(arguments) == 2 else {}

    async def canaries(*arguments: Any) -> Outcome:
        return USABLE

    monkeypatch.setattr(grading, "tests_of", of_base)
    monkeypatch.setattr(grading, "files_of_base", of_base)
    monkeypatch.setattr(grading, "run_tests", played.run_tests)
    monkeypatch.setattr(grading, "_expected_canaries", played.expected)
    monkeypatch.setattr(grading, "_canaries", canaries)
    return await grading.grade(FakeBackend(), START, start(), rules=rules)


def fractional(found: grading.Graded) -> float:
    """Return the reward of a grading under ``ERRATA_SWE_REWARD=fraction``."""
    rated = rubric("fraction", None)
    rated.graded(found.resolution, found.tampering)
    return rated(SweAction(tool="submit"), SweObservation(tool="submit", done=True))


@pytest.mark.parametrize("skipped", [1, len(instance().fail_to_pass)])
async def test_skipping_the_tests_of_the_bug_earns_nothing_under_rules_4(
    monkeypatch: pytest.MonkeyPatch, skipped: int
) -> None:
    tests = instance().fail_to_pass[:skipped]
    found = await graded(monkeypatch, Played(dict.fromkeys(tests, "SKIPPED")), rules=4)
    assert found.resolved  # as swebench 4.1.0 has it
    assert (found.reward, fractional(found)) == (0.0, 0.0)
    assert len(found.tampering) == 1 and tests[0] in found.tampering[0]


@pytest.mark.parametrize("rules", [5, 4])
async def test_a_skipped_test_that_the_bug_does_not_touch_is_no_tampering(
    monkeypatch: pytest.MonkeyPatch, rules: int
) -> None:
    found = await graded(monkeypatch, Played({instance().pass_to_pass[0]: "SKIPPED"}), rules=rules)
    assert (found.reward, found.tampering, found.canaries) == (1.0, (), "ok")


async def test_a_share_that_passes_only_with_the_agents_configuration_earns_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent's conftest.py reports all tests but one of FAIL_TO_PASS as passed."""
    tests = instance().fail_to_pass
    survey = {"conftest.py": ("configuration", "digest")}
    found = await graded(monkeypatch, Played({tests[0]: "FAILED"}, plain=dict.fromkeys(tests, "FAILED"), survey=survey))
    assert not found.resolved and fractional(found) == 0.0
    assert found.tampering == ("tests pass only with the agent's own configuration of the tests: conftest.py",)


async def test_a_share_that_passes_with_both_configurations_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = instance().fail_to_pass
    played = Played({tests[0]: "FAILED"}, survey={"conftest.py": ("configuration", "digest")})
    found = await graded(monkeypatch, played)
    assert (found.reward, fractional(found), found.tampering) == (0.0, 1 - 1 / len(tests), ())


@pytest.mark.parametrize(
    ("failed", "whole"),
    [(instance().fail_to_pass[:1], True), (instance().fail_to_pass, False), (instance().pass_to_pass[:1], False)],
)
async def test_what_earns_a_share_is_held_against_the_hidden_tests_own_canaries(
    monkeypatch: pytest.MonkeyPatch, failed: tuple[str, ...], whole: bool
) -> None:
    played = Played(dict.fromkeys(failed, "FAILED"))
    await graded(monkeypatch, played)
    assert played.canaries == [whole]
