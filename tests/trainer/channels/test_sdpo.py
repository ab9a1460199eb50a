"""Properties of the divergence that no vector shows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from errata_trainer.channels.sdpo import (
    Divergence,
    aggregate,
    generalized_jsd_loss,
    sampled_token_loss,
    sdpo_loss,
)

BETAS = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.01, 0.99))
SEEDS = st.integers(0, 2**31)
EXACT = settings(max_examples=60, deadline=None)


def pair(seed: int, *shape: int, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    """Two random logits."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (scale * torch.randn(*shape, dtype=torch.float64, generator=generator) for _ in range(2))
    return student.requires_grad_(), teacher


def entropy_of(b: float) -> float:
    return -sum(p * math.log(p) for p in (b, 1.0 - b) if p > 0.0)


@EXACT
@given(seed=SEEDS, b=BETAS, temperature=st.floats(0.3, 3.0), scale=st.floats(0.1, 60.0))
def test_a_divergence_is_never_negative_and_a_mixtures_is_bounded_by_the_entropy_of_b(
    seed: int, b: float, temperature: float, scale: float
) -> None:
    student, teacher = pair(seed, 5, 7, scale=scale)
    per_token = Divergence(b, temperature, None)(student, teacher)
    assert (per_token >= -1e-12).all()
    if 0.0 < b < 1.0:
        assert (per_token <= entropy_of(b) + 1e-12).all()


@EXACT
@given(seed=SEEDS, b=st.floats(0.001, 0.999), scale=st.floats(0.1, 60.0), clip=st.floats(1.0, 10.0))
def test_no_clip_from_1_up_takes_anything_of_a_mixture(seed: int, b: float, scale: float, clip: float) -> None:
    student, teacher = pair(seed, 5, 7, scale=scale)
    entries = Divergence(b, 1.0, None)._entries(student, teacher)[0]
    assert (entries > -1e-12).all()
    assert (entries <= math.log(2) + 1e-12).all()
    assert torch.equal(Divergence(b, 1.0, clip)(student, teacher), Divergence(b, 1.0, None)(student, teacher))


@EXACT
@given(seed=SEEDS, b=BETAS, clip=st.one_of(st.none(), st.floats(0.01, 10.0)), mode=st.sampled_from(["entry", "token"]))
def test_equal_distributions_have_no_divergence_and_no_gradient(
    seed: int, b: float, clip: float | None, mode: str
) -> None:
    student, _ = pair(seed, 2, 3, 6)
    teacher = student.detach() + 1.5  # a constant is no difference
    mask = torch.ones(2, 3, dtype=torch.bool)
    loss = generalized_jsd_loss(student, teacher, mask, jsd_beta=b, token_clip=clip, clip_mode=mode)
    loss.backward()
    assert abs(loss.item()) < 1e-12
    assert student.grad.abs().max() < 1e-12


@EXACT
@given(seed=SEEDS, b=BETAS, top_k=st.one_of(st.none(), st.integers(1, 9)), clip=st.floats(0.01, 10.0))
def test_the_order_of_the_vocabulary_does_not_matter(seed: int, b: float, top_k: int | None, clip: float) -> None:
    student, teacher = pair(seed, 2, 3, 7)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(2, 3, dtype=torch.bool)
    options = {"jsd_beta": b, "top_k": top_k, "token_clip": clip}
    here = generalized_jsd_loss(student, teacher, mask, **options)
    there = generalized_jsd_loss(student[..., order], teacher[..., order], mask, **options)
    torch.testing.assert_close(here, there)


@EXACT
@given(seed=SEEDS, b=BETAS)
def test_a_mixture_seen_from_the_other_side_is_the_mixture_with_the_other_weight(seed: int, b: float) -> None:
    student, teacher = pair(seed, 5, 7)
    torch.testing.assert_close(
        Divergence(b, 1.0, None)(student, teacher), Divergence(1.0 - b, 1.0, None)(teacher, student)
    )


