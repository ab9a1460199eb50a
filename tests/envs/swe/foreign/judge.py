"""Runs in an environment with swebench 5.0.2 or 4.1.0: reads cases, writes what the package makes of them.

Usage: judge.py CASES ANSWERS. A case is a line, ``{"kind": ...}``:

    judge       row, log, prediction -> found, statuses, report, status, or the name of the exception
    directives  row -> directives, modified (4.1.0 only)
    run         rows, predictions, reports, logs -> the report of the run
    predictions path -> predictions
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

from swebench.harness import grading
from swebench.harness.reporting import make_run_report
from swebench.harness.utils import get_predictions_from_file

try:
    from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS
except ImportError:
    MAP_REPO_VERSION_TO_SPECS = None
VERSION = 5 if MAP_REPO_VERSION_TO_SPECS is None else 4


def spec(row):
    tests = {"FAIL_TO_PASS": row["FAIL_TO_PASS"], "PASS_TO_PASS": row["PASS_TO_PASS"]}
    if VERSION == 5:
        from swebench.types import TestSpec

        return TestSpec(
            instance_id=row["instance_id"],
            image="",
            eval_script_list=[],
            repo=row["repo"],
            version="",
            log_parser=row["log_parser"],
            eval_type=row["eval_type"],
            **tests,
        )
    from swebench.harness.test_spec.test_spec import TestSpec

    return TestSpec(
        instance_id=row["instance_id"],
        repo=row["repo"],
        version=next(iter(MAP_REPO_VERSION_TO_SPECS[row["repo"]])),
        repo_script_list=[],
        eval_script_list=[],
        env_script_list=[],
        arch="x86_64",
        language="py",
        docker_specs={},
        namespace=None,
        **tests,
    )


def judge(case, folder):
    path = folder / "log.txt"
    path.write_bytes(case["log"].encode())
    row = case["row"]
    try:
        statuses, found = grading.get_logs_eval(spec(row), str(path))
        report = grading.get_eval_report(spec(row), case["prediction"], str(path), True)
        entry = report[row["instance_id"]]
        status = grading.get_resolution_status(entry["tests_status"]) if "tests_status" in entry else "RESOLVED_NO"
        return {"found": found, "statuses": statuses, "report": report, "status": status}
    except Exception as error:
        return {"raised": type(error).__name__}


def directives(case, folder):
    from swebench.harness.test_spec.python import get_test_directives
    from swebench.harness.utils import get_modified_files

    return {
        "directives": get_test_directives(case["row"]),
        "modified": get_modified_files(case["row"]["test_patch"]),
        "command": MAP_REPO_VERSION_TO_SPECS[case["row"]["repo"]][case["row"]["version"]]["test_cmd"],
    }


def run(case, folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        predictions = {entry["instance_id"]: entry for entry in case["predictions"]}
        for name, report in case["reports"].items():
            model = predictions[name]["model_name_or_path"].replace("/", "__")
            path = Path("logs/run_evaluation/run") / model / name
            path.mkdir(parents=True)
            (path / "test_output.txt").write_text(case["logs"][name])
            if report is not None:
                (path / "report.json").write_text(json.dumps(report))
        return json.loads(Path(make_run_report(predictions, case["rows"], "run")).read_text())
    finally:
        os.chdir(before)


def predictions(case, folder):
    return get_predictions_from_file(case["path"], "", "test")


KINDS = {"judge": judge, "directives": directives, "run": run, "predictions": predictions}
with Path(sys.argv[1]).open(encoding="utf-8") as cases, Path(sys.argv[2]).open("w", encoding="utf-8") as answers:
    for line in cases:
        one = json.loads(line)
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
            answer = KINDS[one["kind"]](one, Path(directory))
        answers.write(json.dumps(answer) + "\n")
