"""The kit's client side: the sample client and Errata's pass, each wrong client is caught by what it breaks."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from errata_conformance.cli import main
from errata_conformance.client_side.sample import DEFECTS
from errata_conformance.client_side.scenarios import SCENARIOS, run_client
from errata_conformance.report import as_text
from errata_conformance.results import Outcome, grouped
from errata_conformance.statements import statements

SAMPLE = [sys.executable, "-m", "errata_conformance.client_side.sample"]
REFERENCE = [sys.executable, str(Path(__file__).parents[2] / "rfcs" / "reference" / "client.py")]
OURS = [sys.executable, str(Path(__file__).parent / "our_client.py")]


def test_every_statement_that_binds_a_client_and_shows_has_a_scenario_and_a_wrong_client() -> None:
    known = statements()
    shows = {one.id for one in known.values() if one.side == "client" and one.tag != "inspection"}
    checked = {statement for statement, _, _ in SCENARIOS}
    assert shows <= checked <= set(known)
    assert {statement for statement, _ in DEFECTS.values()} == checked
    assert len(DEFECTS) >= 12


@pytest.mark.parametrize(
    "command", [SAMPLE, pytest.param(OURS, marks=pytest.mark.conformance)], ids=["sample", "errata_client"]
)
def test_a_right_client_passes(command: list[str]) -> None:
    results = asyncio.run(run_client(command))
    assert {one.outcome for one in results} == {Outcome.PASSED}, as_text(results)


@pytest.mark.conformance
def test_the_reference_client_passes() -> None:
    results = asyncio.run(run_client(REFERENCE))
    assert {one.outcome for one in results} == {Outcome.PASSED, Outcome.NOT_SUPPORTED}, as_text(results)
    lacking = [one.statement for one in results if one.outcome is Outcome.NOT_SUPPORTED]
    assert lacking == ["R-016-1", "R-015-7", "R-015-24"], as_text(results)  # it leaves out plain sockets


@pytest.mark.conformance
@pytest.mark.parametrize("name", DEFECTS)
def test_every_wrong_client_is_caught_by_what_it_breaks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("errata_conformance.client_side.scenarios.REPLY_S", 8.0)
    results = asyncio.run(run_client([*SAMPLE, "--defect", name]))
    found = [root.statement for root, _ in grouped(results)]
    assert found and found[0] == DEFECTS[name][0], as_text(results)


def test_the_command_holds_a_client(capsys: pytest.CaptureFixture[str]) -> None:
    sample = " ".join(SAMPLE)
    assert main(["--client", sample, "--only", "R-016-15", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["passed"] == 1
    assert main(["--client", f"{sample} --defect no-digest", "--only", "R-015-13"]) == 1
    assert "BROKEN R-015-13 (MUST)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([])