@pytest.mark.parametrize("b", [0.0, 1.0])
def test_the_ends_are_the_kullback_leibler_divergences_and_the_mixture_goes_to_zero_beside_them(b: float) -> None:
    student, teacher = pair(3, 4, 6, scale=1.0)
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    forward = (log_t.exp() * (log_t - log_s)).sum(-1)
    reverse = (log_s.exp() * (log_s - log_t)).sum(-1)
    torch.testing.assert_close(Divergence(b, 1.0, None)(student, teacher), reverse if b else forward)
    near = 1e-6 if b == 0.0 else 1.0 - 1e-6
    beside = Divergence(near, 1.0, None)(student, teacher)
    assert (beside < entropy_of(1e-6)).all()
    # near 0 the mixture is b KL(T||S), near 1 it is (1 - b) KL(S||T)
    torch.testing.assert_close(beside / 1e-6, forward if b == 0.0 else reverse, rtol=1e-2, atol=1e-3)


@EXACT
@given(seed=SEEDS, b=BETAS, data=st.data())
def test_only_tokens_under_the_mask_count_whatever_stands_elsewhere(seed: int, b: float, data: st.DataObject) -> None:
    flags = data.draw(st.lists(st.booleans(), min_size=6, max_size=6))
    mask = torch.tensor(flags).view(2, 3)
    student, teacher = pair(seed, 2, 3, 5)
    garbage = student.detach().clone()
    garbage[~mask] = torch.nan
    garbage.requires_grad_()
    loss = generalized_jsd_loss(garbage, teacher, mask, jsd_beta=b)
    loss.backward()
    per_token = Divergence(b)(student, teacher)
    torch.testing.assert_close(loss, (per_token * mask).sum() / max(int(mask.sum()), 1))
    assert garbage.grad[~mask].abs().sum() == 0
    assert garbage.grad.isfinite().all()


