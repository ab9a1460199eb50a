"""Cartridges as the files that Tokasaurus reads: a directory for each, with the tensors and their size.

A cartridge is the key-value cache of some virtual tokens, of which the first are frozen. In peft it is the adapter
CARTRIDGE, in a server the prefix of a prompt that was never computed. Tokasaurus takes 16 tokens a page, and reads a
cartridge once: a known id is not read again, whatever its files have become. So every version has an id of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from peft import CartridgeConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.cartridge.utils import initialize_kv_prefix_from_past_key_values
from torch import Tensor

PAGE = 16
"""Tokens of a page of Tokasaurus; a cartridge has whole pages."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_TENSORS, _CONFIG = "cartridge.pt", "config.yaml"
_ADAPTER = "default"


@dataclass(frozen=True, slots=True)
class Cartridge:
    """The keys and values of N virtual tokens in L layers.

    Attributes:
        keys: L tensors ``[1, H, N, D]``, H key-value heads of D numbers.
        values: L tensors ``[1, H, N, D]``.
        frozen: Number of first tokens that are not trained.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    frozen: int = 1

    @property
    def tokens(self) -> int:
        """Number of virtual tokens."""
        return int(self.keys[0].shape[2])


def cartridge_model(base: Any, document_ids: Sequence[int], *, tokens: int, frozen: int = 1) -> PeftModel:
    """Return a model with a cartridge, which begins as the cache of a document's first tokens.

    The base's weights are frozen, and the model is in evaluation mode: dropout would be a difference between the
    student and the teacher that does not come from the document.

    Args:
        base: Causal language model of transformers.
        document_ids: Tokens of the document, at least as many as the cartridge has.
        tokens: Number of virtual tokens, a multiple of 16.
        frozen: Number of first ones that are not trained, at least 1: models rest much of their attention on them.

    Raises:
        ValueError: A number is out of its range; the document is shorter than the cartridge; the model forgets what is
            behind a window shorter than the cartridge.
    """
    if tokens < PAGE or tokens % PAGE:
        raise ValueError(f"tokens is {tokens}: give a multiple of {PAGE}, whole pages of the server")
    if not 1 <= frozen < tokens:
        raise ValueError(f"frozen is {frozen}: give at least 1, and less than the {tokens} tokens")
    if len(document_ids) < tokens:
        raise ValueError(f"the document has {len(document_ids)} tokens, fewer than the {tokens} of the cartridge")
    window = sliding_window(base.config)
    if window is not None and window <= tokens:
        raise ValueError(f"the model has a sliding window of {window} tokens, and would forget a cartridge of {tokens}")
    first = torch.tensor([list(document_ids[:tokens])], device=base.device)
    with torch.no_grad():
        past = base.eval()(input_ids=first, use_cache=True).past_key_values
    config = CartridgeConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=tokens, num_frozen_tokens=frozen)
    model: PeftModel = get_peft_model(base, config).eval()
    initialize_kv_prefix_from_past_key_values(model, past_key_values=past, num_virtual_tokens=tokens)
    return model


def cartridge_of(model: PeftModel) -> Cartridge:
    """Return the cartridge of a model, as it is now.

    Args:
        model: Model with the adapter CARTRIDGE.
    """
    encoder = model.prompt_encoder[_ADAPTER]
    tokens, layers, heads = encoder.weight.shape[0], encoder.config.num_layers, _heads(model)
    cache = encoder.weight.detach().cpu().view(tokens, 2 * layers, heads, -1)
    rows = [cache[:, row].permute(1, 0, 2)[None].contiguous().clone() for row in range(2 * layers)]
    return Cartridge(tuple(rows[0::2]), tuple(rows[1::2]), encoder.num_frozen_tokens)


def load_cartridge(model: PeftModel, cartridge: Cartridge) -> None:
    """Put a cartridge into a model.

    Args:
        model: Model with the adapter CARTRIDGE.
        cartridge: Cartridge of the same shape.

    Raises:
        ValueError: It has another shape, or another number of frozen tokens.
    """
    own = cartridge_of(model)
    for name in ("keys", "values"):
        shapes = [[tuple(one.shape) for one in getattr(side, name)] for side in (own, cartridge)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"the cartridge's {name} are {shapes[1]}, the model's {shapes[0]}")
    if own.frozen != cartridge.frozen:
        raise ValueError(f"the cartridge has {cartridge.frozen} frozen tokens, the model {own.frozen}")
    rows = [one for pair in zip(cartridge.keys, cartridge.values, strict=True) for one in pair]
    flat = torch.stack([row[0].permute(1, 0, 2) for row in rows], 1).reshape(cartridge.tokens, -1)
    model.prompt_encoder[_ADAPTER].load_prompt_embeddings(flat.to(model.device))


def sliding_window(config: Any) -> int | None:
    """Return the number of last tokens that some layer of a model sees; None if all layers see all tokens.

    Args:
        config: The model's configuration.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    return window if getattr(text, "use_sliding_window", True) else None


