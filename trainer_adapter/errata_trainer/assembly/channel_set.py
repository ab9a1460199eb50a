"""Makes channels 2 and 3 of their settings, for any trainer: `channels_for` where the losses are computed, `driver_for`
where episodes are played. They may be different processes.

    channels = channels_for(settings, student=model, pairs=pairs)
    driver = driver_for(settings, tokenizer=tokenizer, tools=schemas, pairs=pairs, reference=channels.reference(...))
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ..channels.forward import longest_row, switch_off_dropout
from ..channels.guard import DivergenceGuard
from ..channels.schedules import Weight
from ..channels.sdpo import Divergence
from ..hints import Hinter, HintRenderer, TemplateHinter
from ..monitoring.metrics import Metrics
from ..monitoring.watch import Watch
from ..rollouts.rollout import DpoPair
from ..rollouts.transcript import tool_call_opening
from ..settings import ChannelSettings
from .action_tokens import ActionTokens
from .checkpoints import ChannelState
from .counterfactual import CounterfactualCheck
from .distillation import Distillation
from .driver import ChannelDriver
from .pair_source import PairSource
from .preferences import Preferences
from .sites import Sites
from .teacher_weights import Copied, TeacherWeights, frozen, frozen_copy, has_adapter, teacher_of

log = logging.getLogger("errata.trainer")

Precision = Callable[[], AbstractContextManager[Any]]
"""Returns a context in which a model runs in the trainer's precision, e.g. ``accelerator.autocast``."""


class ChannelSet:
    """Channels 2 and 3 of a training run: their losses, the models beside the student, and what is saved.

    `channels_for` makes it. A recipe calls `begin` once, `update` after each optimizer step and `save` with each
    checkpoint.

    Args:
        distillation: Loss of channel 2.
        preferences: Loss of channel 3.
        watch: Watch over the logged metrics of channel 2.
        teacher: Teacher with weights of its own; None if the student teaches itself.
        initial: Copy of the student as it was, the reference of channel 3; None for another reference.
        parts: Parts whose state is saved, by name.
        precision: Context in which `initial` runs: a copy of the student has no hooks of the trainer's.
    """

    def __init__(
        self,
        *,
        distillation: Distillation,
        preferences: Preferences,
        watch: Watch,
        teacher: TeacherWeights | None,
        initial: Any | None,
        parts: Mapping[str, object],
        precision: Precision,
    ) -> None:
        self.distillation, self.preferences, self.watch = distillation, preferences, watch
        self.teacher, self.initial = teacher, initial
        self.state = ChannelState(parts)
        self._precision = precision

    def begin(self, student: Any, device: torch.device, checkpoint: Path | None = None) -> None:
        """Begin training, or go on from a checkpoint.

        Args:
            student: The student, unwrapped.
            device: Device of the student.
            checkpoint: Directory of the checkpoint; None at the beginning.
        """
        if self.teacher is not None:
            self.teacher.begin(student, device, checkpoint)
        if self.initial is not None:
            self.initial.to(device)  # the student may have been moved since it was copied (DeepSpeed)
        if checkpoint is not None:
            self.state.restore(checkpoint)

    def update(self, student: Any) -> None:
        """Have the teacher follow the student, unwrapped, by one optimizer step."""
        if self.teacher is not None:
            self.teacher.update(student)

    def save(self, checkpoint: Path, *, weights: bool = True) -> None:
        """Save the state in a checkpoint's directory.

        Args:
            checkpoint: Directory of the checkpoint.
            weights: Whether this process writes the teacher's weights, which are the same in all.
        """
        if self.teacher is not None and weights and checkpoint.is_dir():
            self.teacher.save(checkpoint)
        self.distillation.update_guard()
        self.state.save(checkpoint)

    def reference(self, student: Any, separate: Any | None = None) -> tuple[str, Any, bool]:
        """Return the reference of channel 3: its name, the model, and whether to switch off the adapter for it.

        Args:
            student: The student, unwrapped.
            separate: Reference model of the trainer; None if it has none.
        """
        if separate is not None:
            return "reference model", separate, False
        if has_adapter(student):
            return "base below the adapter", student, True
        if self.initial is not None:
            return "initial policy", self.initial, False
        return "policy when asked", student, False

    def referred(self, pairs: Sequence[DpoPair], name: str, student: Any, separate: Any | None = None) -> list[DpoPair]:
        """Return pairs with the reference's log-probabilities filled in.

        Args:
            pairs: New pairs.
            name: Name of the reference that the pairs keep; see `reference_name`.
            student: The student, unwrapped.
            separate: Reference model of the trainer; None if it has none.
        """
        _, frozen, adapter = self.reference(student, separate)
        with self._precision() if frozen is self.initial else nullcontext():
            return self.preferences.referred(frozen, pairs, name, adapter=adapter)


