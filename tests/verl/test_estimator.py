"""`grpo_composer` against VeRL's own estimators."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
import uuid
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_adv_estimator_fn
from verl.trainer.ppo.ray_trainer import compute_advantage

from errata_trainer.recipes.verl import GRPO_COMPOSER, Shaping, grpo_composer, shaping

ROWS, LENGTH = 8, 6


def batch(groups: list[str], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Return rewards at the last sampled token, masks with tool results and padding, and groups."""
    draw = torch.Generator().manual_seed(seed)
    mask = (torch.rand(len(groups), LENGTH, generator=draw) > 0.3).float()
    mask[:, 0] = 1
    rewards = torch.zeros(len(groups), LENGTH)
    rewards[:, 0] = torch.rand(len(groups), generator=draw)
    return rewards, mask, np.array(groups, dtype=object)


def settings(**given: Any) -> Any:
    return OmegaConf.create({"norm_adv_by_std_in_grpo": True, **given})


@pytest.mark.parametrize("norm", [True, False])
def test_groups_of_several_have_verls_advantages_to_the_last_bit(norm: bool) -> None:
    rewards, mask, index = batch(["a", "a", "b", "b", "b", "c", "c", "c"])
    expected, _ = compute_grpo_outcome_advantage(rewards.clone(), mask, index, norm_adv_by_std_in_grpo=norm)
    found, returns = grpo_composer(rewards, mask, settings(norm_adv_by_std_in_grpo=norm), index)
    assert torch.equal(found, expected) and torch.equal(returns, expected)


def test_a_row_that_failures_left_alone_moves_nothing_and_is_counted() -> None:
    rewards, mask, index = batch(["a", "a", "b", "c", "c", "c", "d", "a"])
    stock, _ = compute_grpo_outcome_advantage(rewards.clone(), mask, index)
    assert stock[2].abs().sum() > 0 and stock[6].abs().sum() > 0  # VeRL: the raw reward at every token
    with shaping(Shaping()) as columns:
        found, _ = grpo_composer(rewards, mask, settings(), index)
    assert not found[[2, 6]].any() and columns.alone == 2
    others = [row for row in range(ROWS) if row not in (2, 6)]
    assert torch.equal(found[others], stock[others])


def test_rows_that_only_fill_a_batch_up_are_no_lost_group() -> None:
    assert 'pad_uid = f"pad{uuid.uuid4().hex}"' in inspect.getsource(padding_utils), "VeRL names them otherwise now"
    rewards, mask, index = batch(["a", "a", f"pad{uuid.uuid4().hex}"])
    with shaping(Shaping()) as columns:
        grpo_composer(rewards, mask, settings(), index)
    assert columns.alone == 0


def test_verl_calls_it_by_the_name_of_the_estimator() -> None:
    rewards, mask, index = batch(["a", "a", "b"])
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": mask}, non_tensors={"uid": index}
    )
    config = settings(adv_estimator=GRPO_COMPOSER)
    found = compute_advantage(data, adv_estimator=GRPO_COMPOSER, config=config).batch["advantages"]
    assert torch.equal(found, grpo_composer(rewards, mask, config, index)[0]) and not found[2].any()
    assert get_adv_estimator_fn(GRPO_COMPOSER) is grpo_composer


def test_a_variable_loads_it_into_each_of_verls_processes() -> None:
    """VeRL imports the modules while it is imported itself."""
    program = f"import verl.trainer.ppo.core_algos as c; print(c.get_adv_estimator_fn({GRPO_COMPOSER!r}).__module__)"
    loaded = {"VERL_USE_EXTERNAL_MODULES": "errata_trainer.recipes.verl"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, env={**os.environ, **loaded}, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "errata_trainer.recipes.verl.estimator"


def columns(seed: int = 1) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "sdpo_error_mask": (torch.rand(4, LENGTH, generator=draw) > 0.5).float(),
        "sdpo_teacher_logprobs": -torch.rand(4, LENGTH, generator=draw),
        "old_log_probs": -torch.rand(4, LENGTH, generator=draw),
        "sdpo_weights": torch.rand(4, LENGTH, generator=draw),
        "prm_scores": torch.rand(4, LENGTH, generator=draw) * 2 - 1,
    }


