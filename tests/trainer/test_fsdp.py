"""Our own passes under torch's `fully_shard`, with two gloo processes: as one process, and nobody waits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import alone, together

from errata_trainer.recipes.trl.refusals import refuse_sharded_copy

pytestmark = pytest.mark.ranks

MAIN = Path(__file__).parent / "fsdp_main.py"
RUNS = ("ema", "ema-copies-tied", "live-resharded", "ema-copies-tied-resharded")

LOADED = ("loaded-ema", "loaded-ema-tied-resharded", "loaded-initial-resharded")
"""Runs in which the student is in shards before the channels see it, also in one process."""
WHOLE = {run: run.removeprefix("loaded-").removesuffix("-resharded") for run in LOADED}
"""The run of a whole student in one process that each of them has to equal."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of all runs: most of the time of each would be its imports."""
    out = tmp_path_factory.mktemp("runs")
    wholes = sorted({*WHOLE.values()} - {*RUNS})
    for run in (*RUNS, *wholes, *LOADED):
        (out / run).mkdir()
    together(MAIN, out, *RUNS, *LOADED)
    alone(MAIN, out, *RUNS, *wholes, *LOADED)
    return out


@pytest.mark.parametrize("run", RUNS)
def test_twenty_steps_with_sites_and_pairs_anywhere_are_those_of_one_process(trained: Path, run: str) -> None:
    one_process, first, second = (torch.load(trained / run / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert len(one_process["log"]) == 20
    idle = [rank["had"].count((False, False)) for rank in (first, second)]
    assert all(idle), "each rank has steps without work of its own"
    assert any(one != other for one, other in zip(first["had"], second["had"], strict=True))
    for name in ("grpo", "sdpo_kl", "trace_replay_dpo"):
        expected = [step[name] for step in one_process["log"]]
        assert [step[name] for step in first["log"]] == pytest.approx(expected, abs=1e-4), name
        assert len(set(expected)) > 10
    for name, weight in one_process["weights"].items():
        torch.testing.assert_close(first["weights"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["1-0", "2-0"])
@pytest.mark.parametrize("run", LOADED)
def test_a_student_in_shards_trains_and_resumes_as_a_whole_one_with_copies_that_are_loaded(
    trained: Path, run: str, name: str
) -> None:
    whole, shards = torch.load(trained / WHOLE[run] / "1-0.pt"), torch.load(trained / run / f"{name}.pt")
    for part in ("grpo", "sdpo_kl", "trace_replay_dpo"):
        expected = [step[part] for step in whole["log"]]
        assert [step[part] for step in shards["log"]] == pytest.approx(expected, abs=1e-4), part
        assert len(set(expected)) > 10
    for weights in ("weights", "teacher"):
        assert shards[weights].keys() == whole[weights].keys() != set()
        for key, weight in whole[weights].items():
            torch.testing.assert_close(shards[weights][key], weight, rtol=1e-4, atol=1e-5)


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
