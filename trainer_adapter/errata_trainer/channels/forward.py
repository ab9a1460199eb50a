"""Hidden states at given positions: of the student from the trainer's own forward pass, of teachers, references and
pairs with few extra passes.

Nothing here projects to the vocabulary; `distil` and `action_logprobs` do that, at the given positions only.

Student and teacher may share weights, so dropout would be a difference that does not come from the hint. The teacher's
passes run in evaluation mode; `active_dropout` lists the dropout that is active in the student's.

If a model's forward passes communicate (`collective`: FSDP, ZeRO-3; DDP with gradients), all ranks have to make equally
many. `frozen_states` adds the missing passes itself, so all ranks have to call it, also without rows. For passes with
gradient, ranks without work call `idle_loss`. Under DDP pass the unwrapped model to `frozen_states` and
`capture_hidden`; the wrapper would synchronise buffers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .heads import backbone, unwrapped
from .splicing import common_prefix

Rows = Sequence[Sequence[int]]

BATCH_TOKENS = 2**14
"""Tokens of one pass of `frozen_states`, padding included; a row at least."""

PADDING = 1.25
"""Tokens of one pass of `frozen_states` for each token of its rows, at most."""

LEAST_TRUNK = 128
"""Tokens that a pass over a common beginning has to save."""


class NothingCaptured(RuntimeError):
    """The model's backbone was not called, or with fewer rows than were asked for."""


