"""Finds a causal language model's backbone and output embedding inside wrappers.

Models are used by their interface, not their class: wrappers (``.module``, ``_orig_mod``, PEFT's ``get_base_model``)
are removed, and the output embedding is what ``get_output_embeddings()`` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class OutputHead:
    """How a model computes logits from hidden states: ``transform(hidden @ weight.T + bias)``.

    Attributes:
        weight: ``[V, H]`` weight; with a LoRA adapter on it the merged weight, whose gradient reaches the adapter's
            factors.
        bias: ``[V]`` bias, or None.
        transform: Scale and soft cap of the model's configuration; None if it has neither.
    """

    weight: Tensor
    bias: Tensor | None = None
    transform: Transform | None = None


@dataclass(frozen=True, slots=True)
class ScaledSoftcap:
    """Scale and soft cap of logits: ``softcap * tanh(scale * logits / softcap)``, or ``scale * logits`` without a
    cap."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the transformed logits.

        Args:
            logits: ``[..., V]`` logits.

        Returns:
            ``[..., V]``.
        """
        logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def unwrapped(model: Any) -> Any:
    """Return the causal language model inside wrappers (compiled, data-parallel, PEFT).

    Args:
        model: A causal language model, wrapped or not.

    Returns:
        The innermost model that still makes logits.
    """
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(getattr(model, "module", None), nn.Module):
            model = model.module
        elif callable(getattr(model, "get_base_model", None)):
            model = model.get_base_model()
        else:
            return model


def backbone(model: Any) -> Any:
    """Return the module that outputs the last hidden states, the input of the output embedding.

    Args:
        model: A causal language model, wrapped or not.

    Returns:
        The module.

    Raises:
        ValueError: The model does not say which one it is (``base_model``).
    """
    inner = unwrapped(model)
    found = getattr(inner, "base_model", None)
    if not isinstance(found, nn.Module) or found is inner:
        raise ValueError(
            f"{type(inner).__name__} has no base_model apart from itself: its hidden states cannot be found"
        )
    return found


def output_head(model: Any) -> OutputHead:
    """Return the output embedding as it is now; disabled adapters are not merged.

    Args:
        model: A causal language model, wrapped or not. Under ZeRO-3 its head has to be gathered first, and stay so
            until after the backward pass.

    Returns:
        The head. Dropout of an adapter on it is left out.

    Raises:
        ValueError: A head that is no plain or LoRA linear layer, or whose weight is not there.
    """
    inner = unwrapped(model)
    head = inner.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise ValueError(f"{type(inner).__name__} has no output embedding with a weight")
    weight, bias = _whole(head.weight), _whole(getattr(head, "bias", None))
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"the output embedding's weight is {tuple(weight.shape)}: gather it first (ZeRO-3)")
    if not weight.is_floating_point():
        raise ValueError(
            f"the output embedding's weight is {weight.dtype}: a quantised head cannot be projected through"
        )
    if hasattr(head, "base_layer"):  # PEFT's
        weight = _with_adapters(head, weight)
    return OutputHead(weight, bias, logit_transform(inner.config))


def logit_transform(config: Any) -> Transform | None:
    """Return the transform that a model with this configuration applies to its logits.

    Args:
        config: Model configuration. These fields are read: ``final_logit_softcapping`` (Gemma), ``logit_scale``
            (Cohere), ``output_multiplier``, ``lm_head_multiplier`` (Falcon-H1) and ``logits_scaling`` (Granite divides
            by it, HyperCLOVA X multiplies).

    Returns:
        The function, or None.

    Raises:
        ValueError: A scale that is no number.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale: Any = None
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale = getattr(config, name, None) if scale is None else scale
    divisor = getattr(config, "logits_scaling", None)
    if scale is None and divisor is not None:
        scale = divisor if getattr(config, "model_type", None) == "hyperclovax" else 1.0 / divisor
    softcap = getattr(config, "final_logit_softcapping", None)
    if scale is not None and not isinstance(scale, int | float):
        raise ValueError(f"the configuration's logit scale is {scale!r}, no number: pass a transform of your own")
    if scale in (None, 1.0) and softcap is None:
        return None
    return ScaledSoftcap(1.0 if scale is None else float(scale), softcap)


def _whole(tensor: Any) -> Any:
    """Return a parameter; a sharded one (DTensor) is gathered, which all ranks have to do together.

    The gradient goes back to the shards as the mean over ranks, as FSDP brings back that of its own passes.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import Partial

    whole = tensor.full_tensor(grad_placements=[Partial()] * tensor.device_mesh.ndim)
    if whole.requires_grad:
        ranks = tensor.device_mesh.size()
        whole.register_hook(lambda gradient: gradient / ranks)
    return whole


def _with_adapters(head: Any, weight: Tensor) -> Tensor:
    if not hasattr(head, "lora_A"):
        raise ValueError(f"the output embedding has an adapter that is no LoRA: {type(head).__name__}")
    if head.merged and head.disable_adapters:
        raise ValueError("the output embedding's adapters are merged into it and disabled: unmerge them first")
    if head.merged or head.disable_adapters:
        return weight
    for adapter in head.active_adapters:
        if adapter in head.lora_A:
            _check_plain_lora(head, adapter)
            weight = weight + head.get_delta_weight(adapter).to(weight.dtype)
    return weight


def _check_plain_lora(head: Any, adapter: str) -> None:
    if getattr(head, "use_dora", {}).get(adapter) or adapter in getattr(head, "lora_variant", {}):
        raise ValueError(f"adapter {adapter!r} on the output embedding is a variant of LoRA: its weight is no sum")
    if getattr(head.lora_B[adapter], "bias", None) is not None:
        raise ValueError(f"adapter {adapter!r} on the output embedding has a bias of its own")
