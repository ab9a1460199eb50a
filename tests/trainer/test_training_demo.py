"""``errata demo training``: real server, sandboxes and trainer, in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from errata_server.cli import commands
from errata_trainer import demo


@pytest.mark.sandbox
def test_the_demo_trains_by_every_channel_and_its_votes_are_in_the_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--json", "--steps", "2", "--data-dir", str(tmp_path / "data")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] and told["lost"] == 0.0
    assert [step["number"] for step in told["steps"]] == [1, 2]
    assert all(0.0 < step["reward"] <= 1.0 for step in told["steps"])
    assert told["steps"][0]["sdpo"] > 0.0 and told["steps"][0]["dpo"] > 0.0
    assert {"invalid_arguments", "path_not_found"} <= {one["error_kind"] for one in told["marked"]}
    tried, better = (sum(one[name] for one in told["marked"]) for name in ("tried", "better"))
    assert tried == sum(one["count"] for one in told["marked"]) and 0 < better <= tried
    assert told["pairs"] and all(pair["chosen"] != pair["rejected"] for pair in told["pairs"])
    assert told["teachers"]["teachers/usd"] == 0.0
    (shown,) = told["pairs"][:1]
    assert sorted(shown["votes"]) == ["careful", "hasty", "patient"]
    rewards = CliRunner().invoke(commands.cli, ["episodes", "rewards", shown["eid"], "--data-dir", told["data_dir"]])
    assert rewards.exit_code == 0 and "teachers" in rewards.output and "counterfactual" in rewards.output


def test_without_what_trains_the_demo_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert demo.main([]) == 1
    told = capsys.readouterr().err
    assert "pip install" in told and "[trl]" in told
