"""VeRL's own V1 trainer, with Ray, on a CPU: our rollouts and our advantages in its stock command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from errata_trainer.recipes.verl import dataset as dataset_module
from errata_trainer.recipes.verl import write_dataset
from errata_trainer.tiny import tiny_model, tiny_tokenizer

from ..server.local_server import LocalServer

ROOT = Path(__file__).parents[2]
LIMIT_S = 1500.0
PLACES = ("red", "green", "blue", "gold")
"""Tasks of the first step: of each, one rollout finds the word and the other does not."""


def settings(directory: Path, url: str, ray: str) -> list[str]:
    """Return the arguments of VeRL's command: two steps of four prompts with two rollouts each.

    Args:
        directory: Directory of the data and of the model.
        url: URL of the server.
        ray: Directory for Ray's files; the names of its sockets have to be short.
    """
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo_composer",
        f"{rollout}.agent.default_agent_loop=errata",
        f"+errata.url={url}",
        "+errata.env=shelf",
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
        "trainer.total_training_steps=2",
        "trainer.total_epochs=1",
        f"trainer.default_local_dir={directory}/checkpoints",
        f"hydra.run.dir={directory}/hydra",
        "ray_kwargs.ray_init.num_cpus=12",
        "+ray_kwargs.ray_init.address=local",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=false",
        f"+ray_kwargs.ray_init._temp_dir={ray}",
    ]


@pytest.mark.timeout(LIMIT_S + 100)
def test_the_stock_trainer_learns_from_an_environment_and_not_from_its_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer(["One of red, green, blue holds a word. Submit it. Not in der."])
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    tasks = [{"place": place, "word": "owl"} for place in (*PLACES, *["broken"] * 4)]
    monkeypatch.setattr(dataset_module, "offered_tasks", lambda *_, **__: tasks)
    write_dataset(tmp_path / "train.parquet", "http://none", "shelf")
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as ray,
        LocalServer("tests.environments.shelf:SPEC", tmp_path / "data") as server,
    ):
        environment = {
            **os.environ,
            "VERL_USE_EXTERNAL_MODULES": "tests.verl.cpu_plugin,errata_trainer.recipes.verl",
            "VERL_PLATFORM": "cpu",
            "VERL_FILE_LOGGER_PATH": str(tmp_path / "log.jsonl"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings(tmp_path, server.url, ray)]
        with (tmp_path / "output.txt").open("w") as output:
            ended = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                check=False,
            )
        episodes = httpx.get(f"{server.url}/episodes", params={"limit": 100}).json()["episodes"]
    assert ended.returncode == 0, (tmp_path / "output.txt").read_text()[-4000:]
    first, second = (step["data"] for step in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines()))
    # Step 1: of each group one rollout was rewarded, and what was trained on is what was sampled.
    assert float(first["critic/score/mean"]) == 0.5
    assert float(first["critic/advantages/max"]) > 0.7 > -0.7 > float(first["critic/advantages/min"])
    assert float(first["actor/grad_norm"]) > 0
    assert float(first["training/rollout_probs_diff_max"]) < 1e-3
    # Step 2: of each group one rollout was lost. The other one had the best reward, and moves nothing.
    assert float(second["critic/score/max"]) == 1.0
    assert float(second["critic/advantages/max"]) == float(second["critic/advantages/min"]) == 0.0
    assert float(second["actor/grad_norm"]) == 0.0
    assert len(episodes) == 16 and count_of(episodes, 1.0) == 8


def count_of(episodes: list[dict[str, Any]], reward: float) -> int:
    return sum(episode.get("reward") == reward for episode in episodes)
