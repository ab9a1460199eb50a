"""The chunked forms: the plain ones' numbers, and no tensor over all tokens and the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from errata_trainer.channels.distil import DistilMetrics, action_logprobs, distil, distil_lists
from errata_trainer.channels.sdpo import Divergence, log_probabilities

N, H, V = 11, 5, 13


def inputs(*, dtype: torch.dtype = torch.float64, bias: bool = True) -> dict[str, Tensor | None]:
    """Two hidden states and a head."""
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "student": random(N, H),
        "teacher": random(N, H),
        "weight": random(V, H),
        "bias": random(V) if bias else None,
    }


def softcap(logits: Tensor) -> Tensor:
    return 3.0 * torch.tanh(0.7 * logits / 3.0)


def leaves(tensors: dict[str, Tensor | None]) -> list[Tensor]:
    return [t for t in (tensors["student"], tensors["weight"], tensors["bias"]) if t is not None]


@pytest.mark.parametrize("chunk", [1, 3 * V, 4 * V + 5, 10**9])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transform", [None, softcap])
@pytest.mark.parametrize(
    "divergence",
    [
        Divergence(),
        Divergence(0.0, 1.1, 0.05),
        Divergence(1.0, 0.7, 0.3, "token"),
        Divergence(0.3, top_k=4, support="student", tail=True),
    ],
    ids=["default", "forward", "reverse", "top-k"],
)
def test_chunks_make_the_plain_forms_value_and_gradients(
    divergence: Divergence, transform: Any, bias: bool, chunk: int
) -> None:
    t = inputs(bias=bias)
    weights = torch.linspace(0.5, 2.0, N, dtype=torch.float64)

    def logits(hidden: Tensor) -> Tensor:
        plain = torch.nn.functional.linear(hidden, t["weight"], t["bias"])
        return plain if transform is None else transform(plain)

    per_token, stats = divergence.measure(logits(t["student"]), logits(t["teacher"]).detach())
    expected = (per_token * weights).sum()
    expected_grads = torch.autograd.grad(expected, leaves(t))
    loss, metrics = distil(
        t["student"], t["teacher"], t["weight"], t["bias"],
        divergence=divergence, token_weights=weights, transform=transform, chunk_elements=chunk,
    )  # fmt: skip
    grads = torch.autograd.grad(2.0 * loss, leaves(t))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for actual, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(actual, 2.0 * wanted, rtol=1e-11, atol=1e-12)
    means = metrics.means()
    torch.testing.assert_close(torch.stack(list(means.values())), stats.mean(0))
    assert metrics.tokens.item() == N


def test_the_teacher_gets_no_gradient_and_a_frozen_head_none() -> None:
    t = inputs()
    t["weight"] = t["weight"].detach()
    t["bias"] = t["bias"].detach()
    loss, _ = distil(t["student"], t["teacher"], t["weight"], t["bias"])
    loss.backward()
    assert t["student"].grad is not None
    assert t["teacher"].grad is None
    assert t["weight"].grad is None


def test_a_head_with_lora_trains_its_factors() -> None:
    t = inputs()
    a = torch.randn(2, H, dtype=torch.float64, requires_grad=True)
    b = torch.randn(V, 2, dtype=torch.float64, requires_grad=True)
    base = t["weight"].detach()
    logits = torch.nn.functional.linear(t["student"], base) + t["student"] @ a.T @ b.T * 0.5
    teacher = torch.nn.functional.linear(t["teacher"], base + 0.5 * b @ a).detach()
    expected = torch.autograd.grad(Divergence()(logits, teacher).sum(), (t["student"], a, b))
    loss, _ = distil(t["student"], t["teacher"], base + 0.5 * b @ a, chunk_elements=3 * V)
    for actual, wanted in zip(torch.autograd.grad(loss, (t["student"], a, b)), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_a_teacher_with_a_head_of_its_own_is_read_through_it() -> None:
    t = inputs()
    other = torch.randn(V, 3, dtype=torch.float64)
    hidden = torch.randn(N, 3, dtype=torch.float64)
    loss, _ = distil(t["student"], hidden, t["weight"], t["bias"], teacher_weight=other, chunk_elements=2 * V)
    expected = Divergence()(torch.nn.functional.linear(t["student"], t["weight"], t["bias"]), hidden @ other.T).sum()
    torch.testing.assert_close(loss, expected)


def test_no_tokens_are_an_attached_zero() -> None:
    t = inputs()
    loss, metrics = distil(t["student"][:0], t["teacher"][:0], t["weight"], t["bias"])
    assert loss.item() == 0.0
    loss.backward()
    assert t["weight"].grad.abs().sum() == 0
    assert metrics.means()["divergence"].item() == 0.0
    logprobs = action_logprobs(t["student"][:0], torch.zeros(0, dtype=torch.int64), t["weight"])
    assert logprobs.shape == (0,)
    logprobs.sum().backward()


def test_metrics_add_up_over_micro_batches() -> None:
    t = inputs()
    whole = distil(t["student"], t["teacher"], t["weight"])[1]
    parts = [distil(t["student"][s], t["teacher"][s], t["weight"])[1] for s in (slice(0, 3), slice(3, None))]
    both: DistilMetrics = parts[0] + parts[1]
    torch.testing.assert_close(list(both.means().values()), list(whole.means().values()))


@pytest.mark.parametrize("chunk", [1, 3 * V, 10**9])
@pytest.mark.parametrize("transform", [None, softcap])
def test_log_probabilities_are_the_plain_ones(chunk: int, transform: Any) -> None:
    t = inputs()
    ids = torch.arange(N) % V
    plain = torch.nn.functional.linear(t["student"], t["weight"], t["bias"])
    plain = plain if transform is None else transform(plain)
    expected = (plain / 1.3).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    upstream = torch.linspace(-1.0, 2.0, N, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, leaves(t), upstream)
    actual = action_logprobs(
        t["student"], ids, t["weight"], t["bias"], temperature=1.3, transform=transform, chunk_elements=chunk
    )
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, leaves(t), upstream), wanted)


def test_counts_that_differ_are_refused() -> None:
    t = inputs()
    with pytest.raises(ValueError, match="11 positions of the student, 10 of the teacher"):
        distil(t["student"], t["teacher"][:-1], t["weight"])
    with pytest.raises(ValueError, match="11 positions"):
        action_logprobs(t["student"], torch.zeros(3, dtype=torch.int64), t["weight"])


def test_under_autocast_the_head_is_the_models_and_gradients_have_the_parameters_dtype() -> None:
    t = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = distil(t["student"].bfloat16(), t["teacher"].bfloat16(), t["weight"], t["bias"])
        logits = torch.nn.functional.linear(t["student"], t["weight"], t["bias"])
        teacher = torch.nn.functional.linear(t["teacher"], t["weight"], t["bias"])
    expected = Divergence()(logits, teacher).sum()
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
    assert loss.dtype == torch.float32
    loss.backward()
    assert t["weight"].grad.dtype == torch.float32


class Largest(TorchDispatchMode):
    """Remembers the largest result of any operation while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.untyped_storage().nbytes() // max(value.element_size(), 1))
        return result


