"""The conformance kit on released servers: they pass their profile, and R-014 to R-016 are not supported there."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from errata_conformance.cli import main
from errata_conformance.report import as_text
from errata_conformance.results import Outcome, Result
from errata_conformance.server_side.probe import Probe
from errata_conformance.server_side.run import prepared, run, selected
from errata_conformance.server_side.target import Target

PROBE = {
    "step": [{"amount": 4}, {"amount": 8, "note": "rent"}, {"amount": -2}],
    "fails": {"amount": 1, "note": "refuse"},
    "invalid": {"amount": "many"},
}
PROFILES = {"0.3.0": ("0.3",), "0.10.0": ("0.5", "0.10")}
FINDINGS = {
    "0.3.0": {"base.session_id_heeded", "base.metadata_delivered", "base.array", "base.binary"},
    "0.10.0": {"base.array", "base.binary"},
}


def held(url: str, profile: str) -> list[Result]:
    async def main() -> list[Result]:
        target = Target(url, Probe(**{k: tuple(v) if k == "step" else v for k, v in PROBE.items()}))  # type: ignore[arg-type]
        await prepared(target)
        return await run(target, selected(("014", "015", "016"), profile), jobs=4)

    return asyncio.run(main())


@pytest.mark.parametrize(("generation", "profile"), [(g, p) for g, profiles in PROFILES.items() for p in profiles])
def test_a_released_server_passes_its_profile(servers: dict[str, Any], generation: str, profile: str) -> None:
    results = held(servers[f"stock {generation}"]["ledger"], profile)
    base = [one for one in results if one.statement.startswith("base.")]
    rest = [one for one in results if not one.statement.startswith("base.")]
    assert {one.statement for one in base if one.outcome is Outcome.FINDING} == FINDINGS[generation], as_text(results)
    assert {one.outcome for one in base} <= {Outcome.PASSED, Outcome.FINDING, Outcome.NOT_TESTED}, as_text(results)
    left_out = {Outcome.NOT_SUPPORTED, Outcome.NOT_APPLICABLE, Outcome.NOT_TESTED}
    assert {one.outcome for one in rest} <= left_out, as_text(results)
    assert sum(one.outcome is Outcome.NOT_SUPPORTED for one in rest) > 60


@pytest.mark.parametrize("profile", ["0.3", "0.5", "0.10"])
def test_ours_passes_every_profile(servers: dict[str, Any], profile: str) -> None:
    results = held(servers["ledger"], profile)
    base = [one for one in results if one.statement.startswith("base.")]
    assert {one.outcome for one in base} <= {Outcome.PASSED, Outcome.NOT_TESTED}, as_text(results)
    assert not [one for one in results if one.outcome in (Outcome.FAILED, Outcome.BLOCKED)], as_text(results)


def test_the_command_says_what_a_released_server_lacks(
    servers: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "probe.json").write_text(json.dumps(PROBE))
    url = servers["stock 0.10.0"]["ledger"]
    assert main([url, "--profile", "0.10", "--probe", str(tmp_path / "probe.json")]) == 0
    printed = capsys.readouterr().out
    assert "not supported: R-014-5" in printed and "finding: base.array" in printed