def channels_for(
    settings: ChannelSettings | None = None,
    *,
    student: Any,
    alpha_sdpo: Weight = 0.1,
    beta_replay: Weight = 0.05,
    beta_dpo: float = 0.1,
    jsd_beta: float = 0.5,
    token_clip: float | None = 10.0,
    pairs: PairSource | None = None,
    check: CounterfactualCheck | None = None,
    hinter: Hinter | None = None,
    has_reference: bool = False,
    sampling_temperature: float = 1.0,
    keep: bool = False,
    precision: Precision = nullcontext,
    head_precision: Precision = nullcontext,
    copied: Copied = frozen_copy,
) -> ChannelSet:
    """Return channels 2 and 3 as the settings say.

    If channel 2 has a weight, dropout is switched off in the student, with a warning.

    Args:
        settings: Options of the channels; default: `ChannelSettings()`.
        student: The student, a transformers model, unwrapped.
        alpha_sdpo: Weight of channel 2; with 0 no teacher is kept.
        beta_replay: Weight of channel 3.
        beta_dpo: DPO's beta: how strongly channel 3 keeps the policy near its reference.
        jsd_beta: Weight of the teacher in the generalized JSD: 0 is KL(teacher || student), 1 KL(student || teacher).
        token_clip: Upper bound of a token's divergence in channel 2; None for none.
        pairs: Source of channel 3's pairs; None for no channel 3.
        check: Check whether hints help, whose state is saved; None for none.
        hinter: Writer of the hints, whose state is saved; None for templates.
        has_reference: Whether the trainer has a reference model of its own, so that the student need not be copied.
        sampling_temperature: Temperature at which the batch's log-probabilities were taken.
        keep: Whether a batch is used several times, so that a fixed teacher's states are kept for it.
        precision: Context in which models beside the student run.
        head_precision: Context for products with the output embedding.
        copied: Way to copy the student for the teachers ``ema`` and ``initial`` and for the reference ``initial``. One
            that is in shards (`fully_shard`) cannot be copied: then give a function that takes it and returns the model
            loaded again, whole and on the CPU or the student's device. The reference has the weights that it loads.

    Raises:
        ValueError: A setting does not fit the model or the pair source, or the student cannot be copied so.
    """
    settings = settings or ChannelSettings()
    if alpha_sdpo != 0 and (noisy := switch_off_dropout(student)):
        log.warning(
            "dropout is switched off in the student (%s and %d other modules): channel 2 compares it with itself, "
            "and would distil the noise",
            noisy[0],
            len(noisy) - 1,
        )
    if settings.teacher == "base" and not has_adapter(student):
        raise ValueError("teacher='base' is the model below an adapter, and there is none: use 'live' or 'ema'")
    if settings.prm_weight:
        if pairs is None or pairs.margins is None:
            raise ValueError("prm_weight needs a pair source with the margins of votes: pairs=TeacherPairs(...)")
        if not pairs.waits:
            raise ValueError("prm_weight needs votes on the batch itself: give TeacherPairs wait_s= (seconds)")
    guard = settings.divergence_guard
    distillation = Distillation(
        Divergence(
            jsd_beta,
            settings.temperature,
            token_clip,
            clip_mode=settings.clip_mode,
            top_k=settings.top_k,
            support=settings.support,
            tail=settings.tail,
        ),
        settings.teacher,
        None if guard is None else DivergenceGuard(guard),
        form=settings.sdpo_form,
        is_clip=settings.is_clip,
        sampling_temperature=sampling_temperature,
        keep=keep,
        head_precision=head_precision,
    )
    teacher = None
    if settings.teacher in ("ema", "initial") and alpha_sdpo != 0:  # a weight of zero has no teacher to keep
        teacher = teacher_of(student, settings.ema_rate if settings.teacher == "ema" else 0.0, precision, copied=copied)
        distillation.separate_teacher = teacher
    nll = settings.dpo_nll if settings.dpo_nll is not None else pairs.nll if pairs is not None else 0.0
    preferences = Preferences(beta_dpo, settings.dpo_loss, nll, head_precision=head_precision)
    has_initial = needs_initial(settings, pairs, student, has_reference=has_reference)
    watch = Watch(lower_dose=settings.lower_dose)
    parts = {"guard": distillation.guard, "watch": watch, "check": check, "pairs": pairs, "hinter": hinter}
    return ChannelSet(
        distillation=distillation,
        preferences=preferences,
        watch=watch,
        teacher=teacher,
        initial=frozen(student, copied) if has_initial else None,
        parts=parts,
        precision=precision,
    )