@pytest.mark.parametrize("b", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("mode", ["entry", "token"])
@pytest.mark.parametrize(("support", "tail"), [("teacher", False), ("student", True), ("student", False)])
@pytest.mark.parametrize("top_k", [None, 3])
def test_gradients_are_those_of_the_values(b: float, mode: str, support: str, tail: bool, top_k: int | None) -> None:
    student, teacher = pair(11, 3, 5, scale=1.5)
    divergence = Divergence(b, 1.3, 0.4, mode, top_k, support, tail)
    assert torch.autograd.gradcheck(lambda s: divergence(s, teacher), (student,))


def test_the_sampled_token_loss_has_the_gradient_of_the_reverse_divergence_in_expectation() -> None:
    student, teacher = pair(5, 1, 4, scale=1.0)
    (exact,) = torch.autograd.grad(Divergence(1.0, 1.0, None)(student, teacher).sum(), student)
    mean = torch.zeros_like(exact)
    for token, probability in enumerate(student.detach().softmax(-1)[0]):
        loss = sampled_token_loss(
            student[None], teacher[None], torch.tensor([[token]]), torch.ones(1, 1, dtype=torch.bool)
        )
        mean += probability * torch.autograd.grad(loss, student)[0]
    torch.testing.assert_close(mean, exact)


@pytest.mark.parametrize("b", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [None, 4])
def test_an_id_that_is_impossible_on_both_sides_counts_nothing(b: float, top_k: int | None) -> None:
    student, teacher = pair(7, 1, 2, 6)
    short = generalized_jsd_loss(
        student[..., :5], teacher[..., :5], torch.ones(1, 2, dtype=torch.bool), jsd_beta=b, top_k=top_k
    )
    (expected,) = torch.autograd.grad(short, student)
    masked = student.detach().clone()
    masked[..., 5] = -torch.inf
    masked.requires_grad_()
    teacher[..., 5] = -torch.inf
    loss = generalized_jsd_loss(masked, teacher, torch.ones(1, 2, dtype=torch.bool), jsd_beta=b, top_k=top_k)
    loss.backward()
    torch.testing.assert_close(loss, short)
    torch.testing.assert_close(masked.grad, expected)


@pytest.mark.parametrize("b", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_an_id_that_is_impossible_on_one_side_leaves_loss_and_gradient_finite_under_the_clip(
    b: float, side: str
) -> None:
    student, teacher = pair(7, 1, 2, 6)
    student = student.detach().clone()
    (student if side == "student" else teacher)[..., 2] = -torch.inf
    student.requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss = generalized_jsd_loss(student, teacher, mask, jsd_beta=b)
    loss.backward()
    assert loss.isfinite()
    assert student.grad.isfinite().all()
    if (b, side) in ((0.0, "student"), (1.0, "teacher")):  # infinite: what is left is the clip
        assert generalized_jsd_loss(student, teacher, mask, jsd_beta=b, clip_mode="token").item() == 10.0


@pytest.mark.parametrize("loss_of", ["jsd", "sdpo", "sampled"])
def test_nothing_under_the_mask_is_an_attached_zero(loss_of: str) -> None:
    student, teacher = pair(1, 2, 3, 5)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    if loss_of == "jsd":
        loss = generalized_jsd_loss(student, teacher, mask)
    elif loss_of == "sdpo":
        loss = sdpo_loss(student, teacher, mask)
    else:
        loss = sampled_token_loss(student, teacher, torch.zeros(2, 3, dtype=torch.int64), mask)
    assert loss.item() == 0.0
    loss.backward()
    assert student.grad.abs().sum() == 0


def test_a_clipped_token_has_no_gradient_and_a_clipped_entry_leaves_the_others_theirs() -> None:
    student, teacher = pair(2, 1, 3, 6)
    mask = torch.ones(1, 3, dtype=torch.bool)
    generalized_jsd_loss(student, teacher, mask, jsd_beta=0.0, token_clip=1e-6, clip_mode="token").backward()
    assert student.grad.abs().sum() == 0
    loss = generalized_jsd_loss(student, teacher, mask, jsd_beta=0.0, token_clip=1e-6)
    loss.backward()
    assert student.grad.abs().sum() > 0
    assert loss.item() < 0.0  # as OPSD's README says


def test_half_precision_is_computed_in_float32() -> None:
    student, teacher = pair(2, 1, 3, 6)
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss = generalized_jsd_loss(student.bfloat16(), teacher.bfloat16(), mask)
    assert loss.dtype == torch.float32
    expected = generalized_jsd_loss(student.bfloat16().double(), teacher.bfloat16().double(), mask)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-6)


def test_no_gradient_reaches_the_teacher() -> None:
    student, teacher = pair(2, 1, 3, 6)
    teacher.requires_grad_()
    generalized_jsd_loss(student, teacher, torch.ones(1, 3, dtype=torch.bool)).backward()
    assert teacher.grad is None


@pytest.mark.parametrize(
    "options",
    [
        {"jsd_beta": 1.5},
        {"jsd_beta": math.nan},
        {"temperature": 0.0},
        {"token_clip": 0.0},
        {"clip_mode": "sum"},
        {"top_k": 0},
        {"support": "both"},
    ],
)
def test_an_option_out_of_its_range_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Divergence(**options)


def test_labels_for_a_mask_and_shapes_that_differ_are_refused() -> None:
    student, teacher = pair(2, 1, 3, 6)
    with pytest.raises(ValueError, match="labels"):
        generalized_jsd_loss(student, teacher, torch.tensor([[-100, 3, 4]]))
    with pytest.raises(ValueError, match="gather both"):
        generalized_jsd_loss(student, teacher[:, :2], torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask is"):
        generalized_jsd_loss(student, teacher, torch.ones(1, 2, dtype=torch.bool))
    integers = generalized_jsd_loss(student, teacher, torch.tensor([[1, 0, 1]]))
    assert integers == generalized_jsd_loss(student, teacher, torch.tensor([[True, False, True]]))


def test_importance_weights_need_the_log_probabilities_they_are_of() -> None:
    student, teacher = pair(2, 1, 3, 6)
    mask, ids = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="old_logprobs"):
        sdpo_loss(student, teacher, mask, is_clip=2.0)
    with pytest.raises(ValueError, match="old_logprobs"):
        sampled_token_loss(student, teacher, ids, mask, is_clip=2.0)
    with pytest.raises(ValueError, match="token-mean"):
        aggregate(torch.ones(1, 3), mask, "mean")
