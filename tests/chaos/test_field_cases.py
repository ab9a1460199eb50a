"""Inputs from the field, ``../shared/cases``, on which a server of one process was wrong once, at several workers."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[3] / "shared/cases/turn3"
SEVERAL = "--workers 4 --max-sessions 64"


@pytest.mark.chaos
@pytest.mark.skipif(not CASES.is_dir(), reason="../shared/cases with inputs from the field is not here")
def test_cases_that_need_a_server_pass_with_several_workers(tmp_path: Path) -> None:
    """Their runner gets a program ``errata`` whose servers have several workers, and so more than one instance."""
    cases = [json.loads(line) for line in (CASES / "index.jsonl").read_text(encoding="utf-8").splitlines()]
    serving = [case["id"] for case in cases if case["type"] == "layout" or serves(CASES / case["file"])]
    python = shlex.quote(sys.executable)
    programs = {
        "python": f'exec {python} "$@"',
        "errata": f'[ "$1" != serve ] || set -- "$@" {SEVERAL}\nexec {python} -m errata_server.cli "$@"',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    done = subprocess.run(
        [sys.executable, CASES / "run.py", tmp_path, "--only", *serving],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [f"{len(serving)} passed, 0 failed"]), (
        done.stdout + done.stderr
    )
    assert len(serving) == 9


def serves(case: Path) -> bool:
    """Return whether a case is a program that starts a server."""
    return case.suffix == ".py" and '"serve"' in case.read_text(encoding="utf-8")
