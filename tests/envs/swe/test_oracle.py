"""The package swebench itself, 5.0.2 and 4.1.0, on the same logs, patches and files: our rules have to say the same."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from swe_bench_lite_env.dataset import Dataset, Instance
from swe_bench_lite_env.rules.directives import TEST_COMMANDS, default_command, directives, modified_files
from swe_bench_lite_env.rules.log_parsers import PARSER_OF_REPO, RULES, parser_name
from swe_bench_lite_env.rules.report import (
    Graded,
    Prediction,
    dump_predictions,
    instance_report,
    load_predictions,
    run_report,
)
from swe_bench_lite_env.rules.verdict import compose_log, judge
from tests.hangs import HANGS_S

from .conftest import ROOT, missing
from .made_logs import REPOS, case

pytestmark = pytest.mark.oracles

FOREIGN = Path(__file__).parent / "foreign"
SUITE = FOREIGN / "suite"
CASES = 3_000
PYTESTS = ("4.6.11", "5.4.3", "6.2.5", "7.4.4", "8.4.2")
PYTHONS = ("3.6", "3.7", "3.8", "3.9", "3.10", "3.11", "3.12", "3.13")

Ask = Callable[[list[dict[str, Any]]], list[Any]]


def environment(name: str) -> str:
    """Return the Python of a locked environment."""
    python = ROOT / ".cache" / name / "bin/python"
    if not python.exists():
        missing(f"{python}, which make test-oracles makes,")
    return str(python)


@pytest.fixture
def ask(rules: int, tmp_path: Path) -> Ask:
    """Put cases to the package whose rules these are."""
    python = environment(f"swebench-{RULES[rules]}")

    def put(cases: list[dict[str, Any]]) -> list[Any]:
        (tmp_path / "cases").write_text("".join(json.dumps(one) + "\n" for one in cases), encoding="utf-8")
        command = [python, str(FOREIGN / "judge.py"), str(tmp_path / "cases"), str(tmp_path / "answers")]
        quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
        result = subprocess.run(command, env=quiet, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        answers = (tmp_path / "answers").read_text(encoding="utf-8").split("\n")[:-1]
        assert len(answers) == len(cases)
        return [json.loads(answer) for answer in answers]

    return put


def as_row(instance: Instance) -> dict[str, Any]:
    return {
        "instance_id": instance.instance_id,
        "repo": instance.repo,
        "log_parser": parser_name(instance.repo, instance.log_parser),
        "eval_type": instance.eval_type,
        "FAIL_TO_PASS": list(instance.fail_to_pass),
        "PASS_TO_PASS": list(instance.pass_to_pass),
    }


def compare(logs: list[tuple[Instance, str]], ask: Ask, rules: int) -> Counter[str]:
    """Judge every log in both ways, and return how often each verdict came."""
    if rules == 4:  # that generation knows neither column
        logs = [(replace(instance, log_parser="", eval_type="pass_and_fail"), log) for instance, log in logs]
    made = [
        {
            "kind": "judge",
            "row": as_row(instance),
            "log": log,
            "prediction": {"instance_id": instance.instance_id, "model_patch": "diff", "model_name_or_path": "m"},
        }
        for instance, log in logs
    ]
    seen: Counter[str] = Counter()
    for (instance, log), theirs in zip(logs, ask(made), strict=True):
        ours = judge(instance, log, rules=rules)
        where = f"{instance.instance_id} ({instance.repo}, rules {rules})\n{log}"
        if "raised" in theirs:  # no report is written: the run counts as not evaluated
            assert ours.invalid and not ours.resolved, where
            seen["raised"] += 1
            continue
        assert dict(ours.statuses) == theirs["statuses"], where
        assert list(ours.statuses) == list(theirs["statuses"]), where
        assert (not ours.invalid) == theirs["found"], (ours.invalid, where)
        assert ours.status == theirs["status"], where
        prediction = Prediction(instance.instance_id, "diff", "m")
        assert instance_report(prediction, ours, rules) == theirs["report"], where
        seen["invalid" if ours.invalid else ours.status] += 1
    return seen


@pytest.mark.parametrize("rules", RULES)
def test_made_up_logs_get_the_packages_verdict(ask: Ask, rules: int) -> None:
    seen = compare([case(seed) for seed in range(CASES)], ask, rules)
    for verdict in ("RESOLVED_FULL", "RESOLVED_PARTIAL", "RESOLVED_NO", "invalid", "raised"):
        assert seen[verdict] >= 20, seen


@pytest.mark.parametrize("rules", RULES)
def test_long_lines_of_an_agent_get_the_packages_verdict_too(ask: Ask, rules: int) -> None:
    pieces = (
        "[" * 300,
        " " * 300,
        "_ " * 100,
        ".py:" * 90,
        " ... " * 60,
        "1" * 300,
        "Internal Server Error: /",
        "a\n...",
    )
    draw = random.Random(rules)
    logs = []
    for number in range(200):
        instance, _ = case(number)
        text = "".join(draw.choice((*pieces, "\n", "ok", " silenced).\nok\n", "PASSED ", "[x]")) for _ in range(30))
        logs.append((instance, compose_log(text, 0)))
    compare(logs, ask, rules)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The made-up tests, away from this repository's own conftest."""
    folder = shutil.copytree(SUITE, tmp_path_factory.mktemp("runner") / "suite")
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


