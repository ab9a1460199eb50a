"""VeRL's engine and the slow implementation have the channel losses that TRL's trainer had for the same batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from errata_trainer.monitoring.metrics import combined
from errata_trainer.recipes.verl import Shaping, grpo_composer, shaping
from errata_trainer.recipes.verl.columns import (
    ERROR_MASK,
    TEACHER_LOGPROBS,
    WEIGHTS,
    pairs_of,
    response_columns,
    text_of,
)

from .models import logprobs
from .recorded import batch_with_channels, begin, rows_of, write_model
from .workers import alone, passes, slow_inputs, worker_of

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from recorded_cases import ids_of
from recorded_losses import DIRECTORY, gradient_differences, initial, load, measured, student, tokenizer
from slow import slow_dpo, slow_sdpo

NAMES = sorted(path.stem for path in DIRECTORY.glob("*.json"))
GRADIENT = 2e-5
"""Distance that gradients may have, relative to a parameter's: micro-batches are added up in another order."""
LOSSES = ("loss/sdpo_kl", "loss/trace_replay_dpo")
VERLS_EPSILON = 1e-6
"""What VeRL adds to the standard deviation of a group's rewards."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the directory of the model, in the only process of a group."""
    with alone():
        yield write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[False, True], ids=["padded rows", "packed rows"])
def worker(path: Path, request: pytest.FixtureRequest) -> Any:
    return worker_of(path, model={"use_remove_padding": request.param})


@cache
def slow_losses(name: str) -> dict[str, float]:
    """Return the losses that the slow implementation has for a recorded batch, of those whose settings it knows."""
    recorded = load(name)
    rows, given, model = rows_of(recorded), recorded.options, student()
    inputs = slow_inputs(rows.rollouts, sdpo_items=rows.items, dpo_pairs=rows.pairs)
    others = given["settings"].keys() - {"teacher", "divergence_guard", "dpo_reference"}
    found = {}
    items, pairs = ([one for row in of_rows for one in row] for of_rows in (rows.items, rows.pairs))
    if items and not others:
        teacher = None if given["settings"]["teacher"] == "live" else initial()
        found["loss/sdpo_kl"] = slow_sdpo(
            model, inputs, tokenizer(), jsd_beta=given["jsd_beta"], clip=given["token_clip"], teacher=teacher
        ) / sum(len(item.target_ids) for item in items)
    if pairs and "dpo_loss" not in others:
        summed = slow_dpo(model, inputs, beta_dpo=given["beta_dpo"], reference=initial())
        found["loss/trace_replay_dpo"] = summed / len(pairs)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_trl_and_the_slow_ones(worker: Any, name: str) -> None:
    recorded = load(name)
    begin(worker, recorded)
    pairs = [pair for row in recorded.pairs for pair in row]
    asked = [replace(pair, ref_chosen=None, ref_rejected=None) for pair in pairs]
    for found, pair in zip(pairs_of(worker.refer_channels(text_of(asked))), pairs, strict=True):
        for side in ("ref_chosen", "ref_rejected"):
            assert getattr(found, side) == pytest.approx(getattr(pair, side), rel=1e-5)
    slow = slow_losses(name)
    for micro in (1, 2, len(rows_of(recorded).rollouts)):
        loss, gradients = passes(worker, batch_with_channels(recorded, micro))
        taken = combined([worker.take_channel_metrics()], 1)
        expected = {name: value for name, value in recorded.results.items() if name not in ("total", "epsilon")}
        assert {name: taken[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5), micro
        assert {name for name in LOSSES if name in taken} == {name for name in LOSSES if name in expected}
        assert {name: taken[name] for name in slow} == pytest.approx(slow, rel=1e-5, abs=1e-5), micro
        assert loss == pytest.approx(recorded.results["total"], rel=1e-5, abs=1e-5)
        differ = gradient_differences(measured(student(), gradients), recorded.gradient, near=GRADIENT)
        assert not "\n".join(differ), micro


def padded(rows: list[Any]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True)


@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_those_of_trl_but_for_the_epsilon(name: str) -> None:
    recorded = load(name)
    rows = rows_of(recorded)
    mask = padded([row.mask for row in rows.rollouts])
    rewards = torch.zeros_like(mask)
    for n, row in enumerate(rows.rollouts):
        rewards[n, len(row.mask) - 1] = row.reward
    found, _ = grpo_composer(rewards, mask, {}, np.array(rows.groups, dtype=object))
    for n, group in enumerate(rows.groups):
        of_group = [row.reward for row, other in zip(rows.rollouts, rows.groups, strict=True) if other == group]
        own = found[n][mask[n].bool()]
        assert not (own - own[0]).any() and not found[n][~mask[n].bool()].any()
        if len(of_group) == 1:
            assert own[0] == rows.advantages[n] == 0.0
            continue
        deviation = float(torch.tensor(of_group).std())
        trl = rows.advantages[n] * (deviation + recorded.results["epsilon"])
        assert float(own[0]) * (deviation + VERLS_EPSILON) == pytest.approx(trl, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_columns_have_the_targets_of_trls_batch(name: str) -> None:
    recorded = load(name)
    rows = rows_of(recorded)
    lengths = [len(row.completion_ids) for row in rows.rollouts]
    columns = response_columns(rows.rollouts, rows.items, lengths=lengths)
    for row, items, marks, weights in zip(
        rows.rollouts, rows.items, columns[ERROR_MASK], columns[WEIGHTS], strict=True
    ):
        marked = [
            (token, weight) for token, mark, weight in zip(row.completion_ids, marks, weights, strict=True) if mark
        ]
        assert marked == [(token, item.weight) for item in items for token in item.target_ids]
    assert sum(map(sum, columns[ERROR_MASK])) == recorded.results.get("sdpo/tokens", 0.0)


def test_advantages_of_channel_2_add_up_to_the_log_ratios_of_trls_sampled_form() -> None:
    recorded = load("sampled_form")
    rows, alpha = rows_of(recorded), 0.3
    model, teacher = student(), initial()

    def said(whose: Any, ids: list[int], positions: Any, targets: Any) -> list[float]:
        with torch.no_grad():
            states = logprobs(whose, ids)[list(positions)]
        return states.gather(1, torch.tensor(targets)[:, None])[:, 0].tolist()

    scores = [
        [said(teacher, list(item.teacher_ids), item.teacher_positions, item.target_ids) for item in items]
        for items in rows.items
    ]
    lengths = [len(row.completion_ids) for row in rows.rollouts]
    columns = {
        name: padded(column)
        for name, column in response_columns(rows.rollouts, rows.items, scores, lengths=lengths).items()
    }
    old = padded(
        [
            said(model, ids_of(row), range(len(row.prompt_ids) - 1, len(ids_of(row)) - 1), row.completion_ids)
            for row in rows.rollouts
        ]
    )
    mask = padded([row.mask for row in rows.rollouts])
    with shaping(Shaping(columns[ERROR_MASK], columns[TEACHER_LOGPROBS], old, columns[WEIGHTS], alpha=alpha)):
        added, _ = grpo_composer(torch.zeros_like(mask), mask, {}, np.array(rows.groups, dtype=object))
    mean = float(added.sum()) / recorded.results["sdpo/tokens"]
    assert mean == pytest.approx(-alpha * recorded.results["sdpo/divergence"], rel=1e-5, abs=1e-5)
