"""The processes of VeRL's actor with channels 2 and 3 in their loss.

`ErrataActorWorker` takes the place of VeRL's class, and is no different from it before `begin_channels` is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_id, get_device_name
from verl.utils.model import get_hf_auto_model_class
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from ...assembly.channel_set import ChannelSet, channels_for, reference_name
from ...assembly.pair_source import PairSource, Referred
from ...launch import process
from ...monitoring.metrics import Metrics, Taken
from ...rollouts.rollout import DpoPair
from .columns import pairs_of, text_of
from .loss import EngineLoss
from .options import LossOptions


class PairsElsewhere(PairSource):
    """Stands for the source of pairs, which is in another process.

    Args:
        nll: Weight of the chosen action's negative log-likelihood that the source wants.
    """

    def __init__(self, nll: float) -> None:
        self.nll = nll

    def sample(self, count: int, referred: Referred) -> list[DpoPair]:
        """Raise RuntimeError: pairs come in the batch.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("the source of pairs is in another process")


class ErrataTrainingWorker(TrainingWorker):  # type: ignore[misc]
    """VeRL's training worker, whose loss may have channels 2 and 3."""

    _channels: ChannelSet | None = None
    _loss: EngineLoss | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def begin_channels(self, options: LossOptions, checkpoint: str | None = None) -> None:
        """Make the channels and put them into the loss. All ranks have to call it, after the weights are loaded.

        Without a weight of channel 2 and a source of pairs the loss stays VeRL's.

        Args:
            options: Options of the losses.
            checkpoint: Directory that training goes on from; None at the beginning.

        Raises:
            ValueError: A setting of the engine or of the model with which the channels cannot be computed.
        """
        if self._loss is not None:
            self._loss.detach()
        self._loss = self._channels = None
        self._channel_metrics = Metrics()
        if not options.distils and not options.has_pairs:
            return
        refuse_engine(self.engine_config, self.model_config, options)
        engine = self.engine
        with engine.eval_mode():  # loads weights that were offloaded
            channels = channels_for(
                options.settings,
                student=engine.module,
                alpha_sdpo=float(options.distils),
                beta_replay=float(options.has_pairs),
                beta_dpo=options.beta_dpo,
                jsd_beta=options.jsd_beta,
                token_clip=options.token_clip,
                pairs=PairsElsewhere(options.nll) if options.has_pairs else None,
                sampling_temperature=options.sampling_temperature,
                precision=self._precision,
                copied=self._loaded_again,
            )
            channels.begin(
                engine.module, torch.device(get_device_id()), None if checkpoint is None else Path(checkpoint)
            )
        self._channels = channels
        self._loss = EngineLoss(engine, channels, self._channel_metrics, pad_id=self._pad_id())
        self._loss.attach()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def channel_reference(self) -> str:
        """Return the name of the frozen reference of channel 3, by which stored pairs of another one are refused."""
        module = self.engine.module
        whose, _, _ = self._begun.reference(module)
        return reference_name(whose, module.config, self.model_config.tokenizer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def refer_channels(self, pairs_text: str) -> str:
        """Return pairs with the reference's log-probabilities. All ranks have to call it, with the same pairs.

        Args:
            pairs_text: The pairs, as `columns.text_of` writes them.
        """
        name = self.channel_reference()
        with self.engine.eval_mode(), self._precision():
            return text_of(self._begun.referred(pairs_of(pairs_text), name, self.engine.module))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def save_channels(self, path: str) -> None:
        """Save the state of the channels, if there are any. All ranks have to call it.

        Args:
            path: Directory of the checkpoint; it is made if it is not there.
        """
        if self._channels is not None:
            Path(path).mkdir(parents=True, exist_ok=True)
            self._channels.save(Path(path), weights=process() == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def take_channel_metrics(self) -> Taken:
        """Return what this rank recorded since the last call, for `metrics.combined`; nothing without channels."""
        if self._channels is None:
            return {}
        self._channels.distillation.update_guard()
        return self._channel_metrics.take()

    @property
    def _begun(self) -> ChannelSet:
        if self._channels is None:
            raise RuntimeError("there are no channels here: call begin_channels, with a weight or a source of pairs")
        return self._channels

    def _precision(self) -> AbstractContextManager[Any]:
        """Return the context in which the engine calls its model."""
        dtype = self.engine._autocast_dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(get_device_name(), dtype=dtype)

    def _loaded_again(self, _student: Any) -> Any:
        """Return the model as it was loaded, whole and on the CPU: one in shards cannot be copied."""
        config = self.model_config
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype or "fp32")
        loaded = get_hf_auto_model_class(hf_config=config.hf_config).from_pretrained(
            config.local_path, dtype=dtype, config=config.hf_config, trust_remote_code=config.trust_remote_code
        )
        return loaded.to(dtype)  # some weights may have been left in another

    def _pad_id(self) -> int:
        """Return a token to pad with; the mask leaves it out, so any will do."""
        found = getattr(self.model_config.tokenizer, "pad_token_id", None)
        return 0 if found is None else int(found)


class ErrataActorWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """VeRL's worker of actor and rollout, whose actor may have channels 2 and 3 in its loss.

    Its methods are those of `ErrataTrainingWorker`, and are called on all ranks.
    """

    actor_worker_cls = ErrataTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def begin_channels(self, options: LossOptions, checkpoint: str | None = None) -> None:
        """Make the channels and put them into the actor's loss; see `ErrataTrainingWorker.begin_channels`.

        Raises:
            ValueError: A setting with which the channels cannot be computed.
        """
        if (options.distils or options.has_pairs) and self.distillation_enabled:
            raise ValueError("distillation.enabled has another loss in the place of the channels': switch it off")
        self.actor.begin_channels(options, checkpoint)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def channel_reference(self) -> str:
        """Return the name of the frozen reference; see `ErrataTrainingWorker.channel_reference`."""
        name: str = self.actor.channel_reference()
        return name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def refer_channels(self, pairs_text: str) -> str:
        """Return pairs with the reference's log-probabilities; see `ErrataTrainingWorker.refer_channels`."""
        text: str = self.actor.refer_channels(pairs_text)
        return text

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def save_channels(self, path: str) -> None:
        """Save the state of the channels; see `ErrataTrainingWorker.save_channels`."""
        self.actor.save_channels(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def take_channel_metrics(self) -> Taken:
        """Return what this rank recorded; see `ErrataTrainingWorker.take_channel_metrics`."""
        taken: Taken = self.actor.take_channel_metrics()
        return taken


class ErrataDetachActorWorker(ErrataActorWorker, DetachActorWorker):  # type: ignore[misc]
    """`ErrataActorWorker` for VeRL's ``separate_async``, which keeps weights of earlier steps on the host."""


def refuse_engine(engine: Any, model: Any, options: LossOptions) -> None:
    """Raise ValueError if the channels cannot be computed in the loss of an engine.

    Args:
        engine: VeRL's configuration of the engine.
        model: VeRL's configuration of the model.
        options: Options of the losses.

    Raises:
        ValueError: A setting does not go with the channels; the text names it.
    """
    for why in _refusals(engine, model, options):
        raise ValueError(f"{why}, or use errata.channels.form=estimator")


def _refusals(engine: Any, model: Any, options: LossOptions) -> Iterator[str]:
    """Yield what stands against the channels' loss."""
    settings = options.settings
    if engine.strategy != "fsdp2":  # others lack some of the fields below
        yield f"actor.strategy is {engine.strategy!r}: the channels' loss needs the model's own weights, use fsdp2"
    if engine.ulysses_sequence_parallel_size > 1:
        yield "actor.ulysses_sequence_parallel_size above 1 cuts rows between ranks: use 1"
    if engine.use_fused_kernels or model.use_fused_kernels:
        yield "model.use_fused_kernels has not been tried with the channels' loss: switch it off"
    if engine.offload_policy:
        yield "actor.fsdp_config.offload_policy keeps weights on the host while they are used: use param_offload"
    if model.enable_activation_offload:
        yield "model.enable_activation_offload takes one forward pass for each backward pass: switch it off"
    if model.lora_rank > 0 and options.distils and settings.teacher in ("ema", "initial"):
        yield (
            f"settings.teacher={settings.teacher!r} adds an adapter, which a model in shards (model.lora_rank) cannot "
            "take: use 'live' or 'base'"
        )
    if settings.gradient_norms:
        yield "settings.gradient_norms needs gradients of whole weights, and shards have none: switch it off"
