"""The worker of VeRL's actor with channels 2 and 3: what it refuses, refers, saves and goes on from."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
from verl.workers.config import FSDPEngineConfig, McoreEngineConfig

from errata_trainer.monitoring.metrics import combined
from errata_trainer.recipes.verl.actor import ErrataActorWorker, ErrataTrainingWorker, PairsElsewhere, refuse_engine
from errata_trainer.recipes.verl.columns import pairs_of, text_of
from errata_trainer.recipes.verl.loss import WRAPPED
from errata_trainer.recipes.verl.options import ChannelOptions, LossOptions
from errata_trainer.settings import ChannelSettings

from .models import action_logprob, student, student_path, with_weights
from .workers import alone, batch_of, pairs, passes, rows, sites, weights_of, worker_of

METHODS = ("begin_channels", "channel_reference", "refer_channels", "save_channels", "take_channel_metrics")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the directory of a model, in the only process of a group."""
    with alone():
        yield student_path(tmp_path_factory.mktemp("model"))


def options(distils: bool = True, has_pairs: bool = True, **settings: Any) -> LossOptions:
    return LossOptions(ChannelSettings(**{"teacher": "live", **settings}), distils=distils, has_pairs=has_pairs)


def train(worker: Any, preferred: Any = None, steps: int = 1, **more: Any) -> None:
    """Train on the batch of this directory's tests."""
    for _ in range(steps):
        data = batch_of(sites(), preferred or [()] * len(rows()), alpha=0.5, beta=0.5, mini_batch_size=8, **more)
        worker.train_mini_batch(data)


def asked() -> list[Any]:
    return [pair for row in pairs() for pair in row]


def engine(**options: Any) -> FSDPEngineConfig:
    return FSDPEngineConfig(**{"strategy": "fsdp2", **options})


def model(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"enable_activation_offload": False, "use_fused_kernels": False, "lora_rank": 0, **options}
    )


@pytest.mark.parametrize(
    ("engine", "model", "settings", "named"),
    [
        (engine(strategy="fsdp"), model(), {}, r"actor\.strategy"),
        (McoreEngineConfig(tensor_model_parallel_size=2), model(), {}, r"actor\.strategy"),
        (engine(ulysses_sequence_parallel_size=2), model(), {}, "ulysses_sequence_parallel_size"),
        (engine(use_fused_kernels=True), model(), {}, r"model\.use_fused_kernels"),
        (engine(offload_policy=True), model(), {}, r"fsdp_config\.offload_policy"),
        (engine(), model(enable_activation_offload=True), {}, r"model\.enable_activation_offload"),
        (engine(), model(lora_rank=8), {"teacher": "ema"}, r"settings\.teacher='ema'.*lora_rank"),
        (engine(), model(lora_rank=8), {"teacher": "initial"}, r"settings\.teacher='initial'.*lora_rank"),
        (engine(), model(), {"gradient_norms": True}, r"settings\.gradient_norms"),
    ],
)
def test_a_setting_that_does_not_go_with_the_loss_is_named(engine: Any, model: Any, settings: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named + r".*form=estimator"):
        refuse_engine(engine, model, options(**settings))


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        (model(), options(teacher="ema")),
        (model(lora_rank=8), options(teacher="base")),
        (model(lora_rank=8), options(distils=False, teacher="ema")),
    ],
)
def test_what_the_loss_can_do_is_not_refused(model: Any, asked: LossOptions) -> None:
    refuse_engine(engine(param_offload=True), model, asked)


def test_a_worker_refuses_before_it_changes_anything(path: Path) -> None:
    worker = worker_of(path)
    with pytest.raises(ValueError, match=r"settings\.gradient_norms"):
        worker.begin_channels(options(gradient_norms=True))
    assert not set(WRAPPED) & set(vars(worker.engine))


def test_channels_that_begin_again_take_the_place_of_those_before(path: Path) -> None:
    worker = worker_of(path)
    worker.begin_channels(options())
    worker.begin_channels(options(teacher="ema", ema_rate=0.5))
    before = weights_of(worker)
    train(worker)
    after, teacher = weights_of(worker), worker._channels.teacher.model.state_dict()
    for name, weight in after.items():
        torch.testing.assert_close(teacher[name], before[name].lerp(weight, 0.5), msg=name)
    worker.begin_channels(options(False, False))
    assert not set(WRAPPED) & set(vars(worker.engine))
    assert worker.take_channel_metrics() == {}
    with pytest.raises(RuntimeError, match="begin_channels"):
        worker.refer_channels("[]")


@pytest.mark.parametrize("reference", ["when_asked", "initial"])
def test_pairs_are_referred_to_the_model_that_the_setting_says(path: Path, reference: str) -> None:
    worker = worker_of(path)
    worker.begin_channels(options(dpo_reference=reference))
    train(worker)
    found = pairs_of(worker.refer_channels(text_of(asked())))
    frozen = student() if reference == "initial" else with_weights(weights_of(worker))
    assert [replace(one, ref_chosen=None, ref_rejected=None, reference=None) for one in found] == asked()
    for pair in found:
        with torch.no_grad():
            chosen = float(action_logprob(frozen, pair.context_ids, pair.chosen_ids))
            rejected = float(action_logprob(frozen, pair.context_ids, pair.rejected_ids))
        assert (pair.ref_chosen, pair.ref_rejected) == (pytest.approx(chosen, 1e-5), pytest.approx(rejected, 1e-5))
    names = {pair.reference for pair in found} | {worker.channel_reference()}
    (name,) = names
    assert name.startswith({"when_asked": "policy when asked of ", "initial": "initial policy of "}[reference])
    assert worker.refer_channels("[]") == "[]"


