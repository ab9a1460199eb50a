"""Hidden states at positions: of the student from the forward pass there is anyway, of a teacher, reference or pair by
as few forward passes as it takes.

Nothing here projects to the vocabulary; `distil` and `action_logprobs` do that for the positions alone.

The student's and the teacher's states are of the same weights, so any dropout would be a difference that is not the
hint's: the teacher's passes are made in evaluation mode, and `active_dropout` says what is left in the student's.

Every rank has to make the same number of forward passes through a wrapper that communicates (FSDP, ZeRO-3; DDP where a
gradient is wanted). Which ranks are idle is the recipe's to know; `idle_loss` is what they run. `frozen_states` and
`capture_hidden` are given the unwrapped model under DDP: its wrapper would synchronise buffers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .heads import backbone, unwrapped
from .splicing import common_prefix

Rows = Sequence[Sequence[int]]


class NothingCaptured(RuntimeError):
    """No forward pass of the model reached its backbone, or fewer rows of it than were asked for."""


class Captured:
    """Hidden states that `capture_hidden` took from the passes of its block."""

    def __init__(self, rows: Tensor, columns: Tensor) -> None:
        self._rows, self._columns = rows, columns
        self._parts: list[Tensor] = []
        self._places: list[Tensor] = []
        self._seen = 0

    def hidden(self) -> Tensor:
        """Return ``[N, H]``, in the order in which the positions were given; attached to the pass.

        Raises:
            NothingCaptured: See there.
        """
        last = int(self._rows.max()) if len(self._rows) else 0
        if self._seen <= last:
            raise NothingCaptured(
                f"{self._seen} rows passed through the model's backbone, row {last} was asked for: was another model "
                "run, or a compiled one, or was the gradient off?"
            )
        order = torch.cat(self._places).argsort()
        return torch.cat(self._parts)[order]

    def take(self, states: Tensor) -> None:
        """Keep the positions of the next rows.

        Args:
            states: ``[B, L, H]``.
        """
        rows = self._rows.to(states.device)
        places = ((rows >= self._seen) & (rows < self._seen + len(states))).nonzero()[:, 0]
        columns = self._columns.to(states.device)[places]
        self._parts.append(states[rows[places] - self._seen, columns])
        self._places.append(places)
        self._seen += len(states)


@contextmanager
def capture_hidden(model: Any, rows: Tensor, columns: Tensor) -> Iterator[Captured]:
    """Take hidden states from the forward passes of a block, without another pass.

    It works with gradient checkpointing (the backbone's output lies outside of what is run again), with PEFT, and with
    TRL's fused head, which calls the backbone and never the output embedding. It does not where the backbone is not
    called as a module: under ``torch.compile`` of a model that was compiled before, and pipeline parallelism; then
    `Captured.hidden` raises and `trained_states` makes a pass of its own.

    Passes without gradient are not looked at, unless the whole block has none. Several passes are taken for the parts
    of one batch, in order.

    Args:
        model: Of any kind.
        rows: ``[N]`` int64, of the batch.
        columns: ``[N]`` int64, in the padded rows. With prompts padded on the left to width W, position p of an
            unpadded ``prompt_ids + completion_ids`` is column ``W - len(prompt_ids) + p``.

    Yields:
        What has been captured, to be asked after the passes.
    """
    captured = Captured(rows, columns)
    graded = torch.is_grad_enabled()

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled() or not graded:
            captured.take(output[0])

    hook = backbone(model).register_forward_hook(keep)
    try:
        yield captured
    finally:
        hook.remove()


def frozen_states(model: Any, rows: Rows, positions: Rows, *, share: bool = True) -> Tensor:
    """Return hidden states without gradient or dropout, each token of a common beginning computed once.

    The rows are visited in the order of their tokens with one key-value cache, which is cut back to what the next row
    has in common with the last one: the least that any order can compute. So rows of one rollout share its history,
    rows of one group their prompt, the two actions of a pair their context.

    Args:
        model: What is called; it gets ``input_ids`` ``[1, L]``, one row at a time, without padding.
        rows: R token sequences.
        positions: R increasing lists of positions in them.
        share: Whether a cache may be used, where that is exact: `shares_prefixes`.

    Returns:
        ``[N, H]``, N the number of all positions, in the order of rows and positions.

    Raises:
        ValueError: Other than R lists, or a position outside of its row.
    """
    _check(rows, positions)
    found: dict[int, Tensor] = {}
    share = share and shares_prefixes(model)
    cache: Any = None
    done: Sequence[int] = ()
    with evaluating(model), torch.no_grad():
        for number in sorted(range(len(rows)), key=lambda n: tuple(rows[n])):
            wanted, row = positions[number], tuple(rows[number])
            if not wanted:
                continue
            # states are not in the cache: what is wanted is computed even if a row before had it
            kept = min(common_prefix(done, row), min(wanted)) if share else 0
            cache = _cut(cache, len(done) - kept) if kept else None
            states, cache = _states(model, row[kept:], cache, keep=share)
            found[number] = states[torch.tensor([p - kept for p in wanted], device=states.device)]
            done = row if cache is not None and cache.get_seq_length() == len(row) else ()
    if not found:
        return _nothing(model)
    return torch.cat([found[number] for number in sorted(found)])


def trained_states(model: Any, rows: Rows, positions: Rows, *, pad_id: int = 0) -> Tensor:
    """Return hidden states with gradient, by one pass over the rows, padded on the right.

    Args:
        model: What is called; it gets ``input_ids`` and ``attention_mask`` ``[R, L]``.
        rows: R token sequences; at least one.
        positions: R lists of positions in them.
        pad_id: A token that exists.

    Returns:
        ``[N, H]``, in the order of rows and positions; attached.

    Raises:
        ValueError: Other than R lists, a position outside of its row, or no rows.
    """
    _check(rows, positions)
    if not rows:
        raise ValueError("there are no rows: a channel with nothing to do makes no pass (`idle_loss` is one)")
    device = _device(model)
    width = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    where = [(number, p) for number, wanted in enumerate(positions) for p in wanted]
    at = torch.tensor(where, dtype=torch.int64, device=device).reshape(-1, 2)
    with capture_hidden(model, at[:, 0], at[:, 1]) as captured:
        model(input_ids=ids, attention_mask=mask, **_least_logits(model))
    return captured.hidden()


def idle_loss(model: Any, *, token_id: int = 0) -> Tensor:
    """Return zero, by a pass over one token: what a rank without work runs while others train.

    Args:
        model: What is called.
        token_id: A token that exists.

    Returns:
        0-d, attached to what made it; its gradients are zeros.
    """
    return trained_states(model, [[token_id]], [[0]]).float().sum() * 0.0


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model into evaluation mode for a block, and each module back into its own after it.

    Args:
        model: A module.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def active_dropout(model: Any) -> list[str]:
    """Return the modules in which dropout would act now. Where any does, a student differs from itself.

    Args:
        model: A module.

    Returns:
        Their names, in the model's order.
    """
    return [
        name
        for name, module in model.named_modules()
        if module.training
        and (
            (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0.0)
            or (isinstance(getattr(module, "attention_dropout", None), float) and module.attention_dropout > 0.0)
        )
    ]


def refuse_dropout(student: Any) -> None:
    """Refuse a student that differs from itself: channel 2 would distil the noise.

    Raises:
        ValueError: Dropout acts in a module while the student is trained.
    """
    mode = student.training
    student.train()
    try:
        noisy = active_dropout(student)
    finally:
        student.train(mode)
    if noisy:
        raise ValueError(
            f"channel 2 would distil dropout's noise ({noisy[0]} and {len(noisy) - 1} other modules): "
            "switch it off (TRL: disable_dropout=True in GRPOConfig, lora_dropout=0.0 in LoraConfig), or alpha_sdpo=0"
        )


def longest_row(config: Any) -> int | None:
    """Return how many positions a model has, a multimodal one's text model; None where its configuration has none."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def shares_prefixes(model: Any) -> bool:
    """Say whether a key-value cache of a beginning gives the states that a pass over the whole row would.

    Args:
        model: Of any kind.

    Returns:
        False where layers see a window or carry a state (a cache that was cut back would lack what fell out of it),
        where rotary embeddings depend on the length of the row, and with virtual tokens of PEFT, which are a cache
        themselves.
    """
    inner = unwrapped(model)
    config = getattr(inner, "config", None)
    if config is None or getattr(inner, "_is_stateful", False) or not _accepts(inner, "past_key_values"):
        return False
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(config, "layer_types", None)
    if layers is not None:
        windows = any(layer != "full_attention" for layer in layers)
    else:
        windows = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    return not windows and kind not in ("dynamic", "longrope") and not _has_virtual_tokens(model)


def _states(model: Any, row: Sequence[int], cache: Any, *, keep: bool) -> tuple[Tensor, Any]:
    """``[L, H]`` of a row that continues a cache, and the cache with it."""
    taken: list[Tensor] = []
    hook = backbone(model).register_forward_hook(lambda _module, _args, output: taken.append(output[0]))
    options: dict[str, Any] = {"use_cache": keep} if _accepts(unwrapped(model), "use_cache") else {}
    if cache is not None:
        options["past_key_values"] = cache
    try:
        output = model(input_ids=torch.tensor([list(row)], device=_device(model)), **options, **_least_logits(model))
    finally:
        hook.remove()
    if len(taken) != 1:
        raise NothingCaptured(f"one pass went through the model's backbone {len(taken)} times")
    cache = getattr(output, "past_key_values", None) if keep else None
    return taken[0][0], cache if hasattr(cache, "crop") else None


def _cut(cache: Any, tokens: int) -> Any:
    """The cache without its last tokens."""
    if tokens:
        cache.crop(-tokens)
    return cache


def _least_logits(model: Any) -> dict[str, int]:
    """Nobody reads the logits of these passes: one position's are the fewest that models make."""
    return {"logits_to_keep": 1} if _accepts(unwrapped(model), "logits_to_keep") else {}


def _accepts(inner: Any, name: str) -> bool:
    return name in inspect.signature(inner.forward).parameters


def _has_virtual_tokens(model: Any) -> bool:
    while model is not None:
        for config in (getattr(model, "peft_config", None) or {}).values():
            if getattr(config, "is_prompt_learning", False):
                return True
        model = getattr(model, "module", None)
    return False


def _device(model: Any) -> torch.device:
    return unwrapped(model).get_input_embeddings().weight.device


def _nothing(model: Any) -> Tensor:
    embedding = unwrapped(model).get_output_embeddings().weight
    return torch.zeros(0, embedding.shape[-1], dtype=embedding.dtype, device=embedding.device)


def _check(rows: Rows, positions: Rows) -> None:
    if len(rows) != len(positions):
        raise ValueError(f"{len(rows)} rows, {len(positions)} lists of positions")
    for number, (row, wanted) in enumerate(zip(rows, positions, strict=True)):
        if any(not 0 <= p < len(row) for p in wanted):
            raise ValueError(f"row {number} has {len(row)} tokens, positions asked for are {list(wanted)}")
