"""Channels 2 and 3 in the loss of VeRL's own FSDP2 engine, on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu

from errata_trainer import DpoPair, SdpoItem
from errata_trainer.channels.forward import capture_hidden
from errata_trainer.monitoring.metrics import combined
from errata_trainer.recipes.verl.columns import ITEMS_COLUMN, items_of, pairs_of, text_of
from errata_trainer.recipes.verl.options import LossOptions
from errata_trainer.settings import ChannelSettings

from .models import action_logprob, logprobs, moved, student, student_path, with_weights
from .workers import alone, batch_of, pairs, passes, rows, sites, slow_inputs, weights_of, worker_of

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from recorded_cases import HEADER, ids_of
from slow import slow_dpo, slow_sdpo

ALPHA_SDPO, BETA_REPLAY = 20.0, 0.4
"""Weights with which no channel's gradient is lost beside another's: the tiny model does not say much with a hint that
it does not say without."""
NEAR: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6}
TOKENIZER = SimpleNamespace(encode=lambda *_, **__: list(HEADER))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the directory of a model, in the only process of a group."""
    with alone():
        yield student_path(tmp_path_factory.mktemp("model"))


def options(distils: bool = True, has_pairs: bool = True, **settings: Any) -> LossOptions:
    made = ChannelSettings(**{"teacher": "live", "divergence_guard": None, **settings})
    return LossOptions(made, distils=distils, has_pairs=has_pairs, beta_dpo=0.3)


def referred(asked: Sequence[Sequence[DpoPair]], reference: Any) -> list[tuple[DpoPair, ...]]:
    """Return pairs with the log-probabilities of a reference."""

    def of(pair: DpoPair, action: tuple[int, ...]) -> float:
        with torch.no_grad():
            return float(action_logprob(reference, pair.context_ids, action))

    return [
        tuple(replace(p, ref_chosen=of(p, p.chosen_ids), ref_rejected=of(p, p.rejected_ids)) for p in row)
        for row in asked
    ]


# The slow losses once more, as sums with a gradient.


def own_sdpo(model: Any, teacher: Any, asked: Sequence[Sequence[SdpoItem]], form: str = "distribution") -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row, items in zip(rows(), asked, strict=True):
        for item in items:
            s = logprobs(model, ids_of(row))[list(item.student_positions)]
            with torch.no_grad():
                t = logprobs(teacher, item.teacher_ids)[list(item.teacher_positions)]
            if form == "sampled":
                s, t = (one.gather(1, torch.tensor(item.target_ids)[:, None]) for one in (s, t))
                each = (s - t).detach() * s
            else:
                mixture = torch.logaddexp(s, t) - torch.tensor(2.0).double().log()
                each = 0.5 * (t.exp() * (t - mixture) + s.exp() * (s - mixture))
            total = total + item.weight * each.sum()
    return total


