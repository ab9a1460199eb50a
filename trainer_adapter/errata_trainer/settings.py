"""What a team may set, beside the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .channels.dpo import LossType
from .channels.sdpo import ClipMode, Support


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """How the channels of `ThreeChannelGRPOTrainer` work.

    Attributes:
        max_sites: Error sites of one rollout that are distilled; the first ones.
        hint_keys: Which hint template keys are distilled: shell patterns (``fs.*``), of which a key has to match one;
            one that begins with ``!`` leaves keys out (``!tool.malformed``). None is all.
        max_site_share: What one site may weigh among a batch's target tokens, in (0, 1], but not below an equal share.
        max_key_share: What all sites of one key may weigh, likewise.
        divergence_guard: A site whose divergence per token is above so many medians of the sites before it is counted
            (``sdpo/outliers``) and not learnt from, > 1; None learns from all.
        lower_dose: Halve channel 2's weight each time when the log shows that it does harm (`errata_trainer.watch`);
            without it there is a warning only.
        max_teacher_length: Tokens of a teacher's row at most; None is as long as the model takes.
        teacher: Whose weights the teacher has: ``live``, the student's own of this moment; ``ema``, a moving average of
            them, which costs a copy of the weights, under LoRA of the adapter; ``base``, the model below the adapter
            (PEFT only); ``initial``, a copy of the student as training began, which costs as much as ``ema``. The last
            two stay as they are, and compute a site once where a batch is used several times (``num_iterations``).
        ema_rate: Share of the student in each step's move of the ``ema`` teacher, in (0, 1].
        temperature: Divides both logits in channel 2.
        clip_mode: What ``token_clip`` bounds: each summand (``entry``), or a token's sum (``token``).
        top_k: Compare the likeliest ids only; None for the whole vocabulary.
        support: Whose likeliest ids: ``teacher`` or ``student``.
        tail: With ``top_k``: what is left of both distributions is one more id, and nothing is renormalised. SDPO's
            own form is ``support="student", tail=True``.
        sdpo_form: ``distribution``, the divergence of whole distributions; or ``sampled``, SDPO's form of the sampled
            tokens alone: log S - log T, as a constant, times log S. Its gradient is, over samples, that of KL(S || T);
            its value is no divergence. ``jsd_beta``, ``token_clip`` and ``top_k`` have no part in it.
        is_clip: Upper bound of the importance weight of a token, > 0: its probability now by that when it was sampled
            (SDPO: 2.0). It is 1 where the policy has not moved since. None for no weights.
        pairs_per_batch: Pairs of one generation batch and process at most; each costs two rows forward and backward.
        dpo_reference: The frozen reference where there is neither TRL's reference model (``beta`` of `GRPOConfig`
            not 0) nor an adapter to switch off: ``when_asked``, the policy at the moment a pair is new, which costs
            no memory and anchors a pair only once it is drawn again later (its loss is ln 2 before); ``initial``, a
            copy of the policy as training began.
        dpo_loss: ``sigmoid``, or ``sigmoid_norm`` by the actions' lengths.
        dpo_nll: Weight of the chosen action's negative log-likelihood per token beside DPO's loss (RPO), >= 0, counted
            from the reference's, so that a policy that is its reference has DPO's loss. DPO alone accepts that both
            actions become unlikely, the rejected one faster. None is what the source of pairs has as ``nll``: 1.0 for
            `TeacherPairs`, 0 for a source without it.
        prm_weight: Channel 3's other form (`errata_trainer.channels.prm`), >= 0: this times the teachers' margin at a
            state, -1 to 1, is added to the advantages of the turn's tokens. It needs votes on the batch itself:
            ``TeacherPairs(wait_s=...)``.
        progress: Print one line for each logged step (`errata_trainer.progress`) in place of transformers' dictionary
            of all metrics, which the log has in any case.
        gradient_norms: Log the gradient norm of each channel: one more backward pass for each.
    """

    max_sites: int = 4
    hint_keys: tuple[str, ...] | None = None
    max_site_share: float = 1.0
    max_key_share: float = 1.0
    divergence_guard: float | None = 10.0
    lower_dose: bool = False
    max_teacher_length: int | None = None
    teacher: Literal["live", "ema", "base", "initial"] = "ema"
    ema_rate: float = 0.05
    temperature: float = 1.0
    clip_mode: ClipMode = "entry"
    top_k: int | None = None
    support: Support = "teacher"
    tail: bool = False
    sdpo_form: Literal["distribution", "sampled"] = "distribution"
    is_clip: float | None = None
    pairs_per_batch: int = 4
    dpo_reference: Literal["when_asked", "initial"] = "when_asked"
    dpo_loss: LossType = "sigmoid"
    dpo_nll: float | None = None
    prm_weight: float = 0.0
    progress: bool = True
    gradient_norms: bool = False
