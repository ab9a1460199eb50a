"""The sum of the channels does not depend on how a step is cut into micro-batches and ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toy_models import toy

from errata_trainer.channels.compose import Term, compose, global_counts, gradient_norms
from errata_trainer.channels.distil import distil
from errata_trainer.channels.forward import capture_hidden, frozen_states, idle_loss, trained_states
from errata_trainer.channels.heads import output_head


def count(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_the_total_is_the_weighted_sum_and_each_part_is_reported() -> None:
    grpo, kl, pairs = (torch.tensor(v, requires_grad=True) for v in (1.0, 6.0, 4.0))
    loss, metrics = compose(grpo, sdpo=Term(kl, count(12)), dpo=Term(pairs, count(8)), alpha_sdpo=0.1, beta_replay=0.05)
    loss.backward()
    assert loss.item() == pytest.approx(1.0 + 0.1 * 0.5 + 0.05 * 0.5)
    assert (grpo.grad, kl.grad.item(), pairs.grad.item()) == (1.0, pytest.approx(0.1 / 12), pytest.approx(0.05 / 8))
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {"loss/grpo": 1.0, "loss/sdpo_kl": 0.5, "loss/trace_replay_dpo": 0.5}
    )
    assert not any(value.requires_grad for value in metrics.values())


def test_channels_with_nothing_to_do_or_no_weight_leave_the_trainers_loss_alone() -> None:
    grpo = torch.tensor(1.0, requires_grad=True)
    broken = Term(torch.tensor(torch.nan), count(1))
    assert compose(grpo)[0] is grpo
    assert compose(grpo, sdpo=broken, dpo=broken, alpha_sdpo=0.0, beta_replay=0.0)[0] is grpo
    idle = Term(torch.tensor(0.0, requires_grad=True), count(0))
    loss, metrics = compose(grpo, sdpo=idle)
    assert loss.item() == 1.0
    assert metrics["loss/sdpo_kl"].item() == 0.0


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(-5, 5), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 11), min_size=12, max_size=12),
    ranks=st.integers(1, 3),
)
def test_a_step_in_parts_has_the_gradient_of_one_mean(values: list[float], cuts: list[int], ranks: int) -> None:
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor(values, dtype=torch.float64)
    (expected,) = torch.autograd.grad((scale * tokens).mean(), scale)
    gradient = torch.zeros((), dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    for part in range(12):  # micro-batches, in whichever rank: the trainer sums them and averages over ranks
        own = tokens[[i for i in range(len(values)) if cuts[i] == part]]
        term = Term((scale * own).sum(), count(len(values)))
        loss, _ = compose(zero, sdpo=term, alpha_sdpo=1.0, averaged_over=ranks)
        gradient += torch.autograd.grad(loss, scale)[0] / ranks
    torch.testing.assert_close(gradient, expected)


def test_gradient_norms_are_each_losss_own_and_leave_the_graph() -> None:
    weights = nn.Parameter(torch.tensor([3.0, 4.0]))
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    losses = {"a": weights.square().sum() / 2, "b": (weights * frozen).sum() * 0.0, "c": torch.tensor(1.0)}
    norms = gradient_norms(losses, [weights, frozen])
    assert {name: norm.item() for name, norm in norms.items()} == {"a": 5.0, "b": 0.0, "c": 0.0}
    assert weights.grad is None
    sum(losses.values()).backward()
    assert weights.grad.tolist() == [3.0, 4.0]


def test_counts_are_this_ranks_own_where_nothing_is_distributed() -> None:
    assert {n: c.item() for n, c in global_counts({"b": 2, "a": 3}, device="cpu").items()} == {"a": 3.0, "b": 2.0}


def _rank(rank: int, store: str, results: str) -> None:
    """One of two ranks; only rank 0 has tokens."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = toy("qwen3").train()
    wrapped = nn.parallel.DistributedDataParallel(model)
    batch = torch.tensor([[3, 4, 5, 6, 7]]) + rank
    columns = torch.tensor([1, 2, 3] if rank == 0 else [], dtype=torch.int64)
    counts = global_counts({"sdpo": len(columns), "dpo": 1 - rank}, device="cpu")
    with capture_hidden(model, torch.zeros_like(columns), columns) as captured:
        grpo = wrapped(input_ids=batch).logits.square().mean()
    teacher = frozen_states(model, [(9, 4, 5, 6, 7)] if rank == 0 else [], [(1, 2, 3)] if rank == 0 else [])
    head = output_head(model)
    kl, _ = distil(captured.hidden(), teacher, head.weight, head.bias)
    # the pair channel needs a pass with gradient: the idle rank makes one too
    pairs = trained_states(wrapped, [(2, 3, 4)], [(1,)]).square().sum() if rank == 0 else idle_loss(wrapped)
    loss, _ = compose(
        grpo, sdpo=Term(kl, counts["sdpo"]), dpo=Term(pairs, counts["dpo"]),
        alpha_sdpo=1.0, beta_replay=1.0, averaged_over=2,
    )  # fmt: skip
    loss.backward()
    torch.save({name: p.grad for name, p in model.named_parameters()}, f"{results}/{rank}.pt")
    del wrapped, grpo, pairs, loss  # they hold the group, whose end once waited for ever at the return of this function
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_of_which_one_is_idle_have_the_gradient_of_one_process(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    model = toy("qwen3").train()
    grpo = sum(model(input_ids=torch.tensor([[3, 4, 5, 6, 7]]) + rank).logits.square().mean() for rank in (0, 1)) / 2
    head = output_head(model)
    student = trained_states(model, [(3, 4, 5, 6, 7)], [(1, 2, 3)])
    kl, _ = distil(student, frozen_states(model, [(9, 4, 5, 6, 7)], [(1, 2, 3)]), head.weight, head.bias)
    (grpo + kl / 3 + trained_states(model, [(2, 3, 4)], [(1,)]).square().sum()).backward()
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ranks[0][name], ranks[1][name], rtol=0, atol=0)
        # the model's norms are computed in float32 inside
        torch.testing.assert_close(ranks[0][name], parameter.grad, rtol=1e-4, atol=1e-6)