@pytest.mark.parametrize("tokens", [64, 512])
def test_nothing_larger_than_a_chunk_or_an_input_is_made_in_either_direction(tokens: int) -> None:
    hidden, vocabulary, rows = 8, 400, 4
    student = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, requires_grad=True)
    ids = torch.zeros(tokens, dtype=torch.int64)
    with Largest() as largest:
        loss, _ = distil(student, torch.randn(tokens, hidden), weight, chunk_elements=rows * vocabulary)
        loss = loss + action_logprobs(student, ids, weight, chunk_elements=rows * vocabulary).sum()
        loss.backward()
    assert largest.numel <= max(rows * vocabulary, vocabulary * hidden, tokens * hidden)
    with Largest() as plain:
        Divergence()(student @ weight.T, torch.randn(tokens, hidden) @ weight.T).sum().backward()
    assert plain.numel >= tokens * vocabulary


@pytest.mark.parametrize("chunk", [3 * V, 10**9])
@pytest.mark.parametrize("transform", [None, softcap])
@pytest.mark.parametrize(
    "divergence",
    [
        Divergence(0.3, 1.3, top_k=4, tail=True),
        Divergence(0.0, 0.7, 0.05, top_k=3),
        Divergence(1.0, 1.0, 0.1, "token", top_k=5, tail=True),
    ],
    ids=["tail", "renormalised", "clipped"],
)
def test_a_teachers_lists_make_the_loss_of_its_hidden_states(
    divergence: Divergence, transform: Any, chunk: int
) -> None:
    t = inputs()

    def weights(divergences: Tensor) -> Tensor:
        return torch.linspace(0.5, 2.0, N, dtype=torch.float64) * (divergences > 0.01)

    options: dict[str, Any] = {"divergence": divergence, "token_weights": weights, "transform": transform}
    expected, measured = distil(t["student"], t["teacher"], t["weight"], t["bias"], **options)
    with torch.no_grad():
        logits = torch.nn.functional.linear(t["teacher"], t["weight"], t["bias"])
        found = log_probabilities(logits if transform is None else transform(logits), divergence.temperature)
        best = found.topk(divergence.top_k, dim=-1)
    loss, metrics = distil_lists(
        t["student"], best.indices, best.values, t["weight"], t["bias"], chunk_elements=chunk, **options
    )
    torch.testing.assert_close(loss, expected)
    for name in ("tokens", "divergence", "entropy", "clipped"):
        torch.testing.assert_close(getattr(metrics, name), getattr(measured, name))
    expected_grads = torch.autograd.grad(expected, leaves(t))
    torch.testing.assert_close(torch.autograd.grad(loss, leaves(t)), expected_grads)


def test_lists_that_do_not_fit_are_refused_and_none_are_a_loss_of_zero() -> None:
    t = inputs()
    divergence = Divergence(top_k=2)
    ids, logprobs = torch.zeros(N, 2, dtype=torch.int64), torch.zeros(N, 2)
    head = (t["weight"], t["bias"])
    for wrong in ((ids[1:], logprobs[1:]), (ids, logprobs[:, :1]), (ids + V, logprobs), (ids - 1, logprobs)):
        with pytest.raises(ValueError):
            distil_lists(t["student"], *wrong, *head, divergence=divergence)
    loss, metrics = distil_lists(t["student"][:0], ids[:0], logprobs[:0], *head, divergence=divergence)
    loss.backward()
    assert (float(loss.detach()), float(metrics.tokens)) == (0.0, 0.0)
