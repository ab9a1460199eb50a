"""VeRL's own V1 trainer, with Ray, on a CPU: our rollouts and our channels, in its stock command and in ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from ..server.local_server import LocalServer
from .cpu_run import LIMIT_S, prepared, trained

PLACES = ("red", "green", "blue", "gold")
"""Tasks of the first step: of each, one rollout finds the word and the other does not."""
LATER = ("rust", "teal", "navy", "plum")
TASKS = [{"place": place, "word": "owl"} for place in (*PLACES, *(f"broken{letter}" for letter in "abcd"))]
"""Tasks of two steps: in the second one, each group loses a rollout."""


@pytest.mark.timeout(LIMIT_S + 100)
def test_the_stock_trainer_learns_from_an_environment_and_not_from_its_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path, TASKS, monkeypatch)
    with LocalServer("tests.environments.shelf:SPEC", tmp_path / "data") as server:
        first, second = trained(
            tmp_path,
            server.url,
            "verl.trainer.main_ppo",
            "algorithm.adv_estimator=grpo_composer",
            "actor_rollout_ref.rollout.agent.default_agent_loop=errata",
            VERL_USE_EXTERNAL_MODULES="tests.verl.cpu_plugin,errata_trainer.recipes.verl",
        )
        episodes = httpx.get(f"{server.url}/episodes", params={"limit": 100}).json()["episodes"]
    learned_and_lost(first, second)
    assert second["actor/grad_norm"] == 0.0
    assert len(episodes) == 16 and count_of(episodes, 1.0) == 8


@pytest.mark.timeout(2 * LIMIT_S + 100)
def test_three_channels_train_failures_are_counted_and_a_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path, [*TASKS, *({"place": place, "word": "owl"} for place in LATER)], monkeypatch)
    with LocalServer("tests.environments.shelf:SPEC", tmp_path / "data") as server:
        settings = [
            f"errata.channels.pairs={{_target_:tests.verl.teachers.pairs,url:'{server.url}',buffer:'{tmp_path}/pairs'}}",
            "errata.channels.completions=2",
            "actor_rollout_ref.actor.optim.lr=0.01",
            "trainer.save_freq=2",
        ]
        first, second, third = trained(tmp_path, server.url, "errata_trainer.recipes.verl", *settings)
        printed = (tmp_path / "output.txt").read_text()
        checkpoint = f"trainer.resume_from_path={tmp_path}/checkpoints/global_step_2"
        settings += ["trainer.resume_mode=resume_path", checkpoint]
        (again,) = trained(tmp_path, server.url, "errata_trainer.recipes.verl", *settings)
    learned_and_lost(first, second)
    assert first["sdpo/kept"] == 8.0 and first["loss/sdpo_kl"] > 0
    assert first["dpo/pairs"] == 4.0 and first["loss/trace_replay_dpo"] > 0
    assert first["episodes/lost"] == 0.0 and first["rollouts/errors"] == 1.0
    assert second["episodes/lost"] == 0.5 and second["groups/of_one"] == 4.0
    (reason,) = [name for name in second if name.startswith("episodes/lost/")]
    assert second[reason] == 4.0
    assert second["sdpo/kept"] == 0.0 and "loss/sdpo_kl" not in second
    assert second["dpo/pairs"] == 4.0 and second["loss/trace_replay_dpo"] > 0, "pairs of the first step, drawn again"
    assert "step 1/3, reward 0.500" in printed and "fs.missing" in printed
    # The teacher's average, the pairs, the draws among them and the guard go on where they were.
    for name in ("loss/sdpo_kl", "loss/trace_replay_dpo", "dpo/margin", "sdpo/divergence", "actor/grad_norm"):
        assert again[name] == pytest.approx(third[name], rel=1e-3), name
    assert again["dpo/buffer"] == third["dpo/buffer"] == 16.0


@pytest.mark.timeout(LIMIT_S + 100)
def test_channels_are_parts_of_the_advantages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path, [{"place": place, "word": "owl"} for place in PLACES], monkeypatch)
    with LocalServer("tests.environments.shelf:SPEC", tmp_path / "data") as server:
        (step,) = trained(
            tmp_path,
            server.url,
            "errata_trainer.recipes.verl",
            f"errata.channels.pairs={{_target_:tests.verl.teachers.pairs,url:'{server.url}',buffer:'{tmp_path}/pairs'}}",
            "errata.channels.form=estimator",
            "algorithm.beta_replay=0.25",
        )
    # GRPO gives each group of two +-0.7071; both teachers vote against each failing turn. The hint changes little.
    assert step["critic/advantages/min"] == pytest.approx(-0.7071 - 0.25, abs=0.02)
    assert step["critic/advantages/min"] != pytest.approx(-0.7071 - 0.25, abs=1e-5)
    assert step["critic/advantages/max"] == pytest.approx(0.7071, abs=1e-3)
    assert step["prm/turns"] == 8.0 and step["prm/score"] == -1.0
    assert step["sdpo/kept"] == 8.0 and step["sdpo/not_scored"] == 0.0
    assert "loss/sdpo_kl" not in step and "dpo/pairs" not in step


def learned_and_lost(first: dict[str, float], second: dict[str, float]) -> None:
    # Step 1: of each group one rollout was rewarded, and what was trained on is what was sampled.
    assert first["critic/score/mean"] == 0.5
    assert first["critic/advantages/max"] > 0.7 > -0.7 > first["critic/advantages/min"]
    assert first["actor/grad_norm"] > 0
    assert first["training/rollout_probs_diff_max"] < 1e-3
    # Step 2: of each group one rollout was lost. The other one had the best reward, and moves nothing.
    assert second["critic/score/max"] == 1.0
    assert second["critic/advantages/max"] == second["critic/advantages/min"] == 0.0


def count_of(episodes: list[dict[str, Any]], reward: float) -> int:
    return sum(episode.get("reward") == reward for episode in episodes)