def as_shaping(held: dict[str, torch.Tensor]) -> Shaping:
    return Shaping(
        held["sdpo_error_mask"],
        held["sdpo_teacher_logprobs"],
        held["old_log_probs"],
        held["sdpo_weights"],
        held["prm_scores"],
    )


def test_the_channels_add_what_the_formula_says() -> None:
    rewards, mask, index = batch(["a", "a", "b", "b"])
    held, config = columns(), settings(alpha_sdpo=0.3, beta_replay=0.2)
    with shaping(as_shaping(held)):
        found, _ = grpo_composer(rewards, mask, config, index)
    base, _ = grpo_composer(rewards, mask, config, index)
    for row in range(4):
        for at in range(LENGTH):
            expected = 0.0
            if mask[row, at]:
                one = {name: float(column[row, at]) for name, column in held.items()}
                if one["sdpo_error_mask"]:
                    expected += 0.3 * (one["sdpo_teacher_logprobs"] - one["old_log_probs"]) * one["sdpo_weights"]
                expected += 0.2 * one["prm_scores"]
            assert math.isclose(float(found[row, at] - base[row, at]), expected, abs_tol=1e-6)


def test_columns_that_verl_passes_itself_are_added_once() -> None:
    """With VeRL's pull request 7473 an estimator is given the batch; `shaping` then has the last word."""
    rewards, mask, index = batch(["a", "a", "b", "b"])
    held, config = columns(), settings(alpha_sdpo=0.3, beta_replay=0.2)
    with shaping(as_shaping(held)):
        once, _ = grpo_composer(rewards, mask, config, index)
        both, _ = grpo_composer(rewards, mask, config, index, batch=held, non_tensor_batch={})
    passed, _ = grpo_composer(rewards, mask, config, index, batch=held, non_tensor_batch={})
    assert torch.equal(once, both) and torch.equal(once, passed)


def test_weights_of_the_step_take_the_place_of_the_configurations() -> None:
    rewards, mask, index = batch(["a", "a", "b", "b"])
    held = as_shaping(columns())
    with shaping(held):
        expected, _ = grpo_composer(rewards, mask, settings(alpha_sdpo=0.3, beta_replay=0.2), index)
    with shaping(replace(held, alpha=0.3, beta=0.2)):
        both, _ = grpo_composer(rewards, mask, settings(alpha_sdpo=7.0, beta_replay=7.0), index)
    with shaping(replace(held, alpha=0.3)):
        one, _ = grpo_composer(rewards, mask, settings(alpha_sdpo=7.0, beta_replay=0.2), index)
    with shaping(replace(held, alpha=0.0, beta=0.0)):
        none, _ = grpo_composer(rewards, mask, settings(alpha_sdpo=7.0, beta_replay=7.0), index)
    assert torch.equal(both, expected) and torch.equal(one, expected)
    assert torch.equal(none, grpo_composer(rewards, mask, settings(), index)[0])


def test_weights_of_zero_leave_the_advantages_as_they_are() -> None:
    rewards, mask, index = batch(["a", "a", "b", "b"])
    config = settings(alpha_sdpo=0.0, beta_replay=0.0)
    with shaping(as_shaping(columns())):
        found, _ = grpo_composer(rewards, mask, config, index)
    assert torch.equal(found, compute_grpo_outcome_advantage(rewards.clone(), mask, index)[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"index": None}, "needs the group of each row"),
        ({"config": settings(alpha_sdpo=-1.0)}, "weight"),
        ({"config": settings(beta_replay=-1.0)}, "beta_replay"),
        ({"columns": replace(as_shaping(columns()), alpha=-1.0)}, "weight"),
        ({"columns": replace(as_shaping(columns()), beta=-1.0)}, "beta_replay"),
        ({"columns": Shaping(error_mask=torch.ones(4, LENGTH))}, "channel 2 needs the log-probabilities"),
        (
            {"columns": Shaping(turn_scores=torch.ones(4, LENGTH + 1))},
            r"turn_scores is \[4, 7\]: it has to be as the response mask",
        ),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    rewards, mask, index = batch(["a", "a", "b", "b"])
    with shaping(given.get("columns", as_shaping(columns()))), pytest.raises(ValueError, match=message):
        grpo_composer(rewards, mask, given.get("config", settings()), given.get("index", index))