@cache
def run_of(command: tuple[str, ...], folder: Path) -> tuple[str, int]:
    """Return what a runner prints, and its exit status. Both generations of swebench get the same log."""
    quiet = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}
    result = subprocess.run(
        command, cwd=folder, env=quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=HANGS_S
    )
    return result.stdout.decode("utf-8", "replace"), result.returncode


def real_logs(output: str, code: int, repos: tuple[str, ...], ids: list[str]) -> list[tuple[Instance, str]]:
    """Return instances that expect several of the tests, with the log of the run, right and wrong exit codes."""
    base, _ = case(0)
    logs = []
    for repo in repos:
        for number in range(12):
            draw = random.Random(number)
            wanted = draw.sample(ids, min(len(ids), 6))
            wanted = [one[: one.find("[") + 2] if "[" in one and draw.random() < 0.3 else one for one in wanted]
            instance = replace(
                base,
                repo=repo,
                log_parser="",
                eval_type="pass_and_fail",
                fail_to_pass=tuple(wanted[:2]),
                pass_to_pass=tuple(wanted[2:]),
            )
            logs.append((instance, compose_log(output, draw.choice((code, 0, None, 1)))))
    return logs


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("version", PYTESTS)
def test_logs_of_pytest_get_the_packages_verdict(ask: Ask, rules: int, version: str, suite: Path) -> None:
    python = environment(f"runner-pytest-{version}")
    plain = (python, "-m", "pytest", "-rA", "--assert=plain", "-p", "no:cacheprovider")
    repos = tuple(name for name in REPOS if name not in ("django/django", "sympy/sympy"))
    logs = []
    for options in ((), ("-v",), ("--color=yes",), ("-vv", "-o", "console_output_style=classic", "--tb=no")):
        for file in ("outcomes.py", "collection.py"):
            output, code = run_of((*plain, *options, file), suite)
            assert "short test summary info" in output, output
            ids = [line.split(" ", 1)[1] for line in output.split("\n") if line.startswith(("PASSED ", "FAILED "))]
            ids += [f"{file}::test_passes", f"{file}::test_skipped", f"{file}::test_fails_as_expected", file]
            logs += real_logs(output, code, repos, ids)
    compare(logs, ask, rules)


