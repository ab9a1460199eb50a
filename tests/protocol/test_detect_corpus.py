"""The detectors on labelled real outputs: the bars of the accuracy bench hold on every file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from errata_protocol.detect import detect

ROOT = Path(__file__).resolve().parents[2]
DEVELOPER_CORPUS = ROOT.parent / "shared" / "data" / "error_corpus.jsonl"
OWN_OUTPUTS = ROOT / "tests" / "protocol" / "data" / "outputs.jsonl"
SECOND_OUTPUTS = ROOT / "tests" / "protocol" / "data" / "outputs2.jsonl"
SWE_TURNS = ROOT / "tests" / "protocol" / "data" / "swe_turns.jsonl"
UNSANDBOXED = ROOT / "tests" / "protocol" / "data" / "unsandboxed.jsonl"


def _bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("detect_accuracy", ROOT / "bench" / "detect_accuracy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "path", [DEVELOPER_CORPUS, OWN_OUTPUTS, SECOND_OUTPUTS, SWE_TURNS, UNSANDBOXED], ids=lambda p: p.name
)
def test_kinds_sites_and_negatives_reach_the_bars(path: Path) -> None:
    if not path.exists():
        pytest.skip(f"{path.name} is not beside this checkout: it is third-party data that the repository may not hold")
    bench = _bench()
    score = bench.score_rows(bench.read_rows(path))
    assert score.rows >= 70
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


def test_read_as_unsandboxed_no_output_gets_another_kind_or_another_place() -> None:
    bench = _bench()
    rows = [
        r for path in (DEVELOPER_CORPUS, OWN_OUTPUTS, SECOND_OUTPUTS) if path.exists() for r in bench.read_rows(path)
    ]
    assert len(rows) > 500
    for row in rows:
        given = [row[name] for name in ("command", "exit_code", "stdout", "stderr")]
        more = {name: row.get(name) for name in ("limit_hit", "cwd")} | {"timed_out": bool(row.get("timed_out"))}
        here = detect(*given, **more)
        there = detect(*given, **more, is_host_file=lambda path: path.startswith(("/usr/lib/", "/usr/share/")))
        assert there.error_kind == here.error_kind, row["id"]
        if there.error_site is not None and here.error_site is not None:
            for key in ("file", "line", "action_span"):
                place = getattr(there.error_site, key)
                assert place is None or place == getattr(here.error_site, key), (row["id"], key)
