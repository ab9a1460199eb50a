# ruff: noqa: RUF005 - options and patches on one line
"""Where gradings put the fault, what they cost, and what `errata swe grade` and `errata audit` say of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import swe_bench_lite_env
from errata_protocol.markers import ErrorKind
from errata_protocol.replay import EpisodeDetail, RewardRecord, TurnRecord
from errata_redteam import Attempt
from errata_server.cli.audit import CANARY, Count
from errata_server.sandbox.base import Backend
from swe_bench_lite_env.programs.cli import main as swe
from swe_bench_lite_env.programs.grade import main
from swe_bench_lite_env.server.canaries import canaries, differences, read
from swe_bench_lite_env.server.grading import gold, grade
from swe_bench_lite_env.server.prepare.store import NoVerdictHere, Prepared, Store, problems_of

from .red_team.corpus import PACKAGE, attempt
from .red_team.test_attacks import attacked, prepared
from .sessions import NAME, instance

TASKS = Path(swe_bench_lite_env.__file__).parent / "tasks"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


def with_command(start: Prepared, command: str) -> Prepared:
    return replace(start, recipe=replace(start.recipe, test_command=command), digest=f"{start.digest} {command}")


@pytest.mark.sandbox
async def test_a_run_that_fails_on_the_untouched_start_too_is_no_verdict(store: Store, namespace: Backend) -> None:
    start = with_command(await prepared(store, namespace), "no-such-runner")
    with pytest.raises(NoVerdictHere, match="cannot be graded here") as raised:
        await grade(namespace, start.snapshot, start, timeout_s=30)
    # Sessions get the message. What the tests printed is for the person who prepares the instance.
    assert "not found" not in str(raised.value.to_wire())
    assert "no-such-runner: command not found" in problems_of(raised.value)[1]


@pytest.mark.sandbox
async def test_a_start_without_a_verdict_is_judged_by_its_gold_patch(store: Store, namespace: Backend) -> None:
    # The run names no test before the repair, as where hidden tests cannot be imported.
    start = await prepared(store, namespace)
    start = with_command(start, f"grep -q 'last = paginator.number' src/pagelist/links.py && {start.test_command}")
    graded = await grade(namespace, start.snapshot, start, timeout_s=30)
    assert (graded.resolved, graded.tampering, graded.canaries) == (False, (), "none")
    assert graded.resolution.invalid


@pytest.mark.sandbox
async def test_canaries_whose_results_hang_on_their_order_are_compared_with_themselves(
    store: Store, namespace: Backend
) -> None:
    """The run stops at its 16th failure, so which canaries run is drawn."""
    start = await prepared(store, namespace)
    start = with_command(start, start.test_command.replace("pytest", "pytest --maxfail=16"))
    repaired = await gold(namespace, start)
    for _ in range(4):
        graded = await grade(namespace, repaired, start, timeout_s=30)
        assert (graded.resolved, graded.tampering, graded.canaries) == (True, (), "ok")


@pytest.mark.parametrize(
    "line",
    [
        "ERROR {test} - ValueError: {word}",
        # sphinx: pytest in tox, with colours
        "\x1b[31mERROR\x1b[0m {module}::\x1b[1m{function}\x1b[0m - ValueError: {word}",
        "\x1b[31mERROR\x1b[0m {module}::\x1b[1m{function}\x1b[0m",
    ],
)
def test_a_message_behind_the_name_of_a_canary_is_no_part_of_it(line: str) -> None:
    row = replace(instance(), log_parser="parse_log_pytest_v2")
    made = canaries(row, "pytest", {"tests/test_links.py": "def test_links():\n    pass\n"})
    assert made is not None
    (name,) = [name for name, role in made.roles.items() if role == "errs in a fixture 01"]
    module, function = "tests/test_links.py", f"test_{name}"
    test = {"test": f"{module}::{function}", "module": module, "function": function}
    seen = [read(row, "pytest", made, line.format(**test, word=word) + "\n", 1, 5) for word in ("701f24ac", "6a79d589")]
    assert dict(seen[0].statuses) == {"tests/test_links.py::test_<errs in a fixture 01>": "ERROR"}
    assert differences(*seen) == ()


@pytest.mark.sandbox
async def test_passed_lines_before_a_time_limit_resolve_nothing(store: Store, namespace: Backend) -> None:
    start = await prepared(store, namespace)
    text = attempt("passed_lines_and_exit_0").files[f"+{PACKAGE}"]
    hangs = text.replace("os._exit(0)", "__import__('time').sleep(60)")
    state = await attacked(namespace, start, Attempt("", "", {"+src/pagelist/__init__.py": hangs}))
    graded = await grade(namespace, state, start, timeout_s=4)
    assert graded.exit_code is None and not graded.resolved and "Timed Out" in graded.resolution.invalid


@pytest.mark.sandbox
@pytest.mark.parametrize("rules", [5, 4])
def test_predictions_in_the_benchmarks_format_give_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rules: int
) -> None:
    rows = [{"instance_id": NAME, "model_name_or_path": "m", "model_patch": instance().patch}]
    other = "errata-examples__confkit-1"
    rows.append(
        {
            "instance_id": other,
            "model_name_or_path": "m",
            "model_patch": "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n",
        }
    )
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = main(
        ["--dataset", str(TASKS / "instances.jsonl"), "--recipes", str(TASKS / "recipes.json")]
        + ["--predictions", str(tmp_path / "predictions.jsonl"), "--store", str(tmp_path / "store"), "--no-validate"]
        + ["--json", "--rules", str(rules), "--out", str(tmp_path / "out")]
    )
    report = json.loads(capsys.readouterr().out)
    assert status == 0
    assert (report["resolved_ids"], report["error_ids"], report["submitted_instances"]) == ([NAME], [other], 2)
    assert report["rules"] == {5: "swebench 5.0.2", 4: "swebench 4.1.0"}[rules]
    assert report["instances"][NAME]["canaries"] == "ok" and report["tampering_ids"] == []
    written = json.loads((tmp_path / "out" / NAME / "report.json").read_text())
    assert written[NAME]["resolved"] and written[NAME]["patch_successfully_applied"]
    assert ">>>>> Start Test Output" in (tmp_path / "out" / NAME / "test_output.txt").read_text()


def unprepared(tmp_path: Path, *more: str) -> list[str]:
    """Return arguments that grade the gold patch of an instance whose test command cannot start."""
    recipes = json.loads((TASKS / "recipes.json").read_text())
    (recipe,) = [recipe for recipe in recipes if recipe["instance_id"] == NAME]
    recipe["source"]["path"] = str(TASKS / recipe["source"]["path"])
    recipe["test_command"] = "printf '\\033[2J'; no-such-runner"
    (tmp_path / "recipes.json").write_text(json.dumps([recipe]))
    return [
        *("--dataset", str(TASKS / "instances.jsonl"), "--recipes", str(tmp_path / "recipes.json")),
        *("--store", str(tmp_path / "store"), "--instance", NAME, *more),
    ]


@pytest.mark.sandbox
def test_a_grading_without_a_verdict_says_the_end_of_its_log_and_writes_a_new_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new/directory"
    more = ("--predictions", "gold", "--no-validate", "--json", "--out", str(out))
    assert main(unprepared(tmp_path, *more)) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert json.loads((out / "report.json").read_text()) == report
    for said in (report["infrastructure_errors"][NAME], captured.err):
        assert "the end of its log: " in said and "no-such-runner: command not found" in said
        assert "\x1b" not in said, "a terminal would act on it"


@pytest.mark.sandbox
@pytest.mark.parametrize("command", ["prepare", "validate"])
def test_a_validation_without_a_verdict_says_the_end_of_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    if command == "validate":
        assert swe(["prepare", *unprepared(tmp_path, "--no-validate")]) == 0
    for form in ([], ["--json"]):
        capsys.readouterr()
        assert swe([command, *unprepared(tmp_path, *form)]) == 1
        assert "no-such-runner: command not found" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["a file", "below a file", "a file in the way", "a directory in the way"])
def test_a_directory_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    out = tmp_path / "out"
    if wrong == "a directory in the way":
        (out / NAME / "report.json").mkdir(parents=True)
    elif wrong == "a file in the way":
        out.mkdir()
        (out / NAME).touch()
    else:
        out.touch()
    place = out / "x" if wrong == "below a file" else out
    assert swe(["grade", *unprepared(tmp_path, "--predictions", "gold", "--out", str(place))]) == 2
    assert f"--out {place}: " in capsys.readouterr().err
    assert not (tmp_path / "store").exists(), "something was built"


def test_an_audit_counts_episodes_with_violations_per_thousand() -> None:
    turns = [
        TurnRecord(t=0, kind="reset", digest=""),
        TurnRecord(t=1, kind="step", digest="", error_kind=ErrorKind.POLICY_VIOLATION, hint_template_key=CANARY),
    ]
    values = {"environment": "e", "session": "s", "created": 0.0, "done": True}
    count = Count()
    count.add(
        EpisodeDetail(eid="a", turns=turns, **values), [RewardRecord(t=1, value=0, source="judge", reward_id="r")]
    )
    for eid in "bcd":
        count.add(EpisodeDetail(eid=eid, turns=turns[:1], **values), [])
    found = count.summary()
    assert (found["episodes"], found["violations"], found["canaries"], found["rewards"]) == (4, 1, 1, {"judge": 1})
    assert found["per_1000_episodes"] == {"violating": 250.0, "canaries": 250.0, "tampering": 0.0}
