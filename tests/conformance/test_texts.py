"""The servers in the RFCs' own texts pass the kit for their RFC."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from errata_conformance.cli import main

from ..test_rfcs import RFCS, programs, served

PROBES = {
    "014": {
        "step": [{"files": "a.txt"}, {"files": "b.txt"}, {"files": "a.txt b.txt"}],
        "marked": [{"files": "nope.txt"}, {"files": "caf\u00e9 \U0001f600 b.txt c"}],
    },
    "015": {"step": [{"n": 2}, {"n": 3}, {"n": 5}], "fails": {"do": "fail"}},
    "016": {"step": [{"n": 2}, {"n": 3}, {"n": 5}], "fails": {"do": "fail"}},
}
PASSED = {"014": 10, "015": 18, "016": 22}
"""How many checks pass at least: the texts say what their small servers leave out."""


@pytest.mark.parametrize("path", [path for path in RFCS if path.name[:3] in PROBES], ids=lambda path: path.stem)
def test_a_server_of_a_text_passes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, program in programs(path).items():
        (tmp_path / name).write_text(program)
    (tmp_path / "probe.json").write_text(json.dumps(PROBES[path.name[:3]]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "markers", raising=False)
    number = path.name[:3]
    with served(runpy.run_path(str(tmp_path / "server.py"))["app"]) as url:
        status = main([url, "--rfc", number, "--probe", str(tmp_path / "probe.json"), "--json", "--strict"])
    report = json.loads(capsys.readouterr().out)
    assert (status, report["broken"]) == (0, [])
    assert report["counts"]["passed"] >= PASSED[number], report["counts"]
