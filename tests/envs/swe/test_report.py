"""The benchmark's predictions and reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swe_bench_lite_env.dataset import Dataset, read_row
from swe_bench_lite_env.rules.report import (
    Graded,
    Prediction,
    PredictionsInvalid,
    dump_predictions,
    gold_predictions,
    instance_report,
    load_predictions,
    run_report,
)
from swe_bench_lite_env.rules.verdict import compose_log, judge

ROWS = [
    read_row({"repo": "a/b", "instance_id": f"a__b-{n}", "problem_statement": "x", "FAIL_TO_PASS": ["t::a"]})
    for n in range(6)
]
DATASET = Dataset(ROWS)


def verdict(number: int, *lines: str, code: int = 0, rules: int = 5) -> Graded:
    log = compose_log("\n".join(lines), code)
    return Graded(judge(ROWS[number], log, rules=rules), log)


def test_gold_predictions_are_written_and_read_again(lite: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "gold.jsonl"
    path.write_text(dump_predictions(gold_predictions(lite)), encoding="utf-8")
    loaded = load_predictions(path)
    assert [one.instance_id for one in loaded] == lite.ids
    assert [one.model_patch for one in loaded] == [one.patch for one in lite]
    assert {one.model_name_or_path for one in loaded} == {"gold"}
    assert "diff" not in repr(loaded[0])


def test_an_object_by_instance_id_may_leave_the_id_out(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps({"a__b-0": {"model_patch": "diff"}, "a__b-1": "diff", "a__b-2": None}))
    assert [(one.instance_id, one.model_patch) for one in load_predictions(tmp_path / "p.json")] == [
        ("a__b-0", "diff"),
        ("a__b-1", "diff"),
        ("a__b-2", None),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "no JSON"),
        ("3", "a list of predictions"),
        ("[3]", "prediction 1: it has to be an object"),
        ('[{"model_patch": ""}]', 'prediction 1: write "instance_id"'),
        ('[{"instance_id": "a"}]', 'prediction 1 (a): write "model_patch"'),
        ('[{"instance_id": "a", "model_patch": 3}]', "has to be text, not int"),
        (
            '[{"instance_id": "a", "model_patch": ""}, {"instance_id": "a", "model_patch": "x"}]',
            "two predictions for a",
        ),
        ('{"instance_id": "a"}\n{"instance_id": "b"}', "JSON lines ends in .jsonl"),
    ],
)
def test_what_is_wrong_with_predictions_is_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(PredictionsInvalid) as caught:
        load_predictions(tmp_path / "p.json")
    assert said in str(caught.value)


def test_a_run_is_reported_by_what_became_of_each_instance() -> None:
    predictions = [Prediction(f"a__b-{n}", "" if n == 4 else "diff", "m") for n in range(5)]
    predictions.append(Prediction("other__one-1", "diff", "m"))
    graded = {
        "a__b-0": verdict(0, "PASSED t::a"),
        "a__b-1": verdict(1, "FAILED t::a", code=1),
        "a__b-2": Graded(None, "Timeout error: 30 seconds exceeded"),
        "a__b-3": verdict(3, "Cannot allocate memory", code=1),
    }
    report = run_report(DATASET, predictions, graded)
    assert report["resolved_ids"] == ["a__b-0"]
    assert report["unresolved_ids"] == ["a__b-1", "a__b-3"]
    assert report["error_ids"] == ["a__b-2"]
    assert report["completed_ids"] == ["a__b-0", "a__b-1", "a__b-3"]
    assert report["empty_patch_ids"] == ["a__b-4"]
    assert report["incomplete_ids"] == ["a__b-5"]
    assert report["failure_reasons"] == {"a__b-2": "tests_timed_out", "a__b-3": "out_of_memory"}
    assert (report["infra_failure_ids"], report["ambiguous_failure_ids"]) == (["a__b-3"], ["a__b-2"])
    assert (report["total_instances"], report["submitted_instances"], report["resolved_instances"]) == (6, 6, 1)
    assert (report["schema_version"], report["rules"]) == (2, "swebench 5.0.2")
    assert json.loads(json.dumps(report)) == report


def test_the_report_of_rules_4_has_no_advice_about_the_machine() -> None:
    report = run_report(DATASET, [Prediction("a__b-0", "diff")], {"a__b-0": verdict(0, "Killed", rules=4)}, rules=4)
    assert report["rules"] == "swebench 4.1.0"
    assert not [name for name in report if "failure" in name]


def test_the_report_of_an_instance_holds_both_lists() -> None:
    prediction = Prediction("a__b-0", "diff", "m")
    entry = instance_report(prediction, verdict(0, "PASSED t::a").resolution)["a__b-0"]
    assert entry["resolved"] and entry["patch_successfully_applied"] and not entry["infra_failure"]
    assert entry["tests_status"]["FAIL_TO_PASS"] == {"success": ["t::a"], "failure": []}
    none: Any = instance_report(Prediction("a__b-0", None), None)["a__b-0"]
    assert none["patch_is_None"] and not none["patch_exists"] and "tests_status" not in none