def python_of(version: str) -> str:
    """Return an interpreter of that version, of pyenv or on PATH."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for python in (*map(str, found), f"python{version}"):
        try:
            probe = subprocess.run([python, "-c", ""], capture_output=True, check=False, timeout=HANGS_S)
        except OSError:
            continue
        if probe.returncode == 0:
            return python
    return missing(f"Python {version}")


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("version", PYTHONS)
def test_logs_of_unittest_get_the_packages_verdict(ask: Ask, rules: int, version: str, suite: Path) -> None:
    output, code = run_of((python_of(version), "unittest_outcomes.py"), suite)
    assert " ... FAIL" in output and code == 1, output
    ids = [line.rsplit(" ... ", 1)[0].strip() for line in output.split("\n") if " ... " in line]
    compare(real_logs(output, code, ("django/django",), [*ids, "test_sub", "setUpClass"]), ask, rules)


@pytest.mark.parametrize("rules", RULES)
def test_logs_of_sympys_runner_get_the_packages_verdict(ask: Ask, rules: int, suite: Path) -> None:
    python = environment("runner-sympy-1.12")
    output, code = run_of((python, str(FOREIGN / "run_sympy.py"), str(suite / "sympy_outcomes.py")), suite)
    assert "test_passes ok" in output and code == 1, output
    ids = ["test_passes", "test_fails", "test_errs", "test_prints", "test_fails_as_expected", "test_skipped"]
    ids.append(f"{suite}/sympy_outcomes.py:test_fails")
    compare(real_logs(output, code, ("sympy/sympy",), ids), ask, rules)


@pytest.mark.parametrize("rules", [5])
def test_our_parsers_are_those_of_the_registry(rules: int) -> None:
    python = environment("swebench-5.0.2")
    code = (
        "import json, sys; from swebench.harness.log_parsers import python, PARSER_REGISTRY\n"
        "print(json.dumps({repo: [name for name in PARSER_REGISTRY if PARSER_REGISTRY[name] is parser]\n"
        "  for repo, parser in python.MAP_REPO_TO_PARSER_PY.items()}))"
    )
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=HANGS_S)
    theirs = json.loads(result.stdout)
    assert set(theirs) == set(PARSER_OF_REPO)
    for repo, names in theirs.items():
        assert PARSER_OF_REPO[repo] in names


def file_patch(path: str, hunk: str, mode: str = "", before: str = "", after: str = "") -> str:
    head = f"diff --git a/{path} b/{path}\n{mode}"
    return f"{head}--- {before or f'a/{path}'}\n+++ {after or f'b/{path}'}\n{hunk}"


CHANGE = "@@ -1 +1 @@\n-a\n+b\n"
PATCHES = {
    "one file": file_patch("tests/test_a.py", "@@ -1,1 +1,2 @@\n a\n+b\n"),
    "new file and data": file_patch(
        "tests/x/new.py", "@@ -0,0 +1,1 @@\n+a\n", "new file mode 100644\n", before="/dev/null"
    )
    + file_patch("tests/data.json", CHANGE),
    "deleted file": file_patch("tests/old.py", "@@ -1 +0,0 @@\n-a\n", "deleted file mode 100644\n", after="/dev/null"),
    "a removed line that looks like a header": file_patch(
        "t/a.py", "@@ -1,3 +1,3 @@\n a\n--- a/x.py\n+++ b/x.py\n b\n"
    ),
    "a diff in a diff": file_patch("t/b.py", "@@ -1,1 +1,2 @@\n a\n+diff --git a/q/r.py b/q/r.py\n"),
    "names with spaces": file_patch("t/a b.py", CHANGE),
}


@pytest.mark.parametrize("rules", [4])
def test_directives_and_restored_files_are_the_packages(ask: Ask, rules: int) -> None:
    versions = {"django/django": "3.0", "sympy/sympy": "1.5", "sphinx-doc/sphinx": "4.0", "astropy/astropy": "4.3"}
    base, _ = case(0)
    instances = [
        replace(base, repo=repo, version=versions.get(repo, ""), test_patch=patch)
        for repo in TEST_COMMANDS
        for patch in PATCHES.values()
    ]
    known = json.loads(
        subprocess.run(
            [
                environment("swebench-4.1.0"),
                "-c",
                "import json; from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS as m\n"
                "print(json.dumps({r: {v: s['test_cmd'] for v, s in m[r].items()} for r in m if 'test_cmd' in "
                "next(iter(m[r].values()))}))",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=HANGS_S,
        ).stdout
    )
    for repo in TEST_COMMANDS:
        for version, command in known[repo].items():
            assert default_command(replace(base, repo=repo, version=version, test_patch="")) == command, (repo, version)
    instances = [replace(one, version=one.version or next(iter(known[one.repo]))) for one in instances]
    rows = [{"repo": one.repo, "version": one.version, "test_patch": one.test_patch} for one in instances]
    answers = ask([{"kind": "directives", "row": row} for row in rows])
    for instance, theirs in zip(instances, answers, strict=True):
        assert directives(instance.test_patch, instance.repo) == theirs["directives"], instance.test_patch
        assert modified_files(instance.test_patch) == theirs["modified"], instance.test_patch


@pytest.mark.parametrize("rules", [4])
def test_real_test_patches_give_the_packages_directives(ask: Ask, rules: int, lite: Dataset) -> None:
    for instance, theirs in zip(
        lite, ask([{"kind": "directives", "row": instance.row()} for instance in lite]), strict=True
    ):
        assert directives(instance.test_patch, instance.repo) == theirs["directives"]
        assert modified_files(instance.test_patch) == theirs["modified"]


@pytest.mark.parametrize("rules", RULES)
def test_the_report_of_a_run_is_the_packages(ask: Ask, rules: int) -> None:
    judged = [case(seed) for seed in range(40)]
    dataset = Dataset([replace(one, log_parser="", eval_type="pass_and_fail") for one, _ in judged])
    logs = {one.instance_id: log.replace("\r", "\n") for one, log in judged}
    predictions, reports, graded = [], {}, {}
    for number, instance in enumerate(dataset):
        if number % 7 == 0:
            continue
        patch = {1: "", 2: None}.get(number % 7, "diff")
        prediction = Prediction(instance.instance_id, patch, "org/model")
        predictions.append(prediction)
        if patch:
            log = logs[instance.instance_id]
            resolution = None if number % 7 == 3 else judge(instance, log, rules=rules)
            reports[instance.instance_id] = resolution and instance_report(prediction, resolution, rules)
            graded[instance.instance_id] = Graded(resolution, log)
    predictions.append(Prediction("other__one-1", "diff", "org/model"))
    (theirs,) = ask(
        [
            {
                "kind": "run",
                "rows": [as_row(instance) for instance in dataset],
                "predictions": [prediction.row() for prediction in predictions],
                "reports": reports,
                "logs": logs,
            }
        ]
    )
    for name in ("unstopped_instances", "unstopped_containers", "unremoved_images"):  # of docker
        theirs.pop(name, None)
    ours = run_report(dataset, predictions, graded, rules)
    assert ours.pop("rules") == f"swebench {RULES[rules]}"
    assert ours == theirs
    assert ours["resolved_ids"] and ours["error_ids"] and ours["empty_patch_ids"] and ours["incomplete_ids"]


@pytest.mark.parametrize("rules", RULES)
def test_predictions_are_read_as_the_package_reads_them(ask: Ask, rules: int, tmp_path: Path) -> None:
    rows = [Prediction(f"a__b-{number}", patch, "m") for number, patch in enumerate(("diff", "", None))]
    files = {
        "a.jsonl": dump_predictions(rows),
        "b.json": json.dumps([row.row() for row in rows]),
        "c.json": json.dumps({row.instance_id: row.row() for row in rows}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    answers = ask([{"kind": "predictions", "path": str(tmp_path / name)} for name in files])
    for name, theirs in zip(files, answers, strict=True):
        assert (
            [prediction.row() for prediction in load_predictions(tmp_path / name)] == theirs == [r.row() for r in rows]
        )


def test_the_environments_hold_the_versions_that_the_rules_name() -> None:
    for version in RULES.values():
        code = "import importlib.metadata as m; print(m.version('swebench'))"
        command = [environment(f"swebench-{version}"), "-c", code]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == version
