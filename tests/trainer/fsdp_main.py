"""One rank of training under torch's `fully_shard`, or all of it in one process: ``python fsdp_main.py OUT RUN...``.

Each run is named after its options, as ``live-resharded``, and has a directory of that name in OUT. Passes are our own:
the student's with its states captured, the frozen teacher's, and the pairs'. The rollouts are recorded, and in each
step a seeded draw says which rows have error sites and pairs, so that a rank often has none.

In runs with ``loaded`` the student is in shards before the channels see it, also in one process. So the copies of it
are the model loaded again, and the channels are made anew from a checkpoint in the middle.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent / "channels"))
sys.path.insert(0, str(Path(__file__).parent))
import conftest  # noqa: F401 # offline, one thread
import torch
import torch.distributed as dist
from three_turns import HEADER, HINT, rollout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy_models import toy

from errata_trainer.assembly.channel_set import ChannelSet, channels_for
from errata_trainer.assembly.distillation import ITEMS
from errata_trainer.assembly.layouts import PROMPT_LENGTHS
from errata_trainer.assembly.pair_source import RecordedPairs
from errata_trainer.assembly.preferences import OWN, PAIRS, rejected_here
from errata_trainer.channels.compose import DPO, SDPO, Term, compose, global_counts
from errata_trainer.channels.splicing import splice
from errata_trainer.rollouts.rollout import DpoPair, SdpoItem
from errata_trainer.settings import ChannelSettings

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
ROWS, STEPS = 4, 20
CPU = torch.device("cpu")


def drawn(step: int) -> tuple[list[tuple[SdpoItem, ...]], list[tuple[DpoPair, ...]]]:
    """Return the error sites and pairs of each of the step's rows: none, one or two."""
    chance = random.Random(step)
    whole = rollout()
    ids = whole.prompt_ids + whole.completion_ids
    items, pairs = [], []
    for _ in range(ROWS):
        turns = chance.sample(range(3), chance.choice([0, 0, 1, 2]))
        items.append(tuple(splice(whole, turn, HINT, header_ids=HEADER) for turn in sorted(turns)))
        made = []
        for _ in range(chance.choice([0, 0, 0, 1, 2])):
            turn = whole.turns[chance.randrange(3)]
            context = whole.prompt_ids + whole.completion_ids[: turn.start]
            rejected = whole.completion_ids[turn.start : turn.stop]
            made.append(DpoPair(context, (chance.randrange(60, 70), 99), rejected))
        pairs.append(tuple(made))
    assert all(ids[: len(p.context_ids)] == p.context_ids for of_row in pairs for p in of_row)
    return items, pairs


def micro_batch(items: Any, pairs: Any) -> dict[str, Any]:
    """Return what TRL makes of these rows: prompts padded on the left."""
    whole, rows = rollout(), len(items)
    prompt = torch.tensor([[0, *whole.prompt_ids]] * rows)
    completion = torch.tensor([list(whole.completion_ids)] * rows)
    return {
        "prompt_ids": prompt,
        "prompt_mask": (prompt != 0).long(),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        ITEMS: list(items),
        PAIRS: list(pairs),
        OWN: [rejected_here(of_row, whole, trained=True) for of_row in pairs],
        PROMPT_LENGTHS: [len(whole.prompt_ids)] * rows,
    }


def sharded(model: Any, *, reshard: bool) -> Any:
    """Shard a model over the ranks, layer by layer."""
    mesh = init_device_mesh("cpu", (WORLD,))
    options = {"reshard_after_forward": True} if reshard else {}
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loaded(options: Collection[str]) -> Any:
    """Return the model as it is before training."""
    return toy("qwen3 tied" if "tied" in options else "qwen3").float()


def channels_of(model: Any, options: Collection[str]) -> ChannelSet:
    """Return the channels of a run, with the reference that the policy was at the beginning."""
    teacher: Any = next(name for name in ("live", "ema", "initial") if name in options)
    settings = ChannelSettings(
        teacher=teacher, ema_rate=0.3, dpo_reference="initial", dpo_nll=0.2, divergence_guard=None
    )
    copied: Any = {"copied": lambda _: loaded(options)} if "loaded" in options else {}
    return channels_for(settings, student=model, pairs=RecordedPairs([]), **copied)


def train(options: Collection[str], directory: Path) -> dict[str, Any]:
    """Return the parts of each step's loss, which steps had sites and pairs here, and the weights at the end."""
    reshard = "resharded" in options
    model = loaded(options).train()
    if "loaded" in options:
        model = sharded(model, reshard=reshard)
    channels = channels_of(model, options)
    channels.begin(model, CPU)
    if WORLD > 1 and "loaded" not in options:
        if "copies" in options:  # the frozen models are in shards as well
            channels.teacher.model = sharded(channels.teacher.model, reshard=reshard)
            channels.initial = sharded(channels.initial, reshard=reshard)
        model = sharded(model, reshard=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log, had = [], []
    here = slice(RANK * ROWS // WORLD, (RANK + 1) * ROWS // WORLD)
    for step in range(STEPS):
        if "loaded" in options and step == STEPS // 2:
            directory.mkdir(exist_ok=True)
            channels.save(directory, weights=RANK == 0)
            dist.barrier()
            channels = channels_of(model, options)
            channels.begin(model, CPU, directory)
        distillation, preferences = channels.distillation, channels.preferences
        items, pairs = drawn(step)
        referred = channels.referred([p for row in pairs[here] for p in row], "initial", model)
        rest = iter(referred)
        inputs = micro_batch(items[here], [tuple(next(rest) for _ in row) for row in pairs[here]])
        counts = {
            "sdpo": float(sum(len(item.target_ids) for row in items[here] for item in row)),
            "dpo": float(len(referred)),
        }
        had.append((counts["sdpo"] > 0.0, counts["dpo"] > 0.0))
        totals = global_counts(counts, device="cpu")
        with distillation.capturing(model, inputs) as captured, preferences.capturing(model, inputs) as own:
            ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
            mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
            grpo = model(input_ids=ids, attention_mask=mask).logits.square().mean() * 0.01
        sdpo = dpo = None
        if totals["sdpo"]:
            summed, _, _ = distillation.loss(model, inputs, captured)
            sdpo = Term(summed, totals["sdpo"])
        if totals["dpo"]:
            if own.pairs:
                summed, _ = preferences.loss(model, own, pad_id=0)
                dpo = Term(summed, totals["dpo"])
            else:
                dpo = Term(preferences.idle(model, pad_id=0), totals["dpo"])
        loss, parts = compose(grpo, sdpo=sdpo, dpo=dpo, alpha_sdpo=0.5, beta_replay=0.3, averaged_over=WORLD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        channels.update(model)
        own_parts = {name: float(parts.get(f"loss/{name}", 0.0)) for name in ("grpo", SDPO, DPO)}
        summed_parts = global_counts(own_parts, device="cpu")
        log.append({name: float(value) for name, value in summed_parts.items()})
        log[-1]["grpo"] /= WORLD
    weights = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }
    teacher = {} if channels.teacher is None else channels.teacher.model.state_dict()
    return {"weights": weights, "log": log, "had": had, "teacher": teacher}


def main() -> None:
    """Train each run, and save what it returns."""
    if WORLD > 1:
        dist.init_process_group("gloo")
    for run in sys.argv[2:]:
        if "loaded" in run and not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        directory = Path(sys.argv[1]) / run
        trained = train(run.split("-"), directory / f"checkpoint-{WORLD}")
        torch.save(trained, directory / f"{WORLD}-{RANK}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
