"""Divergences and log-probabilities from hidden states, without ever holding logits of all tokens.

Logits of 500 tokens at a vocabulary of 152,000 take 304 MB in float32, and a divergence with its gradient holds six to
ten such tensors. Here rows are projected to the vocabulary in chunks, in the forward and again in the backward pass, so
memory is O(chunk). Only the inputs are kept in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .arguments import positive, shaped
from .heads import Transform
from .sdpo import Divergence, compare_lists, log_probabilities

CHUNK_ELEMENTS = 2**24
"""Logits of one chunk: 64 MiB in float32, of which a divergence and its gradient hold about ten."""


@dataclass(frozen=True, slots=True)
class DistilMetrics:
    """Sums over tokens (0-d, without gradient), which can be added over micro-batches and ranks.

    Attributes:
        tokens: Number of tokens.
        divergence: Divergence in nats, before clip and weights.
        entropy: Entropy of the student in nats.
        clipped: Number of tokens where the clip had an effect.
    """

    tokens: Tensor
    divergence: Tensor
    entropy: Tensor
    clipped: Tensor

    def __add__(self, other: DistilMetrics) -> DistilMetrics:
        """Return the sums over the tokens of both."""
        return DistilMetrics(
            self.tokens + other.tokens,
            self.divergence + other.divergence,
            self.entropy + other.entropy,
            self.clipped + other.clipped,
        )

    def means(self) -> dict[str, Tensor]:
        """Return the means ``divergence`` and ``entropy`` (nats per token) and ``clipped_fraction``; 0 without
        tokens."""
        tokens = self.tokens.clamp(min=1)
        return {
            "divergence": self.divergence / tokens,
            "entropy": self.entropy / tokens,
            "clipped_fraction": self.clipped / tokens,
        }


def distil(
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    divergence: Divergence | None = None,
    token_weights: Tensor | Callable[[Tensor], Tensor] | None = None,
    teacher_weight: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    transform: Transform | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, DistilMetrics]:
    """Return the divergence of the student from the teacher, summed over tokens, from hidden states.

    Args:
        student_hidden: ``[N, H]`` hidden states at the positions that predict the N target tokens.
        teacher_hidden: ``[N, H']`` hidden states at the positions that predict the same tokens; no gradient flows into
            it.
        weight: ``[V, H]`` weight of the output embedding; gets a gradient if it requires one. For a head with LoRA, the
            merged weight (`errata_trainer.channels.heads.output_head`).
        bias: ``[V]`` bias of the output embedding, or None.
        divergence: Divergence with its options. Defaults to `Divergence()`, OPSD's: ``jsd_beta`` 0.5, clip 10.
        token_weights: ``[N]`` weight of each token in the sum, or a function that returns the weights from the
            divergences ``[N]`` before the clip. None weighs each token 1. No gradient flows into them.
        teacher_weight: ``[V, H']`` weight of the teacher's output embedding, without gradient; None uses ``weight`` and
            ``bias``.
        teacher_bias: ``[V]`` bias of the teacher's output embedding; only with ``teacher_weight``.
        transform: Function that the model applies to its logits ``[C, V]`` after the projection, row by row (a scale, a
            soft cap); None for none.
        chunk_elements: Most logits of a chunk: its rows times V. A chunk has at least one row.

    Returns:
        The sum over tokens (0-d, float32 at least, attached, 0 for N = 0), to be divided by how many tokens the whole
        optimizer step has, and its metrics.

    Raises:
        ValueError: Other than N tokens on both sides, or another shape that does not fit; ``teacher_bias`` without
            ``teacher_weight``.
    """
    if len(student_hidden) != len(teacher_hidden):
        raise ValueError(f"{len(student_hidden)} positions of the student, {len(teacher_hidden)} of the teacher")
    _check_head("", student_hidden, weight, bias)
    if teacher_weight is None and teacher_bias is not None:
        raise ValueError("teacher_bias comes with teacher_weight: without it the teacher is read with weight and bias")
    _check_head(
        "teacher_" if teacher_weight is not None else "",
        teacher_hidden,
        weight if teacher_weight is None else teacher_weight,
        bias if teacher_weight is None else teacher_bias,
        side="teacher_hidden",
        vocabulary=len(weight),
    )
    if not callable(token_weights):
        shaped("token_weights", token_weights, (len(student_hidden),), "[N]")
    compare = Divergence() if divergence is None else divergence
    shape = transform or _as_they_are
    dtype = _compute_dtype(student_hidden, weight)
    head = (weight if teacher_weight is None else teacher_weight).detach().to(dtype)
    shift = bias if teacher_weight is None else teacher_bias
    shift = None if shift is None else shift.detach()

    def rows(measured: bool, logits: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            teacher_logits = shape(project(hidden, head, shift))
        if measured:
            return compare.measure(shape(logits), teacher_logits)
        return compare(shape(logits), teacher_logits), None

    per_token, stats = _of_rows(
        student_hidden, weight, bias, rows, chunk_elements, (teacher_hidden.detach().to(dtype),)
    )
    return _weighted(per_token, stats, token_weights)


def distil_lists(
    student_hidden: Tensor,
    ids: Tensor,
    teacher_logprobs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    divergence: Divergence,
    token_weights: Callable[[Tensor], Tensor] | None = None,
    transform: Transform | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, DistilMetrics]:
    """Return `distil` with a teacher elsewhere, of which only the likeliest tokens of each position are known.

    With lists of ``divergence.top_k`` ids it is `distil` of hidden states, with ``support="teacher"``.

    Args:
        student_hidden: ``[N, H]`` hidden states at the positions that predict the N target tokens.
        ids: ``[N, K]`` int64 ids of the teacher's lists, distinct in each list.
        teacher_logprobs: ``[N, K]`` the teacher's log-probabilities of ``ids`` at the divergence's temperature; no
            gradient flows into it.
        weight: ``[V, H]`` weight of the output embedding; gets a gradient if it requires one.
        bias: ``[V]`` bias of the output embedding, or None.
        divergence: Divergence with its options; the lists are its ``top_k`` and ``support``.
        token_weights: Function that returns the weight of each token in the sum from the divergences ``[N]`` before the
            clip. None weighs each token 1. No gradient flows into them.
        transform: Function that the model applies to its logits ``[C, V]`` after the projection, row by row; None for
            none.
        chunk_elements: Most logits of a chunk: its rows times V. A chunk has at least one row.

    Returns:
        The sum over tokens (0-d, float32 at least, attached, 0 for N = 0), and its metrics; see `distil`.

    Raises:
        ValueError: Other than N lists, or another shape that does not fit; an id beyond the vocabulary.
    """
    if ids.dim() != 2 or len(ids) != len(student_hidden):
        raise ValueError(f"{len(student_hidden)} positions of the student, ids are {list(ids.shape)}: give [N, K]")
    shaped("teacher_logprobs", teacher_logprobs, tuple(ids.shape), "as ids")
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < len(weight)):
        raise ValueError(f"ids have to lie in [0, {len(weight)}), they go from {int(ids.min())} to {int(ids.max())}")
    _check_head("", student_hidden, weight, bias)
    shape = transform or _as_they_are
    unclipped = replace(divergence, token_clip=None)

    def rows(measured: bool, logits: Tensor, listed: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor | None]:
        student = log_probabilities(shape(logits), divergence.temperature)
        known = torch.ones_like(listed, dtype=torch.bool)
        few = student.gather(-1, listed)
        value = compare_lists(divergence, few, teacher.to(student.dtype), known)
        if not measured:
            return value, None
        with torch.no_grad():
            whole = compare_lists(unclipped, few, teacher.to(student.dtype), known)
            entropy = -(student.exp() * student).sum(-1)
        return value, torch.stack((whole, entropy, (whole > value).to(whole.dtype)), -1)

    extras = (ids, teacher_logprobs.detach())
    per_token, stats = _of_rows(student_hidden, weight, bias, rows, chunk_elements, extras)
    return _weighted(per_token, stats, token_weights)


def action_logprobs(
    hidden: Tensor,
    target_ids: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    transform: Transform | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Return the log-probabilities of target tokens from hidden states.

    Args:
        hidden: ``[N, H]`` hidden states at the positions that predict the tokens.
        target_ids: ``[N]`` ids of the target tokens.
        weight: ``[V, H]`` weight of the output embedding; gets a gradient if it requires one.
        bias: ``[V]`` bias of the output embedding, or None.
        temperature: Divisor of the logits, > 0.
        transform: Function that the model applies to its logits ``[C, V]`` after the projection, row by row; None for
            none.
        chunk_elements: Most logits of a chunk: its rows times V. A chunk has at least one row.

    Returns:
        ``[N]``, float32 at least; attached, for N = 0 too. `errata_trainer.channels.dpo.segment_sums` adds them up.

    Raises:
        ValueError: Other than N ids, or another shape that does not fit; a temperature out of its range.
    """
    positive("temperature", temperature)
    if target_ids.shape != hidden.shape[:1]:
        raise ValueError(f"{len(hidden)} positions, {tuple(target_ids.shape)} target ids")
    _check_head("", hidden, weight, bias, side="hidden")
    shape = transform or _as_they_are

    def rows(_measured: bool, logits: Tensor, ids: Tensor) -> tuple[Tensor, None]:
        log_probs = log_probabilities(shape(logits), temperature)
        return log_probs.gather(-1, ids[:, None])[:, 0], None

    return _of_rows(hidden, weight, bias, rows, chunk_elements, (target_ids,))[0]


def _weighted(
    per_token: Tensor, stats: Tensor | None, token_weights: Tensor | Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, DistilMetrics]:
    """Return the weighted sum of divergences ``[N]``, and the metrics of their statistics ``[N, 3]``."""
    if stats is None:
        raise RuntimeError("the divergence was not measured")
    weights = token_weights(stats[:, 0]) if callable(token_weights) else token_weights
    if weights is not None:
        shaped("token_weights", weights, (len(per_token),), "[N]")
        per_token = per_token * weights.detach().to(per_token.dtype)
    sums = stats.sum(0)
    tokens = torch.full((), len(per_token), dtype=sums.dtype, device=sums.device)
    return per_token.sum(), DistilMetrics(tokens, sums[0], sums[1], sums[2])


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return logits in float32 or wider.

    Args:
        hidden: ``[C, H]`` hidden states.
        weight: ``[V, H]`` weight of the output embedding, of the same dtype.
        bias: ``[V]`` bias of the output embedding, or None.

    Returns:
        ``[C, V]``. Of half precision the products are added up in float32, and on CUDA not rounded back in between.
    """
    logits = _wide_product(hidden, weight.t())
    return logits if bias is None else logits + bias.to(logits.dtype)


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return a matrix product in float32 or wider. On CUDA the product of half-precision inputs is not rounded
    before."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if wide != left.dtype and left.is_cuda and _MM_WIDENS:
        return torch.mm(left, right, out_dtype=wide)
    return torch.mm(left, right).to(wide)


_MM_WIDENS = torch.version.hip is None and tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 8)

# (whether statistics are wanted, logits [C, V], extras [C, ...]) -> values [C], statistics [C, K] or None
_RowFunction = Callable[..., tuple[Tensor, Tensor | None]]


def _check_head(
    prefix: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    side: str = "student_hidden",
    vocabulary: int | None = None,
) -> None:
    """Raise ValueError if output embedding, bias and hidden states do not fit each other."""
    if hidden.dim() != 2:
        raise ValueError(f"{side} is {list(hidden.shape)}: it has to be [N, H], one row for each token")
    if weight.dim() != 2:
        raise ValueError(f"{prefix}weight is {list(weight.shape)}: it has to be [V, H]")
    shaped(f"{prefix}weight", weight, (len(weight) if vocabulary is None else vocabulary, hidden.shape[1]), "[V, H]")
    shaped(f"{prefix}bias", bias, (len(weight),), "[V]")


def _as_they_are(logits: Tensor) -> Tensor:
    return logits


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which to multiply ``hidden`` by ``weight``.

    It is autocast's dtype if autocast is enabled on the device of ``hidden``, else the dtype of ``weight``. Autocast
    does not change a float64 ``weight``.
    """
    device = hidden.device.type
    if weight.dtype == torch.float64:
        return weight.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _of_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    function: _RowFunction,
    chunk_elements: int,
    extras: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor | None]:
    rows = max(1, chunk_elements // max(1, weight.shape[0]))
    dtype = _compute_dtype(hidden, weight)
    with _without_autocast(hidden):
        values, stats = _OfRows.apply(hidden.to(dtype), weight, bias, function, rows, *extras)
    return values, stats


@contextmanager
def _without_autocast(tensor: Tensor) -> Iterator[None]:
    with torch.autocast(tensor.device.type, enabled=False):
        yield


class _OfRows(torch.autograd.Function):  # type: ignore[misc]
    """Applies a function to rows of logits in chunks, forward and backward; see `_RowFunction`.

    The projection has the dtype of ``hidden``. The weight is cast inside instead of by autograd: its gradient is
    accumulated and returned in float32 or wider, as by TRL's fused head, and no cast copy is kept between the passes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        function: _RowFunction,
        rows: int,
        *extras: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        values, stats = [], []
        head = weight.to(hidden.dtype)
        for c in _chunks(hidden, rows):
            value, stat = function(True, project(hidden[c], head, bias), *(extra[c] for extra in extras))
            values.append(value)
            stats += [] if stat is None else [stat]
        ctx.save_for_backward(hidden, weight, bias, *extras)
        ctx.function, ctx.rows = function, rows
        if not stats:
            return torch.cat(values), None
        gathered = torch.cat(stats)
        ctx.mark_non_differentiable(gathered)
        return torch.cat(values), gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _stats: Any) -> tuple[Any, ...]:
        hidden, weight, bias, *extras = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        head = weight.to(hidden.dtype)
        with _without_autocast(hidden):
            for c in _chunks(hidden, ctx.rows):
                logits = project(hidden[c], head, bias).requires_grad_()
                with torch.enable_grad():
                    values, _ = ctx.function(False, logits, *(extra[c] for extra in extras))
                (towards,) = torch.autograd.grad(values, logits, grad[c])
                narrow = towards.to(hidden.dtype)
                if grad_hidden is not None:
                    torch.mm(narrow, head, out=grad_hidden[c])
                if grad_weight is not None and wide == hidden.dtype:
                    grad_weight.addmm_(narrow.t(), hidden[c])
                elif grad_weight is not None:
                    grad_weight += _wide_product(narrow.t(), hidden[c])
                if grad_bias is not None:
                    grad_bias += towards.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * (2 + len(extras)),
        )


def _chunks(hidden: Tensor, rows: int) -> Iterator[slice]:
    """Yield slices over the rows; one empty slice if there are no rows, so that the graph is the same."""
    for start in range(0, max(len(hidden), 1), rows):
        yield slice(start, start + rows)
