"""The detectors on labelled real outputs: the bars of the accuracy bench hold on every file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEVELOPER_CORPUS = ROOT.parent / "shared" / "data" / "error_corpus.jsonl"
OWN_OUTPUTS = ROOT / "tests" / "protocol" / "data" / "outputs.jsonl"
SECOND_OUTPUTS = ROOT / "tests" / "protocol" / "data" / "outputs2.jsonl"


def _bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("detect_accuracy", ROOT / "bench" / "detect_accuracy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", [DEVELOPER_CORPUS, OWN_OUTPUTS, SECOND_OUTPUTS], ids=lambda p: p.name)
def test_kinds_sites_and_negatives_reach_the_bars(path: Path) -> None:
    if not path.exists():
        pytest.skip(f"{path.name} is not beside this checkout: it is third-party data that the repository may not hold")
    bench = _bench()
    score = bench.score_rows(bench.read_rows(path))
    assert score.rows > 100
    assert score.failures() == [], "\n".join(score.misses)


def test_a_wrong_kind_a_wrong_site_and_a_marked_negative_fail_the_bars() -> None:
    bench = _bench()
    row = {"id": "x", "cwd": "/workspace", "command": "cat nofile", "exit_code": 1, "timed_out": False, "stdout": ""}
    row |= {"stderr": "cat: nofile: No such file or directory\n"}
    wrong_kind = row | {"expected_kind": "timeout", "expected_site": None}
    wrong_site = row | {"expected_kind": "path_not_found", "expected_site": {"action_span": [0, 3]}}
    negative = row | {"expected_kind": None, "expected_site": None}
    assert any("precision" in f for f in bench.score_rows([wrong_kind]).failures())
    assert any("action_span" in f for f in bench.score_rows([wrong_site]).failures())
    assert any("negatives" in f for f in bench.score_rows([negative, negative]).failures())
