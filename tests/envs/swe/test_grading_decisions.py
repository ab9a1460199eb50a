"""What a grading decides from its runs: which runs it makes, remembers, and what their results mean. No test runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import CommandResult, SandboxSnapshot
from errata_server.sandbox.fake.backend import FakeBackend
from swe_bench_lite_env import SweAction, SweObservation
from swe_bench_lite_env.server import grading, workspaces
from swe_bench_lite_env.server.canaries import Outcome
from swe_bench_lite_env.server.offered import bundled
from swe_bench_lite_env.server.prepare.store import Prepared
from swe_bench_lite_env.server.readings import Changes
from swe_bench_lite_env.server.rubric import rubric

from .sessions import NAME, instance

START = SandboxSnapshot(ref=SnapshotRef("base", "default"))
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
        results: Results of a run with the agent's configuration of the tests.
        plain: Results of a run with the base commit's configuration; None if they are the same.
        configuration: Files that the state has changed.
    """

    def __init__(
        self, results: Mapping[str, str], plain: Mapping[str, str] | None = None, configuration: tuple[str, ...] = ()
    ) -> None:
        self.results, self.plain = results, results if plain is None else plain
        self.changes = Changes(configuration=configuration)
        self.canaries: list[bool] = []

    async def run_tests(self, *arguments: Any, more: Any = None, **others: Any) -> workspaces.TestRun:
        results = dict.fromkeys((*instance().fail_to_pass, *instance().pass_to_pass), "PASSED")
        results |= self.results if more is None else self.plain
        log = "".join(f"{status} {test}\n" for test, status in results.items())
        failed = int("FAILED" in results.values())
        return workspaces.TestRun(CommandResult(failed, log, "", 0.1), self.changes)

    async def expected(self, *arguments: Any) -> Outcome:
        self.canaries.append(arguments[-1])
        return USABLE


async def sound_canaries(*arguments: Any) -> Outcome:
    return USABLE


async def graded(
    monkeypatch: pytest.MonkeyPatch,
    played: Played,
    *,
    rules: int = 5,
    state: SandboxSnapshot = START,
    canaries: Callable[..., Awaitable[Outcome]] = sound_canaries,
) -> grading.Graded:
    async def of_base(*arguments: Any) -> Any:
        return TESTS if len(arguments) == 2 else {}

    monkeypatch.setattr(grading, "tests_of", of_base)
    monkeypatch.setattr(grading, "files_of_base", of_base)
    monkeypatch.setattr(grading, "run_tests", played.run_tests)
    monkeypatch.setattr(grading, "_expected_canaries", played.expected)
    monkeypatch.setattr(grading, "_canaries", canaries)
    return await grading.grade(FakeBackend(), state, start(), rules=rules)


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
    played = Played({tests[0]: "FAILED"}, plain=dict.fromkeys(tests, "FAILED"), configuration=("conftest.py",))
    found = await graded(monkeypatch, played)
    assert not found.resolved and fractional(found) == 0.0
    assert found.tampering == ("tests pass only with the agent's own configuration of the tests: conftest.py",)


async def test_a_share_that_passes_with_both_configurations_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = instance().fail_to_pass
    played = Played({tests[0]: "FAILED"}, configuration=("conftest.py",))
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


AGENTS = SandboxSnapshot(ref=SnapshotRef("layer", "agents"))


class Barring(Played):
    """As `Played`, where the tests cannot be put in place in the agent's state.

    Args:
        barred: Which runs on that state: ``all``, those with the base commit's ``configuration``, or ``none``.
        everywhere: On the start and with the gold patch neither.
    """

    def __init__(self, barred: str, *, everywhere: bool = False) -> None:
        super().__init__({}, configuration=("conftest.py",))
        self.barred, self.everywhere, self.states = barred, everywhere, list[str]()

    async def run_tests(self, *arguments: Any, more: Any = None, **others: Any) -> workspaces.TestRun:
        self.states.append(arguments[1].ref.id)
        applies = self.barred == "all" or (self.barred == "configuration" and more is not None)
        if applies and (arguments[1] is AGENTS or self.everywhere):
            raise workspaces.Unplaceable(">>>>> Start Test Output", timed_out=False)
        return await super().run_tests(*arguments, more=more, **others)


async def test_a_state_that_bars_the_tests_is_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Barring("all")
    found = await graded(monkeypatch, played, state=AGENTS)
    assert played.states == ["agents", "default"]  # the start shows that the machine is sound
    assert (found.resolved, found.reward, fractional(found), found.canaries) == (False, 0.0, 0.0, "none")
    assert found.resolution.invalid == ">>>>> Start Test Output" and not found.resolution.statuses


async def test_a_machine_that_bars_the_tests_everywhere_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFailed, match="cannot be graded here"):
        await graded(monkeypatch, Barring("all", everywhere=True), state=AGENTS)


async def test_a_state_that_bars_the_base_commits_configuration_is_tampered_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = await graded(monkeypatch, Barring("configuration"), state=AGENTS)
    assert found.resolved and found.reward == 0.0
    assert found.tampering == ("the base commit's configuration of the tests cannot be put in place: conftest.py",)


async def test_a_state_that_bars_the_canaries_is_tampered_with(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []

    async def canaries(backend: Any, state: SandboxSnapshot, *others: Any) -> Outcome:
        states.append(state.ref.id)
        if state is AGENTS:
            raise workspaces.Unplaceable("no answer", timed_out=True)
        return USABLE

    found = await graded(monkeypatch, Played({instance().pass_to_pass[0]: "FAILED"}), state=AGENTS, canaries=canaries)
    assert states == ["agents", "default"]
    assert (found.canaries, found.tampering) == ("wrong", ("wrong canaries: they cannot be put in place",))


async def test_canaries_that_cannot_be_put_in_place_on_our_own_state_are_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def canaries(*arguments: Any) -> Outcome:
        raise workspaces.Unplaceable("no answer", timed_out=True)

    monkeypatch.setattr(grading, "_canaries", canaries)
    with pytest.raises(EnvironmentFailed, match="no answer"):
        await grading._expected_canaries(FakeBackend(), start(), TESTS, 5, 1.0, False)


async def test_a_start_that_cannot_be_read_is_the_machines_fault() -> None:
    # The fake backend has no Python.
    with pytest.raises(EnvironmentFailed, match="could not be put in place"):
        await workspaces.files_of_base(FakeBackend(), start(), ("conftest.py",))
    with pytest.raises(EnvironmentFailed, match="does not apply"):
        await workspaces.tests_of(FakeBackend(), start())
    with pytest.raises(workspaces.Unplaceable):
        await workspaces.run_tests(FakeBackend(), START, start(), TESTS, files={}, timeout_s=1)
