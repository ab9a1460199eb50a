"""Channel 2 with its teacher in an actor: the losses of one in process, and steps without it when it dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from errata_trainer.assembly.channel_set import channels_for
from errata_trainer.assembly.distillation import ITEMS
from errata_trainer.assembly.layouts import LAYOUT, PaddedRows
from errata_trainer.assembly.listed import LISTS
from errata_trainer.assembly.losses import ChannelLosses
from errata_trainer.assembly.preferences import PAIRS
from errata_trainer.channels.compose import DPO, SDPO
from errata_trainer.monitoring.metrics import Metrics
from errata_trainer.recipes.monarch.distillation import SDPOTeacher
from errata_trainer.settings import ChannelSettings
from tests.machine_speed import SLOWDOWN

from .models import items, model, moved, rollouts

RATE, ALPHA = 0.3, 2.0
NEAR: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
SETTINGS = [
    {"top_k": 7, "tail": True, "divergence_guard": None},
    {"top_k": 5, "temperature": 1.7, "clip_mode": "token"},
]


def options(**settings: Any) -> ChannelSettings:
    return ChannelSettings(**{"support": "teacher", "ema_rate": RATE, **settings})


def batch() -> dict[str, Any]:
    """Return a batch of two rollouts padded on the right, without the sites."""
    of = [rollout.prompt_ids + rollout.completion_ids for rollout in rollouts()]
    return {"input_ids": torch.tensor(of), LAYOUT: PaddedRows(), PAIRS: [()] * len(of), ITEMS: [()] * len(of)}


def loss_of(channels: Any, student: Any, inputs: dict[str, Any], metrics: Metrics | None = None) -> Any:
    """Return the loss of a micro-batch with channel 2, and the gradients of the student."""
    losses = ChannelLosses(channels.distillation, channels.preferences, metrics or Metrics(), processes=1, pad_id=0)
    count = sum(len(item.target_ids) for row in inputs[ITEMS] for item in row)
    counts = {SDPO: torch.tensor(float(count)), DPO: torch.tensor(0.0)}
    student.zero_grad()
    with losses.capturing(student, inputs, alpha=ALPHA, beta=0.0) as states:
        grpo = student(input_ids=inputs["input_ids"]).logits.square().mean()
    total, parts, _ = losses.total(grpo, student, student, inputs, states, counts, alpha=ALPHA, beta=0.0)
    total.backward()
    return total.detach(), parts, [weight.grad.clone() for weight in student.parameters()]


@pytest.fixture(scope="module", params=range(len(SETTINGS)), ids=["tail", "temperature"])
def settings(request: pytest.FixtureRequest) -> Any:
    return SETTINGS[request.param]


@pytest.fixture(scope="module")
def apart(settings: Any) -> Iterator[tuple[Any, Any, SDPOTeacher]]:
    """A student, its channels, and its teacher in an actor."""
    student = model()
    channels = channels_for(options(teacher="live", **settings), student=student, alpha_sdpo=ALPHA)
    with SDPOTeacher(model, channels, rate=RATE, deadline_s=15.0 * SLOWDOWN, start_s=300.0) as teacher:
        yield student, channels, teacher


def scored(teacher: SDPOTeacher) -> dict[str, Any]:
    found, lists = teacher.lists(items(rollouts()))
    return {**batch(), ITEMS: found, LISTS: lists}


def test_losses_and_gradients_are_those_of_a_teacher_in_process(
    apart: tuple[Any, Any, SDPOTeacher], settings: Any
) -> None:
    student, channels, teacher = apart
    own = model()
    inside = channels_for(options(teacher="ema", **settings), student=own, alpha_sdpo=ALPHA)
    inside.begin(own, torch.device("cpu"))
    teacher.update(student)
    for step in range(3):
        for one in (student, own):
            moved(one, 0.02 * (step + 1))
        inside.update(own)
        teacher.update(student)
        with_items = {**batch(), ITEMS: items(rollouts())}
        expected, expected_parts, expected_gradients = loss_of(inside, own, with_items)
        found, parts, gradients = loss_of(channels, student, scored(teacher))
        assert float(parts[f"loss/{SDPO}"]) > 1e-3, "the teacher says something else than the student"
        torch.testing.assert_close(found, expected, **NEAR)
        torch.testing.assert_close(parts, expected_parts, **NEAR)
        torch.testing.assert_close(gradients, expected_gradients, **NEAR)
    assert teacher.counts == {"begun": 1}


def test_a_step_goes_on_without_channel_2_when_the_teachers_process_is_killed(
    apart: tuple[Any, Any, SDPOTeacher],
) -> None:
    student, channels, teacher = apart
    sites = sum(map(len, items(rollouts())))
    teacher.update(student)
    begun = teacher.counts["begun"]
    process = teacher.pid()
    assert process is not None
    os.kill(process, signal.SIGKILL)
    inputs = scored(teacher)
    assert inputs[ITEMS] == [(), ()]
    total, parts, _ = loss_of(channels, student, inputs)
    assert parts.keys() == {"loss/grpo"} and total == parts["loss/grpo"]
    reason = next(name for name in ("lost", "deadline") if teacher.counts[name])
    assert teacher.metrics()[f"sdpo/not_scored/{reason}"] == sites
    give_up = time.monotonic() + 300
    while not any(inputs[ITEMS]) and time.monotonic() < give_up:  # Monarch notices a death after nine seconds
        teacher.update(student)
        inputs = scored(teacher)
    assert teacher.counts["begun"] == begun + 1, "another one began as the student is now"
    assert f"loss/{SDPO}" in loss_of(channels, student, inputs)[1]


def test_settings_that_need_more_than_lists_are_refused() -> None:
    for wrong in ({"top_k": None}, {"top_k": 5, "support": "student"}, {"sdpo_form": "sampled"}):
        channels = channels_for(ChannelSettings(**{"teacher": "live", **wrong}), student=model())
        with pytest.raises(ValueError, match="top_k, and support='teacher'"):
            SDPOTeacher(model, channels)
    channels = channels_for(options(teacher="live", top_k=5, is_clip=2.0), student=model())
    with pytest.raises(ValueError, match="without is_clip"):
        SDPOTeacher(model, channels)


def test_what_the_model_raises_is_said() -> None:
    channels = channels_for(options(teacher="live", top_k=5), student=model())
    with pytest.raises(Exception, match="there are no weights here"):
        SDPOTeacher(_broken, channels, start_s=300.0)


def _broken() -> Any:
    raise OSError("there are no weights here")
