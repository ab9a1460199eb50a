"""Our own passes under torch's `fully_shard`, with two gloo processes: as one process, and nobody waits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from errata_trainer.recipes.trl.ema import refuse_sharded_copy

MAIN = Path(__file__).parent / "fsdp_main.py"
TOGETHER = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--rdzv_backend=c10d")


def run(*command: str) -> None:
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.timeout(260)
@pytest.mark.parametrize(
    "options",
    ["ema", "ema copies tied", "live resharded", "ema copies tied resharded"],
    ids=lambda o: o.replace(" ", "-"),
)
def test_twenty_steps_with_sites_and_pairs_anywhere_are_those_of_one_process(tmp_path: Path, options: str) -> None:
    run(
        *TOGETHER, "--rdzv_endpoint=127.0.0.1:0", "--local_addr=127.0.0.1",
        str(MAIN), str(tmp_path), *options.split(),
    )  # fmt: skip
    run(str(MAIN), str(tmp_path), *options.split())
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert len(alone["log"]) == 20
    idle = [rank["had"].count((False, False)) for rank in (first, second)]
    assert all(idle), "each rank has steps without work of its own"
    assert any(one != other for one, other in zip(first["had"], second["had"], strict=True))
    for name in ("grpo", "sdpo_kl", "trace_replay_dpo"):
        expected = [step[name] for step in alone["log"]]
        assert [step[name] for step in first["log"]] == pytest.approx(expected, abs=1e-4), name
        assert len(set(expected)) > 10
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(first["weights"][name], weight, rtol=1e-4, atol=1e-5)


def accelerator(*, zero: int | None = None, fsdp: int | None = None) -> Any:
    state = SimpleNamespace(
        deepspeed_plugin=None if zero is None else SimpleNamespace(zero_stage=zero),
        fsdp_plugin=None if fsdp is None else SimpleNamespace(fsdp_version=fsdp),
    )
    return SimpleNamespace(state=state)


def test_a_copy_of_weights_that_cannot_be_copied_is_refused_with_what_to_use() -> None:
    for works in (accelerator(), accelerator(zero=2), accelerator(fsdp=2)):
        refuse_sharded_copy(works, "teacher='ema'", "teacher='live'")
    for kind, fails in (("ZeRO-3", accelerator(zero=3)), ("FSDP 1", accelerator(fsdp=1))):
        with pytest.raises(ValueError, match=f"{kind} has them in shards: use teacher='live'"):
            refuse_sharded_copy(fails, "teacher='ema'", "teacher='live'")
