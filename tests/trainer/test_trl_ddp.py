"""Two ranks under DDP, with error sites on one of them and pairs on the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import alone, together

from errata_server.process import ServerProcess

MAIN = Path(__file__).parent / "ddp_main.py"
RUNS = ("plain", "checkpointing", "random")
pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def trained(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of all runs: most of the time of each would be its imports."""
    out = tmp_path_factory.mktemp("runs")
    for run in RUNS:
        (out / run).mkdir()
    together(MAIN, server.url, out, *RUNS)
    alone(MAIN, server.url, out, *RUNS)
    return out


@pytest.mark.parametrize("run", ["plain", "checkpointing"])
def test_two_ranks_train_as_one_process_does(trained: Path, run: str) -> None:
    one_process, first, second = (torch.load(trained / run / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert one_process["log"][0]["sdpo/tokens"] > 0 and one_process["log"][0]["dpo/pairs"] == 3.0
    for one, both in zip(one_process["log"], first["log"], strict=True):
        parts = ("loss", "loss/grpo", "loss/sdpo_kl", "loss/trace_replay_dpo", "sdpo/tokens", "sdpo/sites", "dpo/pairs")
        assert {name: both[name] for name in parts} == pytest.approx({name: one[name] for name in parts}, abs=1e-3)
        for log in (one, both):
            total = log["loss/grpo"] + 5.0 * log["loss/sdpo_kl"] + 0.5 * log["loss/trace_replay_dpo"]
            assert log["loss"] == pytest.approx(total, abs=1e-4)
    for name, weight in one_process["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name]), "ranks drift apart"
        torch.testing.assert_close(first["weights"][name], weight, rtol=1e-4, atol=1e-6)


def test_twenty_steps_with_sites_and_pairs_anywhere_are_those_of_one_process(trained: Path) -> None:
    one_process, first, second = (torch.load(trained / "random" / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert len(one_process["log"]) == 20
    for kind in (0, 1):
        only = [(one[kind], other[kind]) for one, other in zip(first["had"], second["had"], strict=True)]
        assert {(True, False), (False, True), (False, False)} <= set(only), "each rank is idle at times, and both"
    for one, both in zip(one_process["log"], first["log"], strict=True):
        assert both["loss"] == pytest.approx(one["loss"], abs=1e-4)
        for name in ("loss/sdpo_kl", "loss/trace_replay_dpo"):
            assert both.get(name, 0.0) == pytest.approx(one.get(name, 0.0), abs=1e-4)
    for name, weight in one_process["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name]), "ranks drift apart"
        torch.testing.assert_close(first["weights"][name], weight, rtol=1e-3, atol=1e-5)
