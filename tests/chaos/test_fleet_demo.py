"""``errata demo fleet``, with fewer sessions."""

from __future__ import annotations

import json

import pytest

from errata_environment import fleet_demo


@pytest.mark.chaos
def test_no_step_is_lost_or_doubled_when_a_worker_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    assert fleet_demo.main(["--workers", "3", "--sessions", "60", "--steps", "5", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert (counted["answered"], counted["journaled"], counted["failures"]) == (300, 360, [])
    assert 100 <= counted["killed_after"] < 300, "it is killed while sessions step"
    assert sum(counted["by_worker"].values()) == 60 and len(counted["by_worker"]) == 3


def test_too_few_workers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fleet_demo.main(["--workers", "1"])
    assert "at least 2 workers" in capsys.readouterr().err
