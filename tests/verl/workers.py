"""One of VeRL's training workers in the process of a test, with a tiny model on a CPU, and batches for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss

from errata_trainer import DpoPair, Rollout, SdpoItem
from errata_trainer.assembly.preferences import rejected_here
from errata_trainer.recipes.verl.actor import ErrataTrainingWorker
from errata_trainer.recipes.verl.columns import ALPHA, BETA, ITEMS_COLUMN, OWN_COLUMN, PAIRS_COLUMN, text_of

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from recorded_cases import Case, ids_of, items_of, pairs_of, rollouts

SITES = [[], [1], [0, 1, 2], [0], [2], [], [0, 2], []]
PAIRED = [[0], [], [2], [1], [], [], [0, 1, 2], []]
CASE = Case(SITES, PAIRED, cut=3)
"""Rows of no, one and several sites and pairs; one ends in the middle of a turn."""


@contextmanager
def alone() -> Iterator[None]:
    """Make this process the only rank, as Ray makes a worker."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    dist.init_process_group(backend="gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def worker_of(
    path: Path,
    *,
    engine: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    dtype: str = "fp32",
) -> ErrataTrainingWorker:
    """Return a worker with VeRL's FSDP2 engine and its PPO loss.

    Args:
        path: Directory of the model.
        engine: Other options of the engine.
        model: Other options of the model.
        dtype: Precision of the engine's passes.
    """
    worker = ErrataTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                **{
                    "path": str(path),
                    "use_remove_padding": False,
                    "enable_gradient_checkpointing": False,
                    "override_config": {"attn_implementation": "eager"},
                    **(model or {}),
                }
            ),
            engine_config=FSDPEngineConfig(
                **{
                    "strategy": "fsdp2",
                    "use_torch_compile": False,
                    "use_dynamic_bsz": False,
                    "micro_batch_size_per_gpu": 8,
                    "infer_micro_batch_size_per_gpu": 8,
                    "mixed_precision": {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                    **(engine or {}),
                }
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-2, weight_decay=0.0, total_training_steps=8),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    actor = ActorConfig(
        strategy="fsdp2",
        rollout_n=2,
        use_dynamic_bsz=False,
        ppo_micro_batch_size_per_gpu=8,
        optim=FSDPOptimizerConfig(lr=1e-2),
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def rows() -> list[Rollout]:
    """Return the rollouts of `CASE`."""
    return rollouts(CASE)


def sites() -> list[tuple[SdpoItem, ...]]:
    """Return the error sites of `CASE`."""
    return items_of(CASE, rows())


def pairs() -> list[tuple[DpoPair, ...]]:
    """Return the pairs of `CASE`; in odd rows, of states that are not in the batch."""
    here = pairs_of(CASE, rows())
    there = pairs_of(Case(SITES, PAIRED, cut=3, elsewhere=True), rows())
    return [there[n] if n % 2 else here[n] for n in range(len(here))]


def batch_of(
    sites: Sequence[Sequence[SdpoItem]],
    pairs: Sequence[Sequence[DpoPair]],
    *,
    made: Sequence[Rollout] | None = None,
    columns: bool = True,
    alpha: float = 0.0,
    beta: float = 0.0,
    micro: int = 8,
    **more: Any,
) -> Any:
    """Return the mini-batch that VeRL hands to the actor.

    Args:
        sites: Error sites of each row.
        pairs: Pairs of each row.
        made: Rollout of each row; None for those of `CASE`.
        columns: Whether the batch has the channels' columns and weights.
        alpha: Weight of channel 2.
        beta: Weight of channel 3.
        micro: Rows of a micro-batch.
        **more: Other values of the batch.
    """
    made = rows() if made is None else made
    columns_of = {
        "prompts": [torch.tensor(row.prompt_ids) for row in made],
        "responses": [torch.tensor(row.completion_ids) for row in made],
        "input_ids": [torch.tensor(ids_of(row)) for row in made],
        "position_ids": [torch.arange(len(ids_of(row))) for row in made],
        "response_mask": [torch.tensor(row.mask) for row in made],
        "loss_mask": [torch.tensor([0] * len(row.prompt_ids) + list(row.mask)) for row in made],
        "old_log_probs": [-6.0 + 0.3 * torch.sin(torch.arange(len(row.mask)) + n) for n, row in enumerate(made)],
        "advantages": [torch.cos(torch.arange(len(row.mask)) + n) for n, row in enumerate(made)],
    }
    data: dict[str, Any] = {
        name: torch.nested.as_nested_tensor(v, layout=torch.jagged) for name, v in columns_of.items()
    }
    values: dict[str, Any] = {
        "temperature": 1.0,
        "global_batch_size": len(made),
        "micro_batch_size_per_gpu": micro,
        "use_dynamic_bsz": False,
        **more,
    }
    if columns:
        own = [rejected_here(of_row, row, trained=True) for of_row, row in zip(pairs, made, strict=True)]
        data[ITEMS_COLUMN] = [text_of(of_row) for of_row in sites]
        data[PAIRS_COLUMN] = [text_of(of_row) for of_row in pairs]
        data[OWN_COLUMN] = [str(list(of_row)).lower() for of_row in own]
        values |= {ALPHA: alpha, BETA: beta}
    return tu.get_tensordict(data, values)


def slow_inputs(made: Sequence[Rollout], **more: Any) -> dict[str, Any]:
    """Return rows as the slow implementation takes them."""

    def padded(asked: list[Sequence[int]]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in asked], batch_first=True)

    prompts, completions = (padded([getattr(row, name) for row in made]) for name in ("prompt_ids", "completion_ids"))
    masks = {"prompt_mask": (prompts != 0).long(), "completion_mask": (completions != 0).long()}
    return {"prompt_ids": prompts, "completion_ids": completions, **masks, **more}


def passes(worker: Any, data: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a mini-batch and its gradient, without an optimizer step."""
    engine = worker.engine
    for key, value in {
        "use_remove_padding": worker.model_config.use_remove_padding,
        "use_fused_kernels": False,
    }.items():
        tu.assign_non_tensor(data, **{key: value})
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data, worker.loss_fn)
        gradients = {name: weight.grad.full_tensor().clone() for name, weight in engine.module.named_parameters()}
    return sum(output["loss"]), gradients


def weights_of(worker: Any) -> dict[str, torch.Tensor]:
    """Return the weights of the worker's model, whole."""
    return {name: weight.full_tensor().detach().clone() for name, weight in worker.engine.module.named_parameters()}