def needs_initial(
    settings: ChannelSettings, pairs: PairSource | None, student: Any, *, has_reference: bool = False
) -> bool:
    """Return whether `channels_for` copies the student as the reference of channel 3."""
    anchored = has_reference or has_adapter(student)
    return pairs is not None and settings.dpo_reference == "initial" and not anchored


def driver_for(
    settings: ChannelSettings | None = None,
    *,
    tokenizer: Any,
    end_ids: Sequence[int] = (),
    pad_ids: Collection[int | None] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    model_config: Any | None = None,
    distilling: bool = True,
    hinter: Hinter | None = None,
    check: CounterfactualCheck | None = None,
    pairs: PairSource | None = None,
    reference: str = "",
    has_logprobs: bool = False,
    metrics: Metrics | None = None,
    **template: Any,
) -> ChannelDriver:
    """Return the driver of channels 2 and 3 as the settings say. No tensors and no model are needed.

    Args:
        settings: Options of the channels; default: `ChannelSettings()`.
        tokenizer: Tokenizer of the student.
        end_ids: Tokens that end a turn.
        pad_ids: More tokens that may follow a turn, e.g. the pad token.
        tools: Descriptions of the student's tools, JSON Schema, as the chat template takes them.
        model_config: Configuration of the student, whose longest row bounds the teacher's where
            ``max_teacher_length`` is None; None for no bound.
        distilling: Whether channel 2 has a weight; if not, options that only it needs are not checked.
        hinter: Writer of the hints of channel 2; default: the templates of this package.
        check: Check in the environment whether hints help; default: off.
        pairs: Source of channel 3's pairs; None for no channel 3. Its ``use`` is called.
        reference: Name of the reference, by which stored pairs of another one are refused; see `reference_name`.
        has_logprobs: Whether rollouts have the log-probabilities of sampled tokens.
        metrics: Metrics in which counts are recorded; default: new ones.
        **template: Arguments of the student's ``apply_chat_template``.

    Raises:
        ValueError: A setting does not fit the tokenizer, or the pair source needs log-probabilities.
    """
    settings = settings or ChannelSettings()
    if pairs is not None:
        if pairs.needs_logprobs and not has_logprobs:
            raise ValueError(
                "the source of pairs needs log-probabilities of sampled tokens, and this trainer's rollouts have none: "
                "choose another policy, or give TeacherPairs scores="
            )
        pairs.use(tokenizer, end_ids, reference, **template)
    name = tools[0]["function"]["name"] if tools else None
    renderer = HintRenderer(tokenizer, **({"tool_name": name} if name else {}), **template)
    longest = longest_row(model_config) if model_config is not None else None
    sites = Sites(
        hinter or TemplateHinter(count=renderer.count),
        renderer,
        settings.max_sites,
        settings.max_teacher_length or longest,
        check or CounterfactualCheck(),
        settings.hint_keys,
        settings.max_site_share,
        settings.max_key_share,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        targets=_targets(settings, tokenizer, end_ids, template) if distilling else None,
    )
    return ChannelDriver(
        sites=sites,
        pairs=pairs,
        tools=tools,
        opening=tool_call_opening(tokenizer),
        end_ids=[*end_ids, *(one for one in pad_ids if one is not None)],
        metrics=metrics,
    )


def reference_name(whose: str, config: Any, tokenizer: Any) -> str:
    """Return the name of a reference (weights and tokenizer), by which a buffer refuses pairs of another one.

    Args:
        whose: Name of the reference among the run's models; see `ChannelSet.reference`.
        config: Configuration of the student.
        tokenizer: Tokenizer of the student.
    """
    name = getattr(config, "_name_or_path", "") or type(config).__name__
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return f"{whose} of {name}, tokenizer {hashlib.sha256(vocabulary).hexdigest()[:12]}"


def _targets(
    settings: ChannelSettings, tokenizer: Any, end_ids: Sequence[int], template: Mapping[str, Any]
) -> Callable[[Sequence[int]], Sequence[range]] | None:
    """Return the function that selects the tokens of a turn that channel 2 compares; None compares whole turns."""
    if settings.sdpo_targets == "turn":
        return None
    tokens = ActionTokens(tokenizer, end_ids, **template)
    try:
        tokens.call_spans(())
    except ValueError as error:
        raise ValueError(f"sdpo_targets='calls' cannot be used: {error}; use 'turn'") from error
    return tokens.call_spans
