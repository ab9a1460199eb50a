"""``errata demo swe``: what it shows is checked by itself, and it says where real instances come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swe_bench_lite_env.demo import main
from swe_bench_lite_env.demo.script import script
from swe_bench_lite_env.server.offered import bundled

pytestmark = pytest.mark.sandbox


def test_a_bundled_instance_is_repaired_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ERRATA_SWE_STORE", str(tmp_path / "store"))
    assert main(["--json", "--data-dir", str(tmp_path / "data"), "--instance", "errata-examples__confkit-1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] and shown["kinds"] == ["patch_failed", "path_not_found", "syntax_error", "timeout"]
    parent, child = shown["episodes"]
    assert (parent["reward"], child["reward"], child["forked_from"]) == (0.0, 1.0, [parent["eid"], 8])
    assert [turn["site"] for turn in parent["turns"] if turn["error_kind"] == "syntax_error"] == [
        "src/confkit/config.py:1"
    ]
    assert shown["states_compared"] == {"live": 11, "after a restart": 11, "of the fork": 5}


@pytest.mark.parametrize("given", [["--dataset", "rows.jsonl"], ["--recipes", "recipes.json"]])
def test_half_of_the_files_is_answered_with_where_to_get_them(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 2
    said = capsys.readouterr().err
    assert "--dataset and --recipes go together" in said and "hf download" in said and "errata swe recipe" in said


def test_files_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "rows.jsonl")
    assert main(["--dataset", missing, "--recipes", str(tmp_path / "r.json")]) == 2
    assert missing in capsys.readouterr().err


def test_the_script_fits_every_bundled_instance() -> None:
    dataset, recipes = bundled()
    for instance in dataset:
        made = script(instance, recipes.find(instance.instance_id))
        assert made.start[4].patch != instance.patch == made.right[0].patch
        assert made.start[3].path in instance.patch and made.start[3].path.endswith(".py")