def check_id(cartridge_id: str) -> str:
    """Return a cartridge's id.

    Raises:
        ValueError: It is not 1 to 100 letters, digits, hyphens and underscores, which Tokasaurus keeps as they are.
    """
    if not _ID.fullmatch(cartridge_id):
        raise ValueError(f"{cartridge_id!r:.120} is no id of a cartridge: up to 100 letters, digits, - and _")
    return cartridge_id


def write_cartridge(directory: Path, cartridge_id: str, cartridge: Cartridge, *, model_name: str = "") -> Path:
    """Write a cartridge, so that a server sees all of it or nothing.

    Args:
        directory: The server's directory of cartridges.
        cartridge_id: Id of the cartridge, which was never used before.
        cartridge: The cartridge.
        model_name: Name of the model that it is for.

    Returns:
        Directory of the cartridge.

    Raises:
        ValueError: The id is none, or the cartridge has no whole pages, or no frozen token.
        FileExistsError: There is a cartridge with this id. A server that has read it would not read this one.
    """
    place = Path(directory, check_id(cartridge_id))
    if cartridge.tokens % PAGE or cartridge.frozen < 1:
        raise ValueError(
            f"the cartridge has {cartridge.tokens} tokens, {cartridge.frozen} of them frozen: a server takes a "
            f"multiple of {PAGE}, and at least one frozen token"
        )
    if place.exists():
        raise FileExistsError(f"{place} is there: a server reads an id once, so give each version another")
    cut = cartridge.frozen
    tensors = {
        "trainable_keys": [one[:, :, cut:].contiguous() for one in cartridge.keys],
        "trainable_values": [one[:, :, cut:].contiguous() for one in cartridge.values],
        "fixed_keys": [one[:, :, :cut].contiguous() for one in cartridge.keys],
        "fixed_values": [one[:, :, :cut].contiguous() for one in cartridge.values],
    }
    config = {
        "kv_cache_initializer": {"max_tokens": cartridge.tokens},
        "model": {"pretrained_model_name_or_path": model_name},
    }
    new = Path(directory, f".{cartridge_id}.{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        torch.save(tensors, new / _TENSORS)
        (new / _CONFIG).write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        new.rename(place)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        if place.exists() and isinstance(error, OSError):
            raise FileExistsError(f"{place} is there: another process wrote it") from error
        raise
    return place


def read_cartridge(directory: Path, cartridge_id: str) -> Cartridge:
    """Return a cartridge of `write_cartridge`, or one that the cartridges project has saved.

    Args:
        directory: The server's directory of cartridges.
        cartridge_id: Id of the cartridge.

    Raises:
        ValueError: The id is none, or the file holds no cartridge.
        FileNotFoundError: There is none with this id.
    """
    path = Path(directory, check_id(cartridge_id), _TENSORS)
    known = [torch.nn.ParameterList, torch.nn.Parameter]
    try:
        with torch.serialization.safe_globals(known):
            tensors = torch.load(path, weights_only=True, map_location="cpu")
        sides = [
            tuple(
                torch.cat([fixed.detach(), trained.detach()], 2)
                for fixed, trained in zip(tensors[f"fixed_{name}"], tensors[f"trainable_{name}"], strict=True)
            )
            for name in ("keys", "values")
        ]
        return Cartridge(sides[0], sides[1], int(tensors["fixed_keys"][0].shape[2]))
    except (AttributeError, EOFError, LookupError, TypeError, ValueError, RuntimeError, UnpicklingError) as error:
        raise ValueError(f"{path} holds no cartridge: {type(error).__name__}: {error}") from error


def remove_cartridge(directory: Path, cartridge_id: str) -> None:
    """Remove a cartridge's files, if they are there. A server that has read them keeps what it read.

    Args:
        directory: The server's directory of cartridges.
        cartridge_id: Id of the cartridge.

    Raises:
        ValueError: The id is none.
    """
    shutil.rmtree(Path(directory, check_id(cartridge_id)), ignore_errors=True)


def _heads(model: PeftModel) -> int:
    config = model.get_base_model().config.get_text_config()
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
