"""Options of the channels, other than their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .channels.arguments import not_negative
from .channels.dpo import LossType
from .channels.sdpo import ClipMode, Support

Targets = Literal["turn", "calls"]
Teacher = Literal["live", "ema", "base", "initial"]
Form = Literal["distribution", "sampled"]
Reference = Literal["when_asked", "initial"]

_CHOICES = {
    "sdpo_targets": get_args(Targets),
    "teacher": get_args(Teacher),
    "clip_mode": get_args(ClipMode),
    "support": get_args(Support),
    "sdpo_form": get_args(Form),
    "dpo_reference": get_args(Reference),
    "dpo_loss": get_args(LossType),
}


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """Options of the channels of `ThreeChannelGRPOTrainer`.

    Attributes:
        max_sites: Error sites to distil in one rollout; the first ones are used.
        sdpo_targets: Tokens of a failing turn that channel 2 compares: ``turn``, all of them; or ``calls``, those of
            its tool calls, without reasoning and prose. The token mean is then over fewer tokens, and a turn without a
            call has no site (``sdpo/no_targets``). ``calls`` needs a tokenizer with a ``response_template``.
        hint_keys: Hint template keys to distil, as shell patterns (``fs.*``) of which one has to match. A pattern that
            begins with ``!`` excludes keys (``!tool.malformed``). None distils all.
        max_site_share: Largest share of a batch's target tokens, by weight, that one site may have, in (0, 1]. It is
            never below an equal share.
        max_key_share: Largest share of a batch's target tokens, by weight, that all sites of one key may have together,
            in (0, 1]. It is never below an equal share.
        divergence_guard: A site whose divergence per token exceeds this many medians of the sites before it is counted
            (``sdpo/outliers``) and left out, > 1. None leaves none out.
        lower_dose: Halve channel 2's weight each time the log shows a sign of harm (`errata_trainer.monitoring.watch`).
            Without it there is only a warning.
        max_teacher_length: Maximum number of tokens of the teacher's row; None is the model's maximum.
        teacher: The teacher's weights: ``live``, the student's current ones; ``ema``, a moving average of them, which
            costs a copy of the weights (under LoRA, of the adapter); ``base``, the model below the adapter (PEFT only);
            ``initial``, a copy of the student when training began, at the cost of ``ema``. The last two do not change,
            so a site is computed once if a batch is used several times (``num_iterations``).
        ema_rate: Share of the student in each update of the ``ema`` teacher, in (0, 1].
        temperature: Divides the logits of both sides in channel 2.
        clip_mode: Quantity that ``token_clip`` bounds: each summand over the vocabulary (``entry``), or a token's sum
            (``token``).
        top_k: Compare only the ``top_k`` most likely ids; None compares the whole vocabulary.
        support: Side whose ``top_k`` most likely ids are compared: ``teacher`` or ``student``.
        tail: Whether the remaining probability, with ``top_k``, counts as one more id; otherwise the compared ids are
            renormalised. SDPO uses ``support="student", tail=True``.
        sdpo_form: ``distribution``, a divergence of whole distributions; or ``sampled``, SDPO's sampled-token loss,
            ``(log S - log T).detach() * log S``. The gradient of the latter is, in expectation, that of KL(S || T); its
            value is not a divergence, and ``jsd_beta``, ``token_clip`` and ``top_k`` do not apply.
        is_clip: Upper bound of a token's importance weight, > 0: its current probability divided by the one when it was
            sampled (SDPO: 2.0). The weight is 1 as long as the policy has not changed. None uses no weights.
        pairs_per_batch: Maximum number of pairs for each generation batch and process. Each costs two rows forward and
            backward.
        dpo_reference: The frozen reference if there is neither TRL's reference model (``beta`` of `GRPOConfig` not 0)
            nor an adapter to disable: ``when_asked``, the policy when a pair was made, which costs no memory and has an
            effect only when a pair is drawn again later (its loss is ln 2 before); or ``initial``, a copy of the policy
            when training began.
        dpo_loss: ``sigmoid``, or ``sigmoid_norm``, which normalises by the actions' lengths.
        dpo_nll: Weight of the chosen action's negative log-likelihood per token, added to DPO's loss (RPO), >= 0. The
            reference's is subtracted, so the loss is DPO's while the policy equals its reference. DPO alone allows both
            actions to become unlikely. None uses the pair source's ``nll``: 1.0 for `TeacherPairs`, 0 for a source
            without it.
        prm_weight: Weight of the teachers' margin at a state (-1 to 1) that is added to the advantages of the turn's
            tokens (`errata_trainer.channels.prm`), >= 0. It needs the votes on the batch itself,
            ``pairs=TeacherPairs(wait_s=...)``, and acts whether or not ``beta_replay`` is 0.
        progress: Print one line for each logged step (`errata_trainer.monitoring.progress`) instead of transformers'
            dictionary of metrics. All metrics are in the log in either case.
        gradient_norms: Log the gradient norm of each channel, at the cost of a backward pass for each.
    """

    max_sites: int = 4
    sdpo_targets: Targets = "turn"
    hint_keys: tuple[str, ...] | None = None
    max_site_share: float = 1.0
    max_key_share: float = 1.0
    divergence_guard: float | None = 10.0
    lower_dose: bool = False
    max_teacher_length: int | None = None
    teacher: Teacher = "ema"
    ema_rate: float = 0.05
    temperature: float = 1.0
    clip_mode: ClipMode = "entry"
    top_k: int | None = None
    support: Support = "teacher"
    tail: bool = False
    sdpo_form: Form = "distribution"
    is_clip: float | None = None
    pairs_per_batch: int = 4
    dpo_reference: Reference = "when_asked"
    dpo_loss: LossType = "sigmoid"
    dpo_nll: float | None = None
    prm_weight: float = 0.0
    progress: bool = True
    gradient_norms: bool = False

    def __post_init__(self) -> None:
        """Check what no other part of the trainer checks.

        Raises:
            ValueError: An option has a value that is not one of its choices, or is out of range.
        """
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} is {value!r}: use {' or '.join(map(repr, choices))}")
        if not 0.0 < self.ema_rate <= 1.0:
            raise ValueError(f"ema_rate is {self.ema_rate}: the student's share in each update is in (0, 1]")
        for name in ("max_sites", "pairs_per_batch"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} is {value}: at least 0")
        not_negative("prm_weight", self.prm_weight)
