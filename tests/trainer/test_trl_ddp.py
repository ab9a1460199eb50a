"""Two ranks under DDP, with error sites on one of them and pairs on the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from errata_server.process import ServerProcess

MAIN = Path(__file__).parent / "ddp_main.py"


TOGETHER = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--rdzv_backend=c10d")


def run(*command: str) -> None:
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}  # also where the machine's own name leads nowhere
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", [(), ("--checkpointing",)], ids=["plain", "checkpointing"])
def test_two_ranks_train_as_one_process_does(server: ServerProcess, tmp_path: Path, options: tuple[str, ...]) -> None:
    run(
        *TOGETHER,
        "--rdzv_endpoint=127.0.0.1:0",
        "--local_addr=127.0.0.1",
        str(MAIN),
        server.url,
        str(tmp_path),
        *options,
    )
    run(str(MAIN), server.url, str(tmp_path), *options)
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert alone["log"][0]["sdpo/tokens"] > 0 and alone["log"][0]["dpo/pairs"] == 3.0
    for one, both in zip(alone["log"], first["log"], strict=True):
        parts = ("loss", "loss/grpo", "loss/sdpo_kl", "loss/trace_replay_dpo", "sdpo/tokens", "sdpo/sites", "dpo/pairs")
        assert {name: both[name] for name in parts} == pytest.approx({name: one[name] for name in parts}, abs=1e-3)
        for log in (one, both):
            total = log["loss/grpo"] + 5.0 * log["loss/sdpo_kl"] + 0.5 * log["loss/trace_replay_dpo"]
            assert log["loss"] == pytest.approx(total, abs=1e-4)
    for name, weight in alone["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name]), "ranks drift apart"
        torch.testing.assert_close(first["weights"][name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.timeout(300)
def test_twenty_steps_with_sites_and_pairs_anywhere_are_those_of_one_process(
    server: ServerProcess, tmp_path: Path
) -> None:
    common = (str(MAIN), server.url, str(tmp_path), "--random")
    run(*TOGETHER, "--rdzv_endpoint=127.0.0.1:0", "--local_addr=127.0.0.1", *common)
    run(*common)
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert len(alone["log"]) == 20
    for kind in (0, 1):
        only = [(one[kind], other[kind]) for one, other in zip(first["had"], second["had"], strict=True)]
        assert {(True, False), (False, True), (False, False)} <= set(only), "each rank is idle at times, and both"
    for one, both in zip(alone["log"], first["log"], strict=True):
        assert both["loss"] == pytest.approx(one["loss"], abs=1e-4)
        for name in ("loss/sdpo_kl", "loss/trace_replay_dpo"):
            assert both.get(name, 0.0) == pytest.approx(one.get(name, 0.0), abs=1e-4)
    for name, weight in alone["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name]), "ranks drift apart"
        torch.testing.assert_close(first["weights"][name], weight, rtol=1e-3, atol=1e-5)