def test_a_pair_of_the_current_policy_has_a_loss_of_ln_2_in_half_precision_too(path: Path) -> None:
    worker = worker_of(path, dtype="bf16")
    worker.begin_channels(options(teacher="ema"))
    found = iter(pairs_of(worker.refer_channels(text_of(asked()))))
    preferred = [tuple(replace(next(found), weight=1.0) for _ in row) for row in pairs()]
    _, gradients = passes(worker, batch_of(sites(), preferred, alpha=0.5, beta=0.5, micro=2))
    taken = combined([worker.take_channel_metrics()], 1)
    assert taken["loss/trace_replay_dpo"] == pytest.approx(math.log(2.0), abs=0.02)
    assert taken["loss/sdpo_kl"] > 0.0
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert next(worker._channels.teacher.model.parameters()).dtype == torch.float32


def test_saved_channels_go_on_where_they_were(path: Path, tmp_path: Path) -> None:
    worker = worker_of(path)
    asked_for = options(teacher="ema", ema_rate=0.5, divergence_guard=10.0)
    worker.begin_channels(asked_for)
    train(worker, steps=2)
    worker.take_channel_metrics()
    worker.save_channels(str(tmp_path / "channels"))
    again = worker_of(path)
    again.begin_channels(asked_for, str(tmp_path / "channels"))
    kept, read = (one._channels.teacher.model.state_dict() for one in (worker, again))
    assert all(torch.equal(read[name], weight) for name, weight in kept.items())
    before, after = (one._channels.distillation.guard.state_dict() for one in (worker, again))
    assert before == after and before != worker_guard(path, asked_for)


def worker_guard(path: Path, asked_for: LossOptions) -> Any:
    worker = worker_of(path)
    worker.begin_channels(asked_for)
    return worker._channels.distillation.guard.state_dict()


def test_weights_on_the_host_come_to_the_device_for_the_channels(path: Path) -> None:
    worker = worker_of(path, engine={"param_offload": True, "optimizer_offload": True})
    loads: list[tuple[str, bool]] = []
    stock = worker.engine.to

    def to(device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        loads.append((device, model))
        stock(device=device, model=model, optimizer=optimizer, grad=grad)

    worker.engine.to = to
    worker.begin_channels(options(teacher="ema"))
    assert loads, "the weights were loaded, and put back"
    loads.clear()
    worker.refer_channels(text_of(asked()))
    assert loads


def test_an_adapter_is_distilled_from_the_base_below_it(path: Path) -> None:
    worker = worker_of(path, model={"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]})
    worker.begin_channels(options(teacher="base"))
    preferred = pairs_of(worker.refer_channels(text_of(asked())))
    rest = iter(preferred)
    batch = [tuple(next(rest) for _ in row) for row in pairs()]
    assert {one.reference for one in preferred} == {worker.channel_reference()}
    assert worker.channel_reference().startswith("base below the adapter of ")
    before = {name: one.full_tensor().clone() for name, one in worker.engine.module.named_parameters()}
    train(worker, batch, steps=2)
    taken = combined([worker.take_channel_metrics()], 2)
    assert taken["loss/sdpo_kl"] > 0.0 and taken["dpo/pairs"] == len(preferred)
    again = pairs_of(worker.refer_channels(text_of(asked())))
    for old, new in zip(preferred, again, strict=True):
        assert new.ref_chosen == pytest.approx(old.ref_chosen, rel=1e-5), "the base is as it was"
    after = {name: one.full_tensor() for name, one in worker.engine.module.named_parameters()}
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed and all("lora_" in name for name in changed)


def test_each_method_is_called_on_all_ranks() -> None:
    assert ErrataActorWorker.actor_worker_cls is ErrataTrainingWorker
    for cls in (ErrataActorWorker, ErrataTrainingWorker):
        for name in METHODS:
            assert getattr(getattr(cls, name), MAGIC_ATTR)["dispatch_mode"] == Dispatch.ONE_TO_ALL


def test_the_actor_worker_asks_its_actor(path: Path, tmp_path: Path) -> None:
    outer = ErrataActorWorker.__new__(ErrataActorWorker)
    outer.actor, outer.distillation_enabled = worker_of(path), False
    outer.begin_channels(options())
    assert pairs_of(outer.refer_channels(text_of(asked())))[0].reference == outer.channel_reference()
    train(outer.actor)
    assert "loss/sdpo_kl" in outer.take_channel_metrics()
    outer.save_channels(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "errata_state.json").is_file()
    outer.distillation_enabled = True
    with pytest.raises(ValueError, match=r"distillation\.enabled"):
        outer.begin_channels(options())
    outer.begin_channels(options(False, False))


def test_options_go_to_another_process() -> None:
    made = ChannelOptions(pairs=PairsElsewhere(0.5)).of_losses(0.9)
    assert pickle.loads(pickle.dumps(made)) == made
    assert made.nll == 0.5 and made.has_pairs
    with pytest.raises(RuntimeError, match="another process"):
        PairsElsewhere(0.5).sample(1, list)
