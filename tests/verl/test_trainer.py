"""VeRL's own V1 trainer, with Ray, on a CPU: our rollouts and our channels, in its stock command and in ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from errata_trainer.demo.script import TASK

from .cpu_run import LIMIT_S, Cluster, KeptServer, prepared, trained
from .scripts import instance

WELL = ("red", "green", "blue", "gold")
"""Places of the first step: of each group, one rollout finds the word and the other does not."""
BROKEN = tuple(f"broken{letter}" for letter in "abcd")
"""Places of which each group loses a rollout."""
LATER = ("rust", "teal", "navy", "plum")
KILLED = ("mint", "rose", "hold", "kill:mint,rose")
"""Places of a step in which the server is killed when two groups are done and all rollouts of the others wait."""
ORPHANS = tuple(f"orphan{letter}" for letter in "abcd")
"""Places of a step in which the worker dies with all rollouts."""
INSTEAD = ("lime", "pink", "jade", "aqua")
SHELF = "tests.environments.killed:SHELF"


def places(*names: str) -> list[dict[str, Any]]:
    return [{"place": name, "word": "owl"} for name in names]


@pytest.mark.timeout(LIMIT_S + 100)
def test_the_stock_trainer_learns_from_an_environment_and_not_from_its_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster
) -> None:
    prepared(tmp_path, places(*WELL, *BROKEN), monkeypatch)
    with KeptServer(SHELF, tmp_path / "data") as server:
        first, second = trained(
            tmp_path,
            server.url,
            cluster,
            stock=True,
        )
        episodes = httpx.get(f"{server.url}/episodes", params={"limit": 100}).json()["episodes"]
    learned(first)
    lost_one_each(second)
    assert second["actor/grad_norm"] == 0.0
    assert len(episodes) == 16 and sum(episode.get("reward") == 1.0 for episode in episodes) == 8


@pytest.mark.timeout(2 * LIMIT_S + 100)
def test_three_channels_train_failures_are_counted_and_a_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster
) -> None:
    prepared(tmp_path, places(*WELL, *BROKEN, *LATER, *KILLED, *ORPHANS, *INSTEAD), monkeypatch)
    with KeptServer(SHELF, tmp_path / "data") as server:
        settings = [
            f"errata.channels.pairs={{_target_:tests.verl.teachers.pairs,url:'{server.url}',buffer:'{tmp_path}/pairs'}}",
            "errata.channels.completions=2",
            "actor_rollout_ref.actor.optim.lr=0.01",
            "trainer.save_freq=2",
        ]
        first, second, third, fourth, fifth = trained(
            tmp_path, server.url, cluster, *settings, "trainer.total_training_steps=5"
        )
        printed = (tmp_path / "output.txt").read_text()
        (tmp_path / "log.jsonl").rename(tmp_path / "uninterrupted.jsonl")  # the next run writes a new log
        checkpoint = f"trainer.resume_from_path={tmp_path}/checkpoints/global_step_2"
        settings += ["trainer.resume_mode=resume_path", checkpoint, "trainer.total_training_steps=3"]
        (again,) = trained(tmp_path, server.url, cluster, *settings)
    learned(first)
    assert first["sdpo/kept"] == 8.0 and first["loss/sdpo_kl"] > 0
    assert first["dpo/pairs"] == 4.0 and first["loss/trace_replay_dpo"] > 0
    assert first["episodes/lost"] == 0.0 and first["rollouts/errors"] == 1.0
    assert "step 1/5, reward 0.500" in printed and "fs.missing" in printed
    lost_one_each(second)
    assert second["episodes/lost"] == 0.5 and second["groups/of_one"] == 4.0
    assert list(reasons(second).values()) == [4.0]
    assert second["sdpo/kept"] == 0.0 and "loss/sdpo_kl" not in second
    assert second["dpo/pairs"] == 4.0 and second["actor/grad_norm"] > 0, "pairs of the first step, drawn again"
    # The teacher's average, the pairs, the draws among them and the guard go on where they were.
    # The gradient is not compared: which rollout of a group found the word is chance, and so is the order of rows.
    for name in ("loss/sdpo_kl", "loss/trace_replay_dpo", "dpo/margin", "sdpo/divergence"):
        assert again[name] == pytest.approx(third[name], rel=1e-3), name
    assert again["dpo/buffer"] == third["dpo/buffer"] == 16.0
    # Step 4: the server was killed. Two groups are lost whole, for its sessions cannot be restored; the others train.
    assert server.deaths == 1
    assert fourth["episodes/lost"] == 0.5 and reasons(fourth) == {"SESSION_LOST": 4.0}
    assert fourth["critic/score/mean"] == 0.5 and fourth["critic/advantages/max"] > 0.7
    assert fourth["sdpo/kept"] == 4.0 and fourth["groups/of_one"] == 0.0 and fourth["actor/grad_norm"] > 0
    # Step 5: the worker died with the whole batch. Another batch is played by another worker.
    assert fifth["workers/lost"] == 1.0 and fifth["batches/lost"] == 1.0
    assert reasons(fifth) == {"WORKER_DIED": 8.0}
    learned(fifth)
    assert fifth["sdpo/kept"] == 8.0


@pytest.mark.timeout(LIMIT_S + 100)
def test_channels_are_parts_of_the_advantages_and_terminals_survive_their_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster
) -> None:
    prepared(tmp_path, [{"task_id": TASK}] * 8, monkeypatch, env="terminal")
    pairs = "{_target_:tests.verl.teachers.pairs,env:terminal,"
    with KeptServer("tests.environments.killed:TERMINAL", tmp_path / "data") as server:
        steps = trained(
            tmp_path,
            server.url,
            cluster,
            f"errata.channels.pairs={pairs}url:'{server.url}',buffer:'{tmp_path}/pairs'}}",
            "errata.channels.form=estimator",
            "algorithm.beta_replay=0.25",
            "data.max_prompt_length=1024",
            "data.max_response_length=1024",
            env="terminal",
        )
    assert server.deaths == 1 and len(steps) == 2
    for step in steps:
        assert step["episodes/lost"] == 0.0 and step["critic/score/mean"] == 0.5
        # GRPO gives each group of two +-0.7071; both teachers vote against each failing turn. The hint changes little.
        assert step["critic/advantages/min"] == pytest.approx(-0.7071 - 0.25, abs=0.02)
        assert step["critic/advantages/min"] != pytest.approx(-0.7071 - 0.25, abs=1e-5)
        assert step["critic/advantages/max"] == pytest.approx(0.7071, abs=1e-3)
        assert step["prm/turns"] == 8.0 and step["prm/score"] == -1.0
        assert step["sdpo/kept"] == 8.0 and step["sdpo/not_scored"] == 0.0
        assert "loss/sdpo_kl" not in step and "dpo/pairs" not in step


@pytest.mark.timeout(LIMIT_S + 100)
def test_rollouts_go_on_while_the_trainer_learns_to_repair_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster
) -> None:
    tasks = [{"instance_id": instance().instance_id}] * 12
    texts = [instance().problem_statement, json.dumps(instance().patch)]
    prepared(tmp_path, tasks, monkeypatch, env="swe_bench_lite", texts=texts)
    with KeptServer("swe_bench_lite", tmp_path / "data") as server:
        steps = trained(
            tmp_path,
            server.url,
            cluster,
            "trainer.v1.trainer_mode=colocate_async",
            "trainer.total_training_steps=2",
            "data.max_prompt_length=768",
            "data.max_response_length=1024",
            env="swe_bench_lite",
        )
    assert len(steps) == 2
    for step in steps:
        assert step["episodes/lost"] == 0.0 and step["critic/score/mean"] == 0.5
        assert step["sdpo/kept"] == 8.0 and step["loss/sdpo_kl"] > 0 and step["actor/grad_norm"] > 0


@pytest.mark.timeout(LIMIT_S + 100)
def test_rollout_servers_apart_from_the_trainer_score_and_are_given_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster
) -> None:
    prepared(tmp_path, places(*WELL, *LATER, *INSTEAD), monkeypatch)
    with KeptServer(SHELF, tmp_path / "data") as server:
        steps = trained(
            tmp_path,
            server.url,
            cluster,
            "trainer.v1.trainer_mode=separate_async",
            "trainer.v1.separate_async.parameter_sync_step=2",
            "trainer.total_training_steps=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
        )
    assert len(steps) == 2
    for step in steps:
        learned(step)
        assert step["sdpo/kept"] == 4.0 and step["loss/sdpo_kl"] > 0, "4 in each of the step's two batches"


def learned(step: dict[str, float]) -> None:
    # Of each group one rollout was rewarded, and what was trained on is what was sampled.
    assert step["critic/score/mean"] == 0.5
    assert step["critic/advantages/max"] > 0.7 > -0.7 > step["critic/advantages/min"]
    assert step["actor/grad_norm"] > 0
    assert step["training/rollout_probs_diff_max"] < 1e-4


def lost_one_each(step: dict[str, float]) -> None:
    # Of each group one rollout was lost. The other one had the best reward, and moves nothing.
    assert step["critic/score/max"] == 1.0
    assert step["critic/advantages/max"] == step["critic/advantages/min"] == 0.0


def reasons(step: dict[str, float]) -> dict[str, float]:
    """Return the number of lost rollouts by reason."""
    prefix = "episodes/lost/"
    return {name.removeprefix(prefix): value for name, value in step.items() if name.startswith(prefix)}
