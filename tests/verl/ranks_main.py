"""One rank of VeRL's actor with channels 2 and 3, or the only one: ``python ranks_main.py MODEL RECORDED OUT``.

Each rank has half of the rows. In one run error sites are in rows of the first half only, and pairs in the second. One
batch is recorded with the losses that TRL's trainer had for it; its model is in the directory RECORDED.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["VERL_PLATFORM"] = "cpu"
from tests.verl import cpu_plugin  # isort: skip # noqa: F401 # VeRL asks for the machine when it is imported
import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu

from errata_trainer.recipes.verl.columns import pairs_of, text_of
from errata_trainer.recipes.verl.options import LossOptions
from errata_trainer.settings import ChannelSettings
from tests.verl.recorded import batch_with_channels, begin, load
from tests.verl.workers import batch_of, pairs, passes, sites, weights_of, worker_of

WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


def main() -> None:
    """Make the passes of several batches, and train, and save what came of it."""
    torch.set_num_threads(1)
    model, recorded_model, out = map(Path, sys.argv[1:])
    if WORLD == 1:
        dist.init_process_group(backend="gloo", store=dist.HashStore(), rank=0, world_size=1)
    worker = worker_of(model)
    worker.begin_channels(
        LossOptions(ChannelSettings(teacher="ema", ema_rate=0.3, divergence_guard=None), has_pairs=True, nll=0.2)
    )
    found = {}
    for name, with_sites, with_pairs in (("spread", range(8), range(8)), ("apart", range(4), range(4, 8))):
        asked = [row if n in with_pairs else () for n, row in enumerate(pairs())]
        referred = pairs_of(worker.refer_channels(text_of([pair for row in asked for pair in row])))
        # Off by half a nat, or which action is preferred would be a matter of rounding.
        flat = iter([replace(one, ref_chosen=one.ref_chosen + 0.5 * (-1) ** n) for n, one in enumerate(referred)])
        preferred = [tuple(next(flat) for _ in row) for row in asked]
        distilled = [row if n in with_sites else () for n, row in enumerate(sites())]
        for micro in (1, 4):
            data = batch_of(distilled, preferred, alpha=0.5, beta=0.3, micro=micro)
            found[f"{name}-{micro}"] = run(worker, data)
        data = batch_of(distilled, preferred, alpha=0.5, beta=0.3, micro=2, mini_batch_size=8)
        worker.train_mini_batch(tu.chunk_tensordict(data, WORLD)[RANK])
        worker.take_channel_metrics()
    teacher = {name: weight.clone() for name, weight in worker._channels.teacher.model.state_dict().items()}
    other = worker_of(recorded_model)
    recorded = load("many_sites")
    begin(other, recorded)
    found["recorded"] = run(other, batch_with_channels(recorded, micro=2))
    torch.save({**found, "weights": weights_of(worker), "teacher": teacher}, out / f"{WORLD}-{RANK}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run(worker: Any, data: Any) -> dict[str, Any]:
    """Return loss, gradient and metrics of this rank's rows of a mini-batch."""
    loss, gradients = passes(worker, tu.chunk_tensordict(data, WORLD)[RANK])
    return {"loss": loss, "gradients": gradients, "metrics": worker.take_channel_metrics()}


if __name__ == "__main__":
    main()