class Captured:
    """Hidden states captured by `capture_hidden`."""

    def __init__(self, rows: Tensor, columns: Tensor) -> None:
        self._rows, self._columns = rows.cpu(), columns.cpu()
        self._parts: list[Tensor] = []
        self._places: list[Tensor] = []
        self._seen = 0

    def hidden(self) -> Tensor:
        """Return the hidden states ``[N, H]``, in the order of the given positions, attached to the graph.

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
        return torch.cat(self._parts)[order.to(self._parts[0].device)]

    def take(self, states: Tensor) -> None:
        """Store the hidden states at the wanted positions of the next rows.

        Args:
            states: ``[B, L, H]`` last hidden states of the rows.
        """
        # On the host, where the positions come from: a device that is asked for them waits for its queue.
        places = ((self._rows >= self._seen) & (self._rows < self._seen + len(states))).nonzero()[:, 0]
        rows, columns = self._rows[places] - self._seen, self._columns[places]
        self._parts.append(states[rows.to(states.device), columns.to(states.device)])
        self._places.append(places)
        self._seen += len(states)


@contextmanager
def capture_hidden(model: Any, rows: Tensor, columns: Tensor) -> Iterator[Captured]:
    """Capture hidden states from the forward passes in a block, without an extra pass.

    It works with gradient checkpointing (the backbone's output lies outside of what is run again), with PEFT, and with
    TRL's fused head, which calls the backbone and never the output embedding. It does not where the backbone is not
    called as a module: under ``torch.compile`` of a model that was compiled before, and pipeline parallelism; then
    `Captured.hidden` raises and `trained_states` makes a pass of its own.

    Passes without gradient are not looked at, unless the whole block has none. Several passes are taken for the parts
    of one batch, in order.

    Args:
        model: A causal language model, wrapped or not.
        rows: ``[N]`` int64, index of each position's row in the batch.
        columns: ``[N]`` int64, index of each position in the padded row. With prompts padded on the left to width W,
            position p of an unpadded ``prompt_ids + completion_ids`` is column ``W - len(prompt_ids) + p``.

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


def frozen_states(
    model: Any, rows: Rows, positions: Rows, *, share: bool = True, batch_tokens: int = BATCH_TOKENS
) -> Tensor:
    """Return hidden states without gradient and dropout, in few passes that compute shared prefixes once.

    Rows that have most of their tokens in common, as the sites of one rollout and the two actions of a pair, follow
    each other: each continues the key-value cache of the one before, cut back to what both have in common. Such chains
    are computed side by side, padded on the right. What all rows of a pass begin with, as the rollouts of a group with
    their prompt, is computed once.

    Where passes of the model are collective (`collective`) every rank has to call this, without rows too: all make as
    many passes as the rank that needs most.

    Args:
        model: Model to call; under DDP, the unwrapped one.
        rows: R token sequences.
        positions: R increasing lists of positions in the rows.
        share: Whether a cache may be used, where that is exact: `shares_prefixes`.
        batch_tokens: Most tokens of one pass, padding included; a row is never cut. 0 forwards one row at a time.

    Returns:
        ``[N, H]``, N the number of all positions, in the order of rows and positions.

    Raises:
        ValueError: Other than R lists, or a position outside of its row.
    """
    _check(rows, positions)
    batches = _batches(rows, positions, share and shares_prefixes(model), batch_tokens)
    idle = _most_of_all_ranks(model, passes := sum(batch.passes for batch in batches)) - passes
    found: dict[int, Tensor] = {}
    with evaluating(model), torch.no_grad():
        for batch in batches:
            found |= _side_by_side(model, batch, rows, positions)
        for _ in range(idle):
            _states(model, [[0]], None, keep=False)
    if not found:
        return _nothing(model)
    return torch.cat([found[number] for number in sorted(found)])


def trained_states(model: Any, rows: Rows, positions: Rows, *, pad_id: int = 0) -> Tensor:
    """Return hidden states with gradient, from one forward pass over the rows, padded on the right.

    Args:
        model: Model to call, with ``input_ids`` and ``attention_mask`` ``[R, L]``.
        rows: R token sequences; at least one.
        positions: R lists of positions in the rows.
        pad_id: Token to pad with; any id of the vocabulary.

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
    at = torch.tensor(where, dtype=torch.int64).reshape(-1, 2)
    with capture_hidden(model, at[:, 0], at[:, 1]) as captured:
        output = model(input_ids=ids, attention_mask=mask, **_least_logits(model))
    states = captured.hidden()
    return _Tied.apply(states, output.logits) if in_shards(model) else states


class _Tied(torch.autograd.Function):  # type: ignore[misc]
    """Hidden states whose backward waits for the (zero) gradient of the pass's output.

    FSDP gathers the outermost weights, the last norm among them, when a gradient reaches the output of the pass. The
    states come from inside: without this their gradient would meet weights that are not there, over one rank too.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (output,) = ctx.saved_tensors
        return grad, torch.zeros_like(output)


def idle_loss(model: Any, *, token_id: int = 0) -> Tensor:
    """Return a zero loss from a forward pass over one token, for ranks without work while others train.

    Args:
        model: Model to call.
        token_id: Token of the pass; any id of the vocabulary.

    Returns:
        0-d, attached to what made it; its gradients are zeros.
    """
    return trained_states(model, [[token_id]], [[0]]).float().sum() * 0.0


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model into evaluation mode in a block and restore the mode of each module after it.

    Args:
        model: Module to put into evaluation mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def active_dropout(model: Any) -> list[str]:
    """Return the names of modules in which dropout is active now.

    Args:
        model: Module to search.

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
    """Raise ValueError if dropout is active in the student: channel 2 would distil its noise.

    Raises:
        ValueError: Dropout acts in a module while the student is trained.
    """
    noisy = _dropout_in_training(student)
    if noisy:
        raise ValueError(
            f"channel 2 would distil dropout's noise ({noisy[0]} and {len(noisy) - 1} other modules): "
            "switch it off (`switch_off_dropout`), or leave channel 2 out"
        )


def switch_off_dropout(student: Any) -> list[str]:
    """Set all dropout of a student to 0, and return the names of the modules in which it was active.

    Args:
        student: Module to change; its configuration stays as it is.
    """
    noisy = _dropout_in_training(student)
    for name in noisy:
        module = student.get_submodule(name)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        else:
            module.attention_dropout = 0.0
    return noisy


def _dropout_in_training(student: Any) -> list[str]:
    modes = [(module, module.training) for module in student.modules()]
    student.train()
    try:
        return active_dropout(student)
    finally:
        for module, mode in modes:
            module.training = mode


def longest_row(config: Any) -> int | None:
    """Return the maximum number of positions of a model (of its text model, if multimodal); None if not configured."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def shares_prefixes(model: Any) -> bool:
    """Return whether continuing the key-value cache of a prefix gives the same states as a pass over the whole row.

    Args:
        model: A causal language model, wrapped or not.

    Returns:
        False where layers see a window or carry a state (a cache that was cut back would lack what fell out of it),
        where rotary embeddings depend on the length of the row, and with virtual tokens of PEFT, which are a cache
        themselves.
    """
    inner = unwrapped(model)
    config = getattr(inner, "config", None)
    if config is None or getattr(inner, "_is_stateful", False):
        return False
    if not (_accepts(inner, "past_key_values") and _accepts(inner, "position_ids")):
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


def collective(model: Any) -> bool:
    """Return whether forward passes of a model are collective, i.e. its weights are sharded over ranks (FSDP, ZeRO-3).

    Args:
        model: A causal language model, wrapped or not.
    """
    return in_shards(model) and dist.get_world_size() > 1


def in_shards(model: Any) -> bool:
    """Return whether a model's weights are sharded (FSDP, ZeRO-3), be it over one rank.

    Args:
        model: A causal language model, wrapped or not.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()) or any(
        hasattr(parameter, "ds_id") for parameter in model.parameters()
    )


def _most_of_all_ranks(model: Any, passes: int) -> int:
    """Return the highest number of passes of any rank; this rank's own if passes are not collective."""
    if not collective(model):
        return passes
    most = torch.tensor(passes, device=_device(model))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows that are computed together.

    Attributes:
        chains: Chains of row numbers; each row of a chain continues the cache of the one before.
        trunk: Number of tokens that all first rows begin with, computed once; 0 for none.
    """

    chains: list[list[int]]
    trunk: int

    @property
    def passes(self) -> int:
        """The number of forward passes."""
        return max(map(len, self.chains)) + (self.trunk > 0)


def _batches(rows: Rows, positions: Rows, share: bool, batch_tokens: int) -> list[_Batch]:
    """Return which rows to compute together; rows without wanted positions are left out."""
    order = sorted((n for n in range(len(rows)) if positions[n]), key=lambda n: tuple(rows[n]))
    if not order:
        return []
    everywhere = common_prefix(rows[order[0]], rows[order[-1]])  # in this order the two that differ most
    chains: list[list[int]] = []
    for n in order:
        kept = _kept(rows, positions, chains[-1][-1], n) if chains and share else 0
        # Half of what is not everybody's: what is computed again costs less than what waits.
        if kept and (not batch_tokens or 2 * (kept - everywhere) >= len(rows[n]) - everywhere):
            chains[-1].append(n)
        else:
            chains.append([n])
    chains.sort(key=lambda chain: len(rows[chain[0]]), reverse=True)  # the stable sort keeps neighbours together
    batches: list[list[list[int]]] = []
    for chain in chains:
        last = batches[-1] if batches else []
        width, tokens = len(rows[last[0][0]]) if last else 0, sum(len(rows[one[0]]) for one in [*last, chain])
        padded = width * (len(last) + 1)
        if last and padded <= batch_tokens and padded <= PADDING * tokens:
            last.append(chain)
        else:
            batches.append([chain])
    return [_Batch(chains, _trunk(rows, positions, chains) if share else 0) for chains in batches]


def _trunk(rows: Rows, positions: Rows, chains: Sequence[Sequence[int]]) -> int:
    first = sorted(tuple(rows[chain[0]]) for chain in chains)
    trunk = min(common_prefix(first[0], first[-1]), *(positions[chain[0]][0] for chain in chains))
    return trunk if trunk * (len(chains) - 1) >= LEAST_TRUNK else 0


def _kept(rows: Rows, positions: Rows, before: int, row: int) -> int:
    """Return how many cached tokens a row can continue from. Positions whose states are wanted are computed in any
    case."""
    return min(common_prefix(rows[before], rows[row]), positions[row][0])


def _side_by_side(model: Any, batch: _Batch, rows: Rows, positions: Rows) -> dict[int, Tensor]:
    """Return the hidden states of a batch's rows, by row number.

    A cache has the keys of all chains in the same slots. A chain whose row is shorter, or keeps less of the row before,
    leaves slots unused, which the attention mask hides. Positions are given apart from slots.
    """
    found: dict[int, Tensor] = {}
    chains, cache = batch.chains, None
    if batch.trunk:
        _, cache = _states(model, [rows[chains[0][0]][: batch.trunk]], None, keep=True)
        if cache is not None:
            cache.batch_repeat_interleave(len(chains))
    slots = [list(range(batch.trunk if cache is not None else 0)) for _ in chains]
    for turn in range(max(map(len, chains))):
        going = [n for n, chain in enumerate(chains) if len(chain) > turn]
        if len(going) < len(chains):
            if cache is not None:
                cache.batch_select_indices(torch.tensor(going, device=_device(model)))
            chains, slots = [chains[n] for n in going], [slots[n] for n in going]
        numbers = [chain[turn] for chain in chains]
        if cache is None:
            slots = [[] for _ in chains]
        elif turn:
            slots = [
                own[: _kept(rows, positions, chain[turn - 1], chain[turn])]
                for own, chain in zip(slots, chains, strict=True)
            ]
        used = max((own[-1] + 1 for own in slots if own), default=0)
        if cache is not None:
            cache = _cut(cache, cache.get_seq_length() - used) if used else None
        kept = [len(own) for own in slots]
        new = [rows[number][k:] for number, k in zip(numbers, kept, strict=True)]
        for own, tokens in zip(slots, new, strict=True):
            own.extend(range(used, used + len(tokens)))
        last = turn + 1 == max(map(len, chains))
        states, cache = _states(model, new, cache, slots=slots, kept=kept, keep=not last)
        places = [
            (n, p - k) for n, (number, k) in enumerate(zip(numbers, kept, strict=True)) for p in positions[number]
        ]
        at = torch.tensor(places, device=states.device)
        parts = states[at[:, 0], at[:, 1]].split([len(positions[number]) for number in numbers])
        found |= dict(zip(numbers, parts, strict=True))
    return found


def _states(
    model: Any,
    rows: Rows,
    cache: Any,
    *,
    keep: bool,
    slots: Sequence[Sequence[int]] | None = None,
    kept: Sequence[int] | None = None,
) -> tuple[Tensor, Any]:
    """Return hidden states ``[B, L, H]`` of rows that continue a cache, padded on the right, and the new cache.

    Args:
        model: Model to call.
        rows: B lists of new tokens.
        cache: Key-value cache that the rows continue; None for none.
        keep: Whether to return the new cache.
        slots: Cache slots of each row's tokens, old and new; needed where a row continues only a part of the cache.
        kept: Number of cached tokens that each row continues; None means all.
    """
    taken: list[Tensor] = []
    width, past = max(map(len, rows)), 0 if cache is None else cache.get_seq_length()
    device = _device(model)
    options: dict[str, Any] = (
        {"use_cache": keep or cache is not None} if _accepts(unwrapped(model), "use_cache") else {}
    )
    if cache is not None:
        options["past_key_values"] = cache
    if kept is not None and any(k < past for k in kept):  # padding on the right is hidden by the causal mask alone
        mask = torch.ones(len(rows), past + width, dtype=torch.int64)
        for n, own in enumerate(slots or ()):
            mask[n, :past] = 0
            mask[n, list(own[: kept[n]])] = 1
        options["attention_mask"] = mask.to(device)
        options["position_ids"] = (torch.tensor(kept)[:, None] + torch.arange(width)).to(device)
    ids = torch.tensor([[*row, *[row[0]] * (width - len(row))] for row in rows], device=device)
    hook = backbone(model).register_forward_hook(lambda _module, _args, output: taken.append(output[0]))
    try:
        output = model(input_ids=ids, **options, **_least_logits(model))
    finally:
        hook.remove()
    if len(taken) != 1:
        raise NothingCaptured(f"one pass went through the model's backbone {len(taken)} times")
    cache = getattr(output, "past_key_values", None) if keep else None
    usable = hasattr(cache, "crop") and cache.get_seq_length() == past + width
    return taken[0], cache if usable else None


def _cut(cache: Any, tokens: int) -> Any:
    """Return the cache without its last tokens."""
    if tokens:
        cache.crop(-tokens)
    return cache


def _least_logits(model: Any) -> dict[str, int]:
    """Return arguments with which a model computes logits of one position only, as these logits are not read."""
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
