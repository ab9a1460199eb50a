"""The channels' losses in VeRL's own FSDP2 engine are those that TRL's trainer had for the same rollouts.

``scripts/record_channel_losses.py`` recorded TRL's, and tests/trainer/test_recorded_losses.py computes them anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from errata_trainer.monitoring.metrics import combined
from errata_trainer.recipes.verl import grpo_composer
from errata_trainer.recipes.verl.options import LossOptions
from errata_trainer.settings import ChannelSettings

from .workers import alone, batch_of, passes, worker_of

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from recorded_losses import DIRECTORY, Recorded, gradient_differences, initial, load, measured, student, tokenizer

NAMES = sorted(path.stem for path in DIRECTORY.iterdir())
VERL_EPSILON = 1e-6
"""What VeRL adds to the standard deviation of a group's rewards."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the directory of the initial model, in the only process of a group."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer().save_pretrained(directory)
    initial().save_pretrained(directory)
    with alone():
        yield directory


def begun(path: Path, recorded: Recorded, *, packed: bool) -> Any:
    """Return a worker with the student's weights, whose channels began with the recorded options."""
    worker = worker_of(path, model={"use_remove_padding": packed})
    weights = student().state_dict()
    with torch.no_grad():
        for name, weight in worker.engine.module.named_parameters():
            weight.to_local().copy_(weights[name])
    options = recorded.options
    given = {name: options[name] for name in ("beta_dpo", "jsd_beta", "token_clip")}
    worker.begin_channels(
        LossOptions(
            ChannelSettings(**options["settings"]),
            has_pairs=any(recorded.pairs),
            sampling_temperature=options["temperature"],
            **given,
        )
    )
    return worker


def batch(recorded: Recorded, **more: Any) -> Any:
    """Return the rows of a batch that VeRL has: a lost rollout is none of them."""
    kept = [n for n, rollout in enumerate(recorded.rollouts) if rollout.lost is None]
    lost = [n for n in range(len(recorded.rollouts)) if n not in kept]
    assert not any(recorded.items[n] for n in lost)
    rollouts, items, pairs = ([of[n] for n in kept] for of in (recorded.rollouts, recorded.items, recorded.pairs))
    pairs[0] += tuple(pair for n in lost for pair in recorded.pairs[n])  # they stand in any row
    temperature = recorded.options["temperature"]
    return batch_of(items, pairs, played=rollouts, temperature=temperature, **more)


@pytest.mark.parametrize("packed", [False, True], ids=["padded rows", "packed rows"])
@pytest.mark.parametrize("micro", [1, 2, 8])
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_trl(path: Path, name: str, micro: int, packed: bool) -> None:
    recorded = load(name)
    alpha, beta = (recorded.options[weight] for weight in ("alpha_sdpo", "beta_replay"))
    rows = sum(rollout.lost is None for rollout in recorded.rollouts)
    worker = begun(path, recorded, packed=packed)
    micro = micro if rows % micro == 0 else rows
    stock, plain = passes(worker, batch(recorded, micro=micro))
    worker.take_channel_metrics()
    loss, gradients = passes(worker, batch(recorded, micro=micro, alpha=alpha, beta=beta))
    found = combined([worker.take_channel_metrics()], 1)
    results = {key: value for key, value in recorded.results.items() if key not in ("total", "epsilon")}
    for key, value in results.items():
        # A margin is what is left of log-probabilities of some tens of nats, in float32.
        assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-5 if key == "dpo/margin" else 1e-6), key
    assert {key for key in found if key.startswith("loss/")} - {"loss/grpo"} == {
        key for key in results if key.startswith("loss/")
    }
    parts = alpha * found.get("loss/sdpo_kl", 0.0) + beta * found.get("loss/trace_replay_dpo", 0.0)
    assert parts == pytest.approx(recorded.results["total"], rel=1e-5)
    assert loss - stock == pytest.approx(parts, rel=1e-4)
    of_channels = {key: gradients[key] - plain[key] for key in gradients}
    differ = list(gradient_differences(measured(student(), of_channels), recorded.gradient, near=1e-4))
    assert not differ, "\n".join(differ)


@pytest.mark.parametrize("name", NAMES)
def test_advantages_differ_from_those_of_trl_by_what_is_added_to_the_standard_deviation(name: str) -> None:
    recorded = load(name)
    kept = [n for n, rollout in enumerate(recorded.rollouts) if rollout.lost is None]
    rewards = torch.tensor([[recorded.rollouts[n].reward] for n in kept])
    groups = np.array([str(recorded.groups[n]) for n in kept], dtype=object)
    config = OmegaConf.create({"norm_adv_by_std_in_grpo": True})
    advantages, _ = grpo_composer(rewards, torch.ones_like(rewards), config, groups)
    for group in set(groups):
        rows = [row for row, of in enumerate(groups) if of == group]
        std = float(rewards[rows].std()) if len(rows) > 1 else 1.0
        ours = advantages[rows, 0] * (std + VERL_EPSILON)
        theirs = torch.tensor([recorded.advantages[kept[row]] for row in rows]) * (std + recorded.results["epsilon"])
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
