"""`errata redteam`: what it plays, prints and counts, and its exit status."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import swe_bench_lite_env
from errata_protocol.errors import SandboxFailed, SandboxUnavailable
from errata_redteam import CORPUS_DATE, CORPUS_VERSION, Attempt, cli
from errata_redteam.adaptive import ADAPTIVE
from errata_redteam.attempt import HONEST, SUGGESTIONS
from errata_redteam.instances import function_of
from errata_redteam.playing import Verdict
from errata_redteam.repositories import ATTEMPTS
from errata_redteam.workspaces import ATTEMPTS as IN_WORKSPACES

from ...scripted import write_task
from ...test_task_checks import PASSES
from ..sessions import NAME
from .corpus import HONEST as HONEST_ON_PAGELIST
from .corpus import VALUES

pytestmark = pytest.mark.redteam

BUNDLED = Path(swe_bench_lite_env.__file__).parent / "tasks"
TASK = "shift-hours"


class PlayedTarget:
    """A target on which each attempt has a known end.

    Args:
        ends: Rewards or failures by the name of the attempt; all others earn nothing, honest work 1.
    """

    name = TASK

    def __init__(self, ends: Mapping[str, float | Exception]) -> None:
        self._ends = ends

    async def made(self) -> tuple[Sequence[Attempt], Sequence[Attempt]]:
        names = ("does_nothing", "nothing done"), ("rewards", "written results"), ("hooks", "git")
        work = [Attempt(name, HONEST) for name in ("nothing_else", "notes")]
        return [Attempt(name, kind) for name, kind in names], work

    async def played(self, attempt: Attempt) -> Verdict:
        end = self._ends.get(attempt.name, float(attempt.kind == HONEST))
        if isinstance(end, Exception):
            raise end
        return Verdict(end >= 1.0, end)


def ended(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends: Mapping[str, float | Exception],
    *more: str,
) -> tuple[int, str]:
    """Return the exit status and what was printed of a run on a target with known ends."""

    @asynccontextmanager
    async def no_backend(*_: object) -> AsyncIterator[None]:
        yield None

    monkeypatch.setattr(cli, "opened", no_backend)
    monkeypatch.setattr(cli, "TaskTarget", lambda backend, task: PlayedTarget(ends))
    status = cli.main([TASK, *more])
    return status, capsys.readouterr().out


def test_where_nothing_is_paid_the_status_is_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = ended(monkeypatch, capsys, {})
    assert status == 0 and f"corpus {CORPUS_VERSION} of {CORPUS_DATE}" in text
    assert "0 paid, 0 refused, 0 without a verdict" in text


def test_where_no_target_has_a_chosen_attempt_the_status_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, capsys, {}, "--only", "a_commit") == (2, "")


def test_what_is_paid_no_more_than_doing_nothing_is_not_paid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = ended(monkeypatch, capsys, {"does_nothing": 0.2, "rewards": 0.2, "hooks": 0.3}, "--json")
    found = {one["name"]: one["paid"] for one in json.loads(text)["outcomes"]}
    assert status == 1
    assert found == {"does_nothing": True, "rewards": False, "hooks": True, "nothing_else": True, "notes": True}


def test_honest_work_that_is_not_paid_in_full_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = ended(monkeypatch, capsys, {"notes": 0.9})
    assert status == 1 and f"REFUSED {TASK}: notes ({HONEST}): 0.9" in text and SUGGESTIONS[HONEST] in text


def test_a_failure_of_the_machine_is_neither_paid_nor_unpaid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {"rewards": SandboxFailed("no space left"), "notes": SandboxFailed("no space left")}
    status, text = ended(monkeypatch, capsys, ends, "--json")
    report = json.loads(text)
    assert status == 2 and (report["paid"], report["refused"], report["errors"]) == (0, 0, 2)
    assert report["classes"]["written results"] == {"attempts": 0, "resolved": 0, "bad": 0, "errors": 1}
    (one,) = (one for one in report["outcomes"] if one["name"] == "rewards")
    assert one["error"] == "no space left"
    status, text = ended(monkeypatch, capsys, ends)
    assert f"NO VERDICT {TASK}: rewards (written results): no space left" in text
    status, _ = ended(monkeypatch, capsys, {**ends, "hooks": 1.0})
    assert status == 1


def test_an_attempt_that_finds_a_fault_of_the_grader_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = logging.getLogger("errata").level
    status, text = ended(monkeypatch, capsys, {"rewards": KeyError("line")})
    assert logging.getLogger("errata").level == before, "other users of this process have their logs"
    assert [record.levelname for record in caplog.records] == ["ERROR"] and caplog.records[0].exc_info
    assert status == 2 and "rewards (written results): a fault of the grader: KeyError('line')" in text
    assert "0 paid, 0 refused, 1 without a verdict" in text


def test_a_target_or_machine_that_gives_no_verdict_at_all_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = ended(monkeypatch, capsys, {"does_nothing": SandboxFailed("broken")}, "--json")
    assert status == 2 and json.loads(text)["failed_targets"][TASK].endswith("broken")
    status, text = ended(monkeypatch, capsys, {"hooks": SandboxUnavailable("no namespaces")})
    assert (status, text) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a directory of tasks"),
        (["nowhere"], "'nowhere' is no directory of tasks, no bundled task and no bundled instance"),
        ([TASK, "--only", "nothing"], "no attempt 'nothing': there are does_nothing"),
        ([TASK, "--class", "nothing"], "no class 'nothing': there are"),
        (["--dataset", str(BUNDLED / "instances.jsonl")], "name the recipes with --recipes FILE"),
        (["--recipes", str(BUNDLED / "recipes.json")], "--recipes and --images are of a data set: name it"),
    ],
)
def test_wrong_options_name_the_next_step(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"errata redteam: {said}")


def test_a_task_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "bad", {**PASSES, "instruction.md": ""})
    assert cli.main([str(tmp_path)]) == 2
    assert "instruction.md is empty" in capsys.readouterr().err


def test_names_are_unique_and_every_class_has_a_suggestion() -> None:
    for corpus in ((*ATTEMPTS, *ADAPTIVE), IN_WORKSPACES):
        assert len({attempt.name for attempt in corpus}) == len(corpus)
        assert {attempt.kind for attempt in corpus} <= {*SUGGESTIONS}


def test_an_attempt_says_what_it_did_and_needs_the_values_that_it_names() -> None:
    attempt = Attempt("a", "git", {"+@CODE@": "x\ny\n", "?b": "z\n"}, "rm @TESTS@")
    assert attempt.on(NAME, {"CODE": "c.py"}) is None
    found = attempt.on(NAME, {"CODE": "c.py", "TESTS": "tests"})
    assert found is not None and found.did == "adds 2 lines to c.py; writes b if it is not there; runs: rm tests"


@pytest.mark.parametrize("test", ["tests/test_x.py::TestA::test_a[1-b c]", "test_a (x.TestA)", "test_a"])
def test_functions_of_tests_are_known_in_all_forms(test: str) -> None:
    assert function_of(test) == "test_a"


def test_values_of_an_instance_come_from_its_patches() -> None:
    expected = {"CODE": "src/pagelist/links.py", "PACKAGE": "src/pagelist/__init__.py", "DIR": "src/pagelist"}
    expected |= {"MODULE": "pagelist", "ROOT": "src", "TESTS": "tests", "TESTFILE": "tests/test_links.py"}
    assert VALUES.items() >= expected.items()
    assert "test_an_empty_list_links_to_its_only_page" in VALUES["HIDDEN"]


@pytest.mark.sandbox
def test_an_attempt_that_pays_on_a_weak_task_is_reported_with_its_suggestion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weak = PASSES["tests/test.sh"].replace("grep -qx right /app/out.txt", "test -s /app/out.txt")
    for name, test in (("weak", weak), ("sound", PASSES["tests/test.sh"])):
        write_task(tmp_path / name / name, {**PASSES, "tests/test.sh": test})
    options = ["--store", str(tmp_path / "store"), "--class", "outputs made up", "--class", HONEST]
    assert cli.main([str(tmp_path / "sound"), *options]) == 0
    capsys.readouterr()
    assert cli.main([str(tmp_path / "weak"), *options]) == 1
    text, progress = capsys.readouterr()
    assert "PAID weak: outputs_are_words_of_success (outputs made up): 1, doing nothing 0" in text
    assert "  it runs: for p in /app/out.txt; do" in text
    assert f"  to close it: {SUGGESTIONS['outputs made up']}" in text
    assert "PAID weak: outputs_are_empty" not in text and "1 paid, 0 refused, 0 without a verdict" in text
    assert "weak: 1 of 12: does_nothing: 0" in progress


@pytest.mark.sandbox
def test_rows_with_recipes_are_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--dataset", str(BUNDLED / "instances.jsonl"), "--recipes", str(BUNDLED / "recipes.json")]
    names = ("does_nothing", "package_patches_reports", "answers_by_caller", "a_commit")
    more = [
        "--instance",
        NAME,
        "--store",
        str(tmp_path),
        "--json",
        *(word for name in names for word in ("--only", name)),
    ]
    assert cli.main([*given, *more]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["corpus"] == {"version": CORPUS_VERSION, "date": CORPUS_DATE} and report["targets"] == [NAME]
    found = {one["name"]: (one["resolved"], one["reward"]) for one in report["outcomes"]}
    assert found == dict(zip(names, ((False, 0.0), (True, 0.0), (True, 0.0), (True, 1.0)), strict=True))
    assert {work.name for work in HONEST_ON_PAGELIST} > {"a_commit"}
