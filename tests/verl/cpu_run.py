"""VeRL's own commands in a process of their own, with Ray, on a CPU, in an environment of a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from errata_trainer.recipes.verl import dataset as dataset_module
from errata_trainer.recipes.verl import write_dataset
from errata_trainer.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
LIMIT_S = 1500.0


def settings(directory: Path, url: str, ray: str) -> list[str]:
    """Return the arguments of a command: steps of four prompts with two rollouts each, once through the data.

    Args:
        directory: Directory of the data and of the model.
        url: URL of the server.
        ray: Directory for Ray's files; the names of its sockets have to be short.
    """
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"++errata.url={url}",
        "++errata.env=shelf",
        f"data.train_files={directory}/train.parquet",
        f"data.val_files={directory}/train.parquet",
        "data.train_batch_size=4",
        "data.shuffle=false",
        "data.max_prompt_length=512",
        "data.max_response_length=512",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={directory}/model",
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        f"{actor}.strategy=fsdp2",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=8",
        f"{actor}.use_kl_loss=false",
        f"{actor}.use_torch_compile=false",
        f"{rollout}.name=scripted",
        f"{rollout}.n=2",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.n_gpus_per_node=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.calculate_log_probs=true",
        f"{rollout}.free_cache_engine=false",
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.logger=[file]",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.total_epochs=1",
        f"trainer.default_local_dir={directory}/checkpoints",
        f"hydra.run.dir={directory}/hydra",
        "ray_kwargs.ray_init.num_cpus=12",
        "+ray_kwargs.ray_init.address=local",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=false",
        f"+ray_kwargs.ray_init._temp_dir={ray}",
    ]


def prepared(directory: Path, tasks: Sequence[dict[str, Any]], patch: pytest.MonkeyPatch) -> None:
    """Write a model and a data set of tasks."""
    tokenizer = tiny_tokenizer(["One of red, green, blue holds a word. Submit it. Not in der."])
    tokenizer.save_pretrained(directory / "model")
    tiny_model(tokenizer).save_pretrained(directory / "model")
    patch.setattr(dataset_module, "offered_tasks", lambda *_, **__: list(tasks))
    write_dataset(directory / "train.parquet", "http://none", "shelf")


def trained(directory: Path, url: str, module: str, *more: str, **environment: str) -> list[dict[str, float]]:
    """Run a command to its end, and return what VeRL logged in each step.

    Args:
        directory: Directory that `prepared` filled.
        url: URL of the server.
        module: Module with the command.
        *more: More arguments of the command.
        **environment: More environment variables.
    """
    output, logged = directory / "output.txt", directory / "log.jsonl"
    logged.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as ray, output.open("w") as file:
        variables = {
            **os.environ,
            "VERL_USE_EXTERNAL_MODULES": "tests.verl.cpu_plugin",
            "VERL_PLATFORM": "cpu",
            "VERL_FILE_LOGGER_PATH": str(logged),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            **environment,
        }
        ended = subprocess.run(
            [sys.executable, "-m", module, *settings(directory, url, ray), *more],
            cwd=ROOT,
            env=variables,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    assert ended.returncode == 0, output.read_text()[-6000:]
    steps = map(json.loads, logged.read_text().splitlines())
    return [{name: float(value) for name, value in step["data"].items()} for step in steps]
