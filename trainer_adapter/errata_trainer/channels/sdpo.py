"""Channel 2: the divergence between a student and the same model with a hint, as a loss of logits.

S and T are the student's and the teacher's next-token distributions at one position, b is ``jsd_beta``, and

    M = (1 - b) S + b T        D = b KL(T||M) + (1 - b) KL(S||M)        for 0 < b < 1
    D = KL(T||S)  for b = 0 (forward)                D = KL(S||T)  for b = 1 (reverse)

as in OPSD (`generalized_jsd_loss`), SDPO (arXiv:2601.20802, `sdpo_loss`) and the GKD lineage. For 0 < b < 1 it is
bounded by the entropy of b, at most ln 2 = 0.693, so that ``token_clip=10`` cannot bind there. A temperature divides
both logits; no T^2 factor.

The teacher never gets a gradient. Nothing is shifted: logits and the target that they predict have the same index. Only
positions under the mask are computed, so values elsewhere (padding, NaN) have no effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .arguments import positive, shaped, upper_bound

ClipMode = Literal["entry", "token"]
Support = Literal["teacher", "student"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

# exp() of it is 0 in every dtype and products with it are finite; -inf would make 0 * inf = NaN, in gradients too
_LOG_ZERO = -1e30


@dataclass(frozen=True, slots=True)
class Divergence:
    """A divergence per token with its options.

    Attributes:
        jsd_beta: Weight b of the teacher in the mixture, in [0, 1]; 0 is KL(T||S), 1 is KL(S||T).
        temperature: Divisor of both sides' logits, > 0.
        token_clip: Upper bound of what ``clip_mode`` says, > 0; None for no bound.
        clip_mode: Quantity that ``token_clip`` bounds. ``entry``: each (token, vocabulary id) summand before the sum
            over the vocabulary, as OPSD does in spite of the name; the divergence can then become negative. ``token``:
            the sum; it stays >= 0, and a token above the bound has no gradient.
        top_k: Number of likeliest ids to compare; None compares the whole vocabulary.
        support: Side whose likeliest ``top_k`` ids are compared: ``teacher``, as in OPSD, or ``student``, as in SDPO.
        tail: Whether the other ids, with ``top_k``, count as one more id with the rest of the probability. If False,
            they are left out and both sides are renormalised, except a side to which all compared ids are impossible.
            Values with and without it are not comparable with each other nor with the full divergence.

    Raises:
        ValueError: An option out of its range.
    """

    jsd_beta: float = 0.5
    temperature: float = 1.0
    token_clip: float | None = 10.0
    clip_mode: ClipMode = "entry"
    top_k: int | None = None
    support: Support = "teacher"
    tail: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        if not 0.0 <= self.jsd_beta <= 1.0:
            raise ValueError(f"jsd_beta is {self.jsd_beta}: it has to lie in [0, 1]")
        positive("temperature", self.temperature)
        upper_bound("token_clip", self.token_clip)
        if self.clip_mode not in ("entry", "token"):
            raise ValueError(f"clip_mode is {self.clip_mode!r}: 'entry' or 'token'")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: at least 1, or None for the whole vocabulary")
        if self.support not in ("teacher", "student"):
            raise ValueError(f"support is {self.support!r}: 'teacher' or 'student'")

    def __call__(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the divergence at each position.

        Args:
            student_logits: ``[..., V]`` logits of the student, of any float dtype; computed in float32 at least.
            teacher_logits: ``[..., V]`` logits of the teacher; no gradient flows into it.

        Returns:
            ``[...]`` in nats. An id with logit -inf on both sides counts nothing; on one side only, the divergence may
            be infinite and is then a very large number, without a gradient into that logit, or what the clip leaves.

        Raises:
            ValueError: Shapes that differ.
        """
        return self._clipped(self._entries(student_logits, teacher_logits)[0])

    def measure(self, student_logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divergence at each position, and metrics of it.

        Args:
            student_logits: ``[..., V]`` logits of the student.
            teacher_logits: ``[..., V]`` logits of the teacher; no gradient flows into it.

        Returns:
            The divergence ``[...]``, and without gradient ``[..., 3]``: the divergence before the clip, the student's
            entropy over the whole vocabulary, both in nats, and 1.0 where the clip took something, else 0.0.

        Raises:
            ValueError: Shapes that differ.
        """
        entries, student = self._entries(student_logits, teacher_logits)
        divergence = self._clipped(entries)
        with torch.no_grad():
            entropy = -(student.exp() * student).sum(-1)
            unclipped = entries.sum(-1)
            clipped = torch.zeros_like(unclipped)
            if self._binding_clip is not None:
                highest = entries.amax(-1) if self.clip_mode == "entry" else unclipped
                clipped = (highest > self._binding_clip).to(unclipped.dtype)
        return divergence, torch.stack((unclipped, entropy, clipped), -1)

    @property
    def _binding_clip(self) -> float | None:
        """The clip if it can have an effect, else None: the summands of a mixture and their sum are at most ln 2."""
        return None if self.token_clip is None or (0.0 < self.jsd_beta < 1.0 <= self.token_clip) else self.token_clip

    def _entries(self, student_logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summands of the divergence over the vocabulary or top-k ids, and the student's
        log-probabilities."""
        shaped("teacher_logits", teacher_logits, tuple(student_logits.shape), "as student_logits")
        student = log_probabilities(student_logits, self.temperature)
        teacher = log_probabilities(teacher_logits.detach(), self.temperature)
        if self.top_k is None:
            return _summands(student, teacher, self.jsd_beta), student
        leader = teacher if self.support == "teacher" else student
        ids = leader.detach().topk(min(self.top_k, leader.shape[-1]), dim=-1).indices
        few_student, few_teacher = (self._restricted(x.gather(-1, ids)) for x in (student, teacher))
        return _summands(few_student, few_teacher, self.jsd_beta), student

    def _clipped(self, entries: Tensor) -> Tensor:
        if self._binding_clip is None:
            return entries.sum(-1)
        if self.clip_mode == "entry":
            return entries.clamp(max=self._binding_clip).sum(-1)
        return entries.sum(-1).clamp(max=self._binding_clip)

    def _restricted(self, log_probs: Tensor) -> Tensor:
        if not self.tail:
            # where all are impossible there is nothing to renormalise: each would get the probability of a likely id
            possible = log_probs.amax(-1, keepdim=True) > 0.5 * _LOG_ZERO
            return torch.where(possible, log_probs.log_softmax(-1), log_probs)
        total = log_probs.logsumexp(-1, keepdim=True)
        # SDPO's bound: at probability 1 the tail would be log 0
        return torch.cat((log_probs, torch.log(-torch.expm1(total.clamp(max=-1e-7)))), -1)


def compare_lists(divergence: Divergence, student: Tensor, teacher: Tensor, known: Tensor) -> Tensor:
    """Return the divergence at each position from the log-probabilities of a list of ids.

    Args:
        divergence: Divergence whose options apply; its ``tail`` says how the ids outside the lists count.
        student: ``[..., K]`` log-probabilities of the listed ids under the student, attached.
        teacher: ``[..., K]`` log-probabilities of the same ids under the teacher; no gradient flows into it.
        known: ``[..., K]`` bool, True where a place of a list counts.

    Returns:
        ``[...]`` in nats.
    """
    sides = [torch.where(known, side, torch.full_like(side, _LOG_ZERO)) for side in (student, teacher.detach())]
    few_student, few_teacher = (divergence._restricted(side) for side in sides)
    return divergence._clipped(_summands(few_student, few_teacher, divergence.jsd_beta))


def log_probabilities(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log-probabilities in float32 or wider; for probability 0 a large negative finite number.

    Args:
        logits: ``[..., V]`` logits.
        temperature: Divisor of the logits, > 0.

    Returns:
        ``[..., V]``; ids at the bound get no gradient.

    Raises:
        ValueError: A temperature out of its range.
    """
    positive("temperature", temperature)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    return torch.log_softmax(logits, -1).clamp(min=_LOG_ZERO)


def _summands(student: Tensor, teacher: Tensor, b: float) -> Tensor:
    """Return the summands over the vocabulary, ``[..., V]``; their sum is D."""
    if b == 0.0:
        return teacher.exp() * (teacher - student)
    if b == 1.0:
        return student.exp() * (student - teacher)
    mixture = torch.logaddexp(student + math.log1p(-b), teacher + math.log(b))
    return b * teacher.exp() * (teacher - mixture) + (1.0 - b) * student.exp() * (student - mixture)


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    *,
    jsd_beta: float = 0.5,
    temperature: float = 1.0,
    token_clip: float | None = 10.0,
    clip_mode: ClipMode = "entry",
    top_k: int | None = None,
) -> Tensor:
    """Return the mean generalized Jensen-Shannon divergence over the tokens under a mask, by OPSD's convention.

    Args:
        student_logits: ``[B, T, V]`` logits of the student.
        teacher_logits: ``[B, T, V]`` logits of the teacher; no gradient flows into it.
        mask: ``[B, T]`` bool, True where the token counts. Not OPSD's labels: there -100 says what does not count.
        jsd_beta: Weight of the teacher in the mixture; 0 is KL(T||S), 1 is KL(S||T).
        temperature: Divisor of both sides' logits, > 0.
        token_clip: Upper bound of what ``clip_mode`` says, > 0; None for no bound.
        clip_mode: Quantity that ``token_clip`` bounds, ``entry`` or ``token``; see `Divergence`.
        top_k: Number of the teacher's likeliest ids to compare, renormalised; None compares the whole vocabulary.

    Returns:
        Scalar, in nats per token. With nothing under the mask 0, attached to the graph.

    Raises:
        ValueError: Shapes that do not fit, an option out of its range, a mask of other values than 0 and 1.
    """
    divergence = Divergence(jsd_beta, temperature, token_clip, clip_mode, top_k)
    mask = _checked_mask(student_logits, teacher_logits, mask)
    per_token = divergence(student_logits[mask], teacher_logits[mask])
    return per_token.sum() / max(per_token.numel(), 1)


def sdpo_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    *,
    divergence: Divergence | None = None,
    target_ids: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    is_clip: float | None = None,
    aggregation: Aggregation = "token-mean",
) -> Tensor:
    """Return SDPO's loss from logits: a divergence per token, importance weights, and an aggregation.

    Args:
        student_logits: ``[B, T, V]`` logits of the student.
        teacher_logits: ``[B, T, V]`` logits of the teacher; no gradient flows into it.
        mask: ``[B, T]`` bool, True where the token counts.
        divergence: Divergence per token. Defaults to SDPO's: no clip and the whole vocabulary, at ``jsd_beta`` 0.5.
        target_ids: ``[B, T]`` sampled ids; only read for the importance weights.
        old_logprobs: ``[B, T]`` log-probabilities of the sampled ids when they were sampled; needed for ``is_clip``.
        is_clip: Upper bound of the importance weight, > 0; None for no weights.
        aggregation: Reduction of the tokens' losses to a scalar; see `aggregate`.

    Returns:
        Scalar. With nothing under the mask 0, attached to the graph.

    Raises:
        ValueError: Shapes that do not fit; an option out of its range; ``is_clip`` without ``old_logprobs`` and
            ``target_ids``.
    """
    divergence = Divergence(token_clip=None) if divergence is None else divergence
    mask = _checked_mask(student_logits, teacher_logits, mask)
    shaped("target_ids", target_ids, tuple(mask.shape), "[B, T]")
    shaped("old_logprobs", old_logprobs, tuple(mask.shape), "[B, T]")
    student = student_logits[mask]
    per_token = divergence(student, teacher_logits[mask])
    if is_clip is not None:
        if target_ids is None or old_logprobs is None:
            raise ValueError("is_clip needs old_logprobs and target_ids: without them there is no ratio to clip")
        with torch.no_grad():
            sampled = _chosen(log_probabilities(student, divergence.temperature), target_ids[mask])
        per_token = per_token * importance_weights(sampled, old_logprobs[mask], is_clip)
    return aggregate(_spread(per_token, mask), mask, aggregation)


def sampled_token_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    target_ids: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    old_logprobs: Tensor | None = None,
    is_clip: float | None = None,
    aggregation: Aggregation = "token-mean",
) -> Tensor:
    """Return SDPO's sampled-token loss, ``(log S - log T).detach() * log S`` for each sampled token.

    Its gradient is, over samples of S, that of KL(S||T). Its value is no divergence: do not read it.

    Args:
        student_logits: ``[B, T, V]`` logits of the student.
        teacher_logits: ``[B, T, V]`` logits of the teacher; no gradient flows into it.
        target_ids: ``[B, T]`` sampled ids; values outside the mask are not read.
        mask: ``[B, T]`` bool, True where the token counts.
        temperature: Divisor of both sides' logits, > 0.
        old_logprobs: ``[B, T]`` log-probabilities of the sampled ids when they were sampled; needed for ``is_clip``.
        is_clip: Upper bound of the importance weight, > 0; None for no weights.
        aggregation: Reduction of the tokens' losses to a scalar; see `aggregate`.

    Returns:
        Scalar. With nothing under the mask 0, attached to the graph.

    Raises:
        ValueError: Shapes that do not fit; an option out of its range; ``is_clip`` without ``old_logprobs``.
    """
    mask = _checked_mask(student_logits, teacher_logits, mask)
    shaped("target_ids", target_ids, tuple(mask.shape), "[B, T]")
    shaped("old_logprobs", old_logprobs, tuple(mask.shape), "[B, T]")
    ids = target_ids[mask]
    student = _chosen(log_probabilities(student_logits[mask], temperature), ids)
    teacher = _chosen(log_probabilities(teacher_logits.detach()[mask], temperature), ids)
    per_token = (student - teacher).detach() * student
    if is_clip is not None:
        if old_logprobs is None:
            raise ValueError("is_clip needs old_logprobs: without them there is no ratio to clip")
        per_token = per_token * importance_weights(student, old_logprobs[mask], is_clip)
    return aggregate(_spread(per_token, mask), mask, aggregation)


def importance_weights(logprobs: Tensor, old_logprobs: Tensor, is_clip: float) -> Tensor:
    """Return ``exp(log pi - log pi_old)``, clipped from above, without gradient.

    Args:
        logprobs: ``[N]`` log-probabilities under the weights that are trained.
        old_logprobs: ``[N]`` log-probabilities under the weights that sampled.
        is_clip: Upper bound of the weights, > 0.

    Returns:
        ``[N]``. The log-ratio is held in [-20, 20], as SDPO does.

    Raises:
        ValueError: Shapes that differ; a bound out of its range.
    """
    upper_bound("is_clip", is_clip)
    shaped("old_logprobs", old_logprobs, tuple(logprobs.shape), "[N]")
    return (logprobs - old_logprobs).detach().clamp(-20.0, 20.0).exp().clamp(max=is_clip)


def aggregate(per_token: Tensor, mask: Tensor, aggregation: Aggregation = "token-mean") -> Tensor:
    """Reduce per-token values under a mask to a scalar. Sequences without tokens under the mask are ignored.

    Args:
        per_token: ``[B, T]`` finite values; those outside the mask do not count.
        mask: ``[B, T]`` bool, True where the token counts.
        aggregation: Kind of reduction. ``token-mean``: the mean over all tokens, whichever sequence they are of.
            ``seq-mean-token-sum``: the mean over sequences of their sums. ``seq-mean-token-mean``: the mean over
            sequences of their means. ``seq-mean-token-sum-norm``: the sum divided by the padded length T.

    Returns:
        Scalar; 0 if the mask is empty.

    Raises:
        ValueError: An unknown aggregation; shapes that differ.
    """
    shaped("per_token", per_token, tuple(mask.shape), "[B, T]")
    kept = per_token * mask
    lengths = mask.sum(-1)
    sequences = (lengths > 0).sum().clamp(min=1)
    if aggregation == "token-mean":
        return kept.sum() / lengths.sum().clamp(min=1)
    if aggregation == "seq-mean-token-sum":
        return kept.sum() / sequences
    if aggregation == "seq-mean-token-mean":
        return (kept.sum(-1) / lengths.clamp(min=1)).sum() / sequences
    if aggregation == "seq-mean-token-sum-norm":
        return kept.sum() / max(mask.shape[-1], 1)
    raise ValueError(f"aggregation is {aggregation!r}: one of {', '.join(get_args(Aggregation))}")


def _checked_mask(student_logits: Tensor, teacher_logits: Tensor, mask: Tensor) -> Any:
    """Return the mask as bool; raise ValueError if it is none."""
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student logits are {tuple(student_logits.shape)}, teacher logits {tuple(teacher_logits.shape)}: "
            "gather both at the positions that predict the same tokens first"
        )
    if mask.shape != student_logits.shape[:-1]:
        raise ValueError(f"the mask is {tuple(mask.shape)}, the logits {tuple(student_logits.shape)}")
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("the mask holds other values than 0 and 1: are these labels? Pass labels != -100")
    return mask.bool()


def _chosen(log_probs: Tensor, ids: Tensor) -> Tensor:
    return log_probs.gather(-1, ids[..., None])[..., 0]


def _spread(per_token: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=per_token.dtype, device=per_token.device).masked_scatter(mask, per_token)
