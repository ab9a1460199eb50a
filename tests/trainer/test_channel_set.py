"""The channels without a trainer: made of their settings, begun, updated, saved and restored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from errata_trainer import DpoPair, Rollout
from errata_trainer.assembly.channel_set import channels_for, driver_for, reference_name
from errata_trainer.assembly.pair_source import PairSource, RecordedPairs, Referred
from errata_trainer.settings import ChannelSettings
from errata_trainer.tiny import tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
PAIR = DpoPair((1, 2), (3,), (4,))


class Source(PairSource):
    """A source as short as one can be."""

    def sample(self, count: int, referred: Referred) -> list[DpoPair]:
        return referred([PAIR][:count])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(["a b c"])


def moved(model: Any, by: float) -> Any:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(by)
    return model


def first(model: Any) -> Any:
    return next(model.parameters()).detach().clone()


def test_a_source_of_pairs_needs_no_more_than_sample(tokenizer: Any) -> None:
    model, source = tiny_model(tokenizer), Source()
    channels = channels_for(student=model, pairs=source)
    driver = driver_for(tokenizer=tokenizer, pairs=source, reference="r")
    assert channels.preferences.nll == 0.0
    row = Rollout((1, 2), (4,), (1,), turns=())
    ((pair,),) = driver.pairs(4, [row], lambda pairs: channels.referred(pairs, "r", model))
    assert (pair.chosen_ids, pair.rejected_ids, pair.reference) == ((3,), (4,), "r")
    driver.ask([], [], None)  # type: ignore[arg-type]
    assert driver.turn_scores([]) == []


def test_recorded_pairs_are_those_of_a_file_that_can_be_trained_on() -> None:
    source = RecordedPairs([PAIR, DpoPair((1,), (2,), (2,)), DpoPair((1, 2), (5,), (6,))])
    assert sum(source.skipped.values()) == 1
    assert [pair.chosen_ids for pair in source.sample(5, list)] == [(3,), (5,)]
    assert source.sample(1, list) == [PAIR] and source.metrics() == {"recorded": 2.0}


def test_the_teacher_follows_and_goes_on_from_a_checkpoint(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model(tokenizer)
    settings = ChannelSettings(teacher="ema", ema_rate=0.5)
    channels = channels_for(settings, student=model)
    channels.begin(model, CPU)
    began = first(model)
    channels.update(moved(model, 1.0))
    assert channels.teacher is not None
    torch.testing.assert_close(first(channels.teacher.model), began + 0.5)
    channels.watch.dose = 0.25
    channels.save(tmp_path)
    again = channels_for(settings, student=model)
    again.begin(model, CPU, tmp_path)
    assert again.teacher is not None and again.watch.dose == 0.25
    assert torch.equal(first(again.teacher.model), first(channels.teacher.model))


def test_one_process_of_several_writes_the_teachers_weights(tokenizer: Any, tmp_path: Path) -> None:
    channels = channels_for(student=tiny_model(tokenizer))
    channels.save(tmp_path, weights=False)
    assert [file.name for file in tmp_path.iterdir()] == ["errata_state.json"]


def test_copies_of_the_student_are_those_that_the_caller_makes(tokenizer: Any) -> None:
    model = moved(tiny_model(tokenizer), 1.0)
    asked: list[Any] = []

    def loaded(student: Any) -> Any:
        asked.append(student)
        return tiny_model(tokenizer).train()

    settings = ChannelSettings(teacher="initial", dpo_reference="initial")
    channels = channels_for(settings, student=model, pairs=Source(), copied=loaded)
    channels.begin(model, CPU)
    assert asked == [model, model]
    assert channels.teacher is not None and channels.initial is not None
    assert torch.equal(first(channels.teacher.model), first(model)), "the teacher begins as the student is"
    assert torch.equal(first(channels.initial), first(tiny_model(tokenizer))), "the reference is what was loaded"
    for copy in (channels.teacher.model, channels.initial):
        assert not copy.training and not any(weight.requires_grad for weight in copy.parameters())


def test_a_copy_of_another_shape_is_refused(tokenizer: Any) -> None:
    other = tiny_tokenizer(["a b c", "d e f g h"])
    with pytest.raises(ValueError, match="parameters of other shapes than the student's"):
        channels_for(student=tiny_model(tokenizer), copied=lambda _: tiny_model(other))


@pytest.fixture
def shards(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A student sharded over this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield fully_shard(tiny_model(tokenizer), mesh=init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


def test_a_student_in_shards_is_not_copied_and_the_message_says_what_to_give(shards: Any) -> None:
    for settings in (ChannelSettings(), ChannelSettings(teacher="live", dpo_reference="initial")):
        with pytest.raises(ValueError, match="give channels_for copied="):
            channels_for(settings, student=shards, pairs=Source())
    with pytest.raises(ValueError, match="copied= has to return a whole model"):
        channels_for(student=shards, copied=lambda student: student)
    channels_for(ChannelSettings(teacher="live"), student=shards, pairs=Source())


@pytest.mark.parametrize(
    ("settings", "own", "name", "copied"),
    [
        (ChannelSettings(), False, "policy when asked", False),
        (ChannelSettings(dpo_reference="initial"), False, "initial policy", True),
        (ChannelSettings(dpo_reference="initial"), True, "reference model", False),
    ],
)
def test_the_reference_is_the_trainers_own_or_a_copy_or_the_student(
    tokenizer: Any, settings: ChannelSettings, own: bool, name: str, copied: bool
) -> None:
    model = tiny_model(tokenizer)
    separate = tiny_model(tokenizer) if own else None
    channels = channels_for(settings, student=model, pairs=Source(), has_reference=own)
    whose, reference, adapter = channels.reference(model, separate)
    assert (whose, adapter, channels.initial is not None) == (name, False, copied)
    assert reference is (separate if own else channels.initial if copied else model)
    assert reference_name(whose, model.config, tokenizer).startswith(f"{name} of ")


def test_what_the_settings_need_of_a_source_of_pairs_is_refused_by_name(tokenizer: Any) -> None:
    model, scored = tiny_model(tokenizer), ChannelSettings(prm_weight=0.1)
    with pytest.raises(ValueError, match="margins of votes"):
        channels_for(scored, student=model, pairs=Source())
    votes = Source()
    votes.margins = {}
    with pytest.raises(ValueError, match="wait_s="):
        channels_for(scored, student=model, pairs=votes)
    votes.waits = True
    channels_for(scored, student=model, pairs=votes)
    votes.needs_logprobs = True
    with pytest.raises(ValueError, match="log-probabilities"):
        driver_for(tokenizer=tokenizer, pairs=votes)
    driver_for(tokenizer=tokenizer, pairs=votes, has_logprobs=True)


def test_without_a_weight_no_teacher_is_kept(tokenizer: Any) -> None:
    channels = channels_for(student=tiny_model(tokenizer), alpha_sdpo=0.0)
    assert channels.teacher is None and channels.distillation.separate_teacher is None
