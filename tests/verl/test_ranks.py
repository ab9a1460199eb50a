"""VeRL's actor with channels 2 and 3 over two ranks does what one rank does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from errata_trainer.monitoring.metrics import combined

from .models import student_path
from .recorded import load, write_model

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from ranks import alone, together

MAIN = Path(__file__).with_name("ranks_main.py")


def test_two_ranks_have_the_losses_and_gradients_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = student_path(tmp_path / "model")
    recorded_model = write_model(tmp_path / "recorded")
    together(MAIN, model, recorded_model, tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "0")
    alone(MAIN, model, recorded_model, tmp_path)
    one, *two = (torch.load(tmp_path / name, weights_only=False) for name in ("1-0.pt", "2-0.pt", "2-1.pt"))
    for run in ("spread-1", "spread-4", "apart-1", "apart-4", "recorded"):
        assert sum(rank[run]["loss"] for rank in two) / 2 == pytest.approx(one[run]["loss"], rel=1e-5), run
        expected = combined([one[run]["metrics"]], 1)
        assert expected["loss/sdpo_kl"] > 1e-3 and expected["loss/trace_replay_dpo"] > 1e-3
        assert combined([rank[run]["metrics"] for rank in two], 1) == pytest.approx(expected, rel=1e-4, abs=1e-6), run
        for rank in two:
            for name, gradient in one[run]["gradients"].items():
                torch.testing.assert_close(rank[run]["gradients"][name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    recorded = load("many_sites")
    assert sum(rank["recorded"]["loss"] for rank in two) / 2 == pytest.approx(recorded.results["total"], rel=1e-5)
    found = combined([rank["recorded"]["metrics"] for rank in two], 1)
    for name in ("loss/sdpo_kl", "loss/trace_replay_dpo", "dpo/margin", "sdpo/tokens"):
        assert found[name] == pytest.approx(recorded.results[name], rel=1e-5), name
    for kind in ("weights", "teacher"):
        for name, weight in one[kind].items():
            for rank in two:
                torch.testing.assert_close(rank[kind][name], weight, rtol=1e-3, atol=1e-4, msg=f"{kind} {name}")