def own_dpo(model: Any, asked: Sequence[Sequence[DpoPair]]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for pair in (one for row in asked for one in row):
        chosen, rejected = (action_logprob(model, pair.context_ids, a) for a in (pair.chosen_ids, pair.rejected_ids))
        assert pair.ref_chosen is not None and pair.ref_rejected is not None
        margin = 0.3 * (chosen - pair.ref_chosen - rejected + pair.ref_rejected)
        total = total - pair.weight * torch.nn.functional.logsigmoid(margin)
    return total


def expected(
    model: Any, teacher: Any, asked: Sequence[Sequence[SdpoItem]], preferred: Sequence[Sequence[DpoPair]], form: str
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the parts of the step's loss, and the gradient of both channels with their weights."""
    tokens = sum(len(item.target_ids) for row in asked for item in row)
    count = sum(map(len, preferred))
    sdpo = own_sdpo(model, teacher, asked, form) / max(tokens, 1)
    dpo = own_dpo(model, preferred) / max(count, 1)
    total = ALPHA_SDPO * sdpo + BETA_REPLAY * dpo
    weights = dict(model.named_parameters())
    gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
    parts = {"loss/sdpo_kl": float(sdpo.detach()), "loss/trace_replay_dpo": float(dpo.detach())}
    return parts, {
        name: torch.zeros_like(weights[name]) if one is None else one
        for name, one in zip(weights, gradients, strict=True)
    }


def channel_batch(preferred: Sequence[Sequence[DpoPair]], **more: Any) -> Any:
    return batch_of(sites(), preferred, **{"alpha": ALPHA_SDPO, "beta": BETA_REPLAY, **more})


@pytest.fixture(scope="module")
def preferred() -> list[tuple[DpoPair, ...]]:
    """Return the pairs with a reference that is another model."""
    return referred(pairs(), moved(student(), 0.05, 5))


@pytest.fixture(scope="module")
def stock(path: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradient of VeRL without anything of ours."""
    return passes(worker_of(path), batch_of(sites(), pairs(), columns=False))


def test_the_differentiable_losses_of_this_test_are_the_slow_ones(preferred: list[tuple[DpoPair, ...]]) -> None:
    model, teacher, reference = student(), moved(student(), 0.05, 3), moved(student(), 0.05, 5)
    asked = slow_inputs(rows(), sdpo_items=sites(), dpo_pairs=preferred)
    sdpo = slow_sdpo(model, asked, TOKENIZER, jsd_beta=0.5, clip=10.0, teacher=teacher)
    with torch.no_grad():
        assert float(own_sdpo(model, teacher, sites())) == pytest.approx(sdpo, rel=1e-9)
        slow = slow_dpo(model, asked, beta_dpo=0.3, reference=reference)
        assert float(own_dpo(model, preferred)) == pytest.approx(slow, rel=1e-9)
    assert sdpo > 0.1


@pytest.mark.parametrize(
    ("begun", "columns"),
    [(False, True), (True, True), (True, False)],
    ids=["no channels", "weights of 0", "no columns"],
)
def test_without_weights_loss_and_gradient_are_those_of_verl_to_the_last_bit(
    path: Path, stock: tuple[float, dict[str, torch.Tensor]], begun: bool, columns: bool
) -> None:
    worker = worker_of(path)
    worker.begin_channels(options(begun, begun))
    assert ("forward_step" in vars(worker.engine)) is begun
    loss, gradients = passes(worker, batch_of(sites(), pairs(), columns=columns))
    assert loss == stock[0]
    for name, gradient in stock[1].items():
        assert torch.equal(gradients[name], gradient), name
    taken = combined([worker.take_channel_metrics()], 1)
    assert taken.get("loss/grpo") == (pytest.approx(loss, rel=1e-6) if begun else None)


def test_a_batch_without_sites_and_pairs_has_the_loss_of_verl(
    path: Path, stock: tuple[float, dict[str, torch.Tensor]]
) -> None:
    worker = worker_of(path)
    worker.begin_channels(options())
    empty: list[tuple[()]] = [()] * len(rows())
    loss, gradients = passes(worker, batch_of(empty, empty, alpha=ALPHA_SDPO, beta=BETA_REPLAY))
    assert loss == stock[0]
    assert all(torch.equal(gradients[name], gradient) for name, gradient in stock[1].items())


@pytest.mark.parametrize("packed", [False, True], ids=["padded rows", "packed rows"])
@pytest.mark.parametrize("form", ["distribution", "sampled"])
def test_loss_and_gradient_are_the_slow_ones(
    path: Path,
    stock: tuple[float, dict[str, torch.Tensor]],
    preferred: list[tuple[DpoPair, ...]],
    form: str,
    packed: bool,
) -> None:
    worker = worker_of(path, model={"use_remove_padding": packed})
    worker.begin_channels(options(sdpo_form=form))
    loss, gradients = passes(worker, channel_batch(preferred))
    model = student()
    parts, of_channels = expected(model, model, sites(), preferred, form)
    taken = combined([worker.take_channel_metrics()], 1)
    for name, part in parts.items():
        assert taken[name] == pytest.approx(part, rel=1e-5), name
        assert abs(part) > 1e-3, "or being equal says little"
    assert taken["loss/grpo"] == pytest.approx(stock[0], rel=1e-5)
    total = stock[0] + ALPHA_SDPO * parts["loss/sdpo_kl"] + BETA_REPLAY * parts["loss/trace_replay_dpo"]
    assert loss == pytest.approx(total, rel=1e-5, abs=1e-5)
    for name, gradient in stock[1].items():
        slow = gradient + of_channels[name]
        # Parts of the largest elements are added up in float32 for the small ones, too.
        near = 1e-5 * max(1.0, float(slow.abs().max()))
        torch.testing.assert_close(gradients[name], slow, rtol=1e-5, atol=near)
    assert taken["dpo/reused"] > 0 and taken["dpo/pairs"] == sum(map(len, preferred))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("model", "engine"),
    [
        ({"enable_gradient_checkpointing": True}, {}),
        ({"enable_gradient_checkpointing": True, "use_remove_padding": True}, {"pad_to_length": True}),
    ],
    ids=["checkpoints", "packed rows of one length"],
)
def test_how_the_engine_computes_has_no_effect(
    path: Path, preferred: list[tuple[DpoPair, ...]], model: Any, engine: Any, dtype: str, reshard: bool
) -> None:
    plain = worker_of(path)
    plain.begin_channels(options(teacher="ema"))
    loss, gradients = passes(plain, channel_batch(preferred))
    worker = worker_of(path, model=model, engine={**engine, "reshard_after_forward": reshard}, dtype=dtype)
    worker.begin_channels(options(teacher="ema"))
    found, own = passes(worker, channel_batch(preferred, micro=4))
    assert found == pytest.approx(loss, rel=1e-5 if dtype == "fp32" else 0.03)
    for name, gradient in gradients.items() if dtype == "fp32" else ():
        torch.testing.assert_close(own[name], gradient, rtol=1e-5, atol=1e-5)
    # In half precision VeRL's own gradient of a single norm is off by a fifth.
    whole, exact = (torch.cat([of[name].flatten() for name in gradients]) for of in (own, gradients))
    assert float(torch.nn.functional.cosine_similarity(whole, exact, dim=0)) > 0.995
    assert float(whole.norm() / exact.norm()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("channel", ["sdpo", "dpo"])
def test_each_channel_works_without_the_other(
    path: Path, stock: tuple[float, dict[str, torch.Tensor]], preferred: list[tuple[DpoPair, ...]], channel: str
) -> None:
    worker = worker_of(path)
    worker.begin_channels(options(channel == "sdpo", channel == "dpo"))
    weights = {"sdpo": (ALPHA_SDPO, 0.0), "dpo": (0.0, BETA_REPLAY)}[channel]
    loss, _ = passes(worker, channel_batch(preferred, alpha=weights[0], beta=weights[1]))
    model = student()
    parts, _ = expected(model, model, sites(), preferred, "distribution")
    total = stock[0] + weights[0] * parts["loss/sdpo_kl"] + weights[1] * parts["loss/trace_replay_dpo"]
    assert loss == pytest.approx(total, rel=1e-5)
    taken = combined([worker.take_channel_metrics()], 1)
    assert {name for name in taken if name.startswith("loss/")} == {
        "loss/grpo",
        {"sdpo": "loss/sdpo_kl", "dpo": "loss/trace_replay_dpo"}[channel],
    }


def test_micro_batches_have_no_effect(path: Path, preferred: list[tuple[DpoPair, ...]]) -> None:
    found = []
    for micro in (8, 2, 1):
        worker = worker_of(path)
        worker.begin_channels(options(teacher="ema"))
        loss, gradients = passes(worker, channel_batch(preferred, micro=micro))
        found.append((loss, gradients, combined([worker.take_channel_metrics()], 1)))
    loss, gradients, metrics = found[0]
    for other in found[1:]:
        assert other[0] == pytest.approx(loss, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(other[1][name], gradient, **NEAR)
        assert other[2] == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_verl_may_choose_the_rows_of_micro_batches(path: Path, preferred: list[tuple[DpoPair, ...]]) -> None:
    worker = worker_of(path)
    worker.begin_channels(options())
    loss, _ = passes(worker, channel_batch(preferred))
    again, _ = passes(worker, channel_batch(preferred, use_dynamic_bsz=True, max_token_len_per_gpu=60))
    assert again == pytest.approx(loss, rel=1e-5)


def test_importance_weights_are_those_of_the_responses(path: Path, preferred: list[tuple[DpoPair, ...]]) -> None:
    """Each token's probability when it was sampled is what it is now, divided by a factor of its row and place."""
    worker = worker_of(path)
    worker.begin_channels(options(False, True))
    made, model = rows(), student()
    old, factors = [], []
    for n, row in enumerate(made):
        now = logprobs(model, ids_of(row))[len(row.prompt_ids) - 1 : -1].detach()
        of_row = now.gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0]
        factor = 0.5 + 0.3 * torch.sin(torch.arange(len(of_row)) + n).double()
        old.append((of_row - factor.log()).float())
        factors.append(factor)
    total = torch.zeros((), dtype=torch.float64)
    for row, items, factor in zip(made, sites(), factors, strict=True):
        for item in items:
            for n, position in enumerate(item.student_positions):
                of_token = replace(
                    item,
                    student_positions=(position,),
                    teacher_positions=(item.teacher_positions[n],),
                    target_ids=(item.target_ids[n],),
                    weight=min(0.7, float(factor[position + 1 - len(row.prompt_ids)])),
                )
                alone_there = [(of_token,) if one is row else () for one in made]
                with torch.no_grad():
                    total = total + own_sdpo(model, model, alone_there)
    tokens = sum(len(item.target_ids) for row in sites() for item in row)
    worker.begin_channels(options(is_clip=0.7))
    data = channel_batch(preferred)
    data["rollout_log_probs"] = torch.nested.as_nested_tensor(old, layout=torch.jagged)
    passes(worker, data)
    taken = combined([worker.take_channel_metrics()], 1)
    assert taken["loss/sdpo_kl"] == pytest.approx(float(total) / tokens, rel=1e-5)


@pytest.mark.parametrize("teacher", ["live", "ema", "initial"])
def test_the_teacher_after_two_steps_is_the_one_that_the_setting_says(
    path: Path, preferred: list[tuple[DpoPair, ...]], teacher: str
) -> None:
    rate = 0.25
    worker = worker_of(path)
    worker.begin_channels(options(teacher=teacher, ema_rate=rate))
    average = weights_of(worker)
    for _ in range(2):
        # Two optimizer steps of two mini-batches: the teacher follows each once, over several micro-batches.
        data = channel_batch(preferred, micro=2, mini_batch_size=4, epochs=1, dataloader_kwargs={"shuffle": False})
        steps: list[dict[str, torch.Tensor]] = []
        stock_step = worker.engine.optimizer_step

        def step(stock_step: Any = stock_step, steps: Any = steps) -> Any:
            norm = stock_step()
            steps.append(weights_of(worker))
            return norm

        worker.engine.optimizer_step = step
        worker.train_mini_batch(data)
        worker.engine.optimizer_step = stock_step
        assert len(steps) == 2
        for now in steps:
            average = {name: weight.lerp(now[name], rate) for name, weight in average.items()}
    trained = weights_of(worker)
    assert not all(torch.allclose(trained[name], average[name], rtol=1e-3) for name in trained)
    model = with_weights(trained)
    teaching = {"live": model, "ema": with_weights(average), "initial": student()}[teacher]
    worker.take_channel_metrics()
    passes(worker, channel_batch(preferred))
    taken = combined([worker.take_channel_metrics()], 1)
    with torch.no_grad():
        sdpo, dpo = own_sdpo(model, teaching, sites()), own_dpo(model, preferred)
    tokens = sum(len(item.target_ids) for row in sites() for item in row)
    assert taken["loss/sdpo_kl"] == pytest.approx(float(sdpo) / tokens, rel=2e-5)
    assert taken["loss/trace_replay_dpo"] == pytest.approx(float(dpo) / sum(map(len, preferred)), rel=2e-5)


def test_columns_arrive_in_the_order_of_the_rows_of_a_micro_batch(path: Path) -> None:
    texts = [text_of(of_row) for of_row in sites()]
    data = batch_of(sites(), pairs())
    for size in (1, 2, 8):
        chunks = tu.chunk_tensordict(data, len(data) // size)
        read = [tu.get(chunk, ITEMS_COLUMN) for chunk in chunks]
        assert [one for of_chunk in read for one in ([of_chunk] if isinstance(of_chunk, str) else of_chunk)] == texts
    chosen = tu.index_select_tensor_dict(data, [5, 2])
    assert list(tu.get(chosen, ITEMS_COLUMN)) == [texts[5], texts[2]]


def test_the_channels_own_passes_are_not_captured(
    path: Path, preferred: list[tuple[DpoPair, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(path)
    worker.begin_channels(options())
    backbone, hooks = worker.engine.module.model, []
    preferences = worker._channels.preferences
    stock_loss = preferences.loss

    def loss(*given: Any, **named: Any) -> Any:
        hooks.append(len(backbone._forward_hooks))
        return stock_loss(*given, **named)

    monkeypatch.setattr(preferences, "loss", loss)
    before = len(backbone._forward_hooks)
    with capture_hidden(worker.engine.module, torch.tensor([0]), torch.tensor([0])):
        assert len(backbone._forward_hooks) == before + 1, "a capture is a hook"
    passes(worker, channel_batch(preferred))
    assert hooks == [before]


def test_a_pass_without_gradient_has_the_loss_of_verl(path: Path, preferred: list[tuple[DpoPair, ...]]) -> None:
    worker = worker_of(path)
    worker.begin_channels(options())
    found = []
    for _ in range(2):
        data = channel_batch(preferred)
        tu.assign_non_tensor(data, use_remove_padding=False, use_fused_kernels=False)
        with worker.engine.eval_mode():
            found.append(sum(worker.engine.infer_batch(data, worker.loss_fn)["loss"]))
        worker.begin_channels(options(False, False))
    assert found[0] == found[1]


def test_the_text_of_a_row_is_read_back() -> None:
    for row in sites():
        assert items_of(text_of(row)) == row
    for of_row in pairs():
        assert pairs_of(text_of(of_row)) == of_row
