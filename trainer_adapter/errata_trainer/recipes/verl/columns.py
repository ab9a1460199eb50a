"""Columns of VeRL's batches: items and pairs of rows as text, which travels between its processes, and what channel 2
says of each token of the responses."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ...assembly.collator import collate_columns
from ...rollouts.record_files import from_json, to_json
from ...rollouts.rollout import DpoPair, Rollout, SdpoItem

ITEMS_COLUMN = "errata_items"
"""Column of a batch: `text_of` the row's error sites."""
PAIRS_COLUMN = "errata_pairs"
"""Column of a batch: `text_of` the row's pairs."""
OWN_COLUMN = "errata_own"
"""Column of a batch: JSON list, whether the rejected action of each pair stands in the row itself."""
ALPHA = "errata_alpha"
"""Value of a batch: weight of channel 2 in this step."""
BETA = "errata_beta"
"""Value of a batch: weight of channel 3 in this step."""

ERROR_MASK = "sdpo_error_mask"
"""Column of a batch: 1 at the targets of failing turns, 0 elsewhere."""
WEIGHTS = "sdpo_weights"
"""Column of a batch: weight of each target in channel 2, 0 elsewhere."""
TEACHER_LOGPROBS = "sdpo_teacher_logprobs"
"""Column of a batch: the teacher's log-probability of each target with the hint, 0 elsewhere."""
TURN_SCORES = "prm_scores"
"""Column of a batch: the teachers' consensus score of the turn that a token belongs to, 0 where nobody voted."""

TEACHER_ACTIONS = "teacher_actions"
"""Column of a batch: JSON, from the index of a turn to the key of each teacher's action at its state."""


def text_of(records: Sequence[SdpoItem | DpoPair]) -> str:
    """Return records as JSON text."""
    return json.dumps([to_json(record) for record in records], ensure_ascii=False)


def items_of(text: str) -> tuple[SdpoItem, ...]:
    """Return the error sites of `text_of`'s text."""
    return tuple(one for one in map(from_json, json.loads(text)) if isinstance(one, SdpoItem))


def pairs_of(text: str) -> tuple[DpoPair, ...]:
    """Return the pairs of `text_of`'s text."""
    return tuple(one for one in map(from_json, json.loads(text)) if isinstance(one, DpoPair))


def owned_of(text: str) -> tuple[bool, ...]:
    """Return whether the rejected action of each pair stands in the row itself."""
    return tuple(bool(one) for one in json.loads(text))


def response_columns(
    rollouts: Sequence[Rollout],
    items: Sequence[Sequence[SdpoItem]],
    scores: Sequence[Sequence[Sequence[float] | None]] | None = None,
    *,
    lengths: Sequence[int],
) -> dict[str, list[list[float]]]:
    """Return error sites as columns over the responses of a batch, each row as long as its response.

    They are the columns of `collate_columns` without the prompts and the padding. So a value stands at the place of the
    token itself, as in VeRL's ``response_mask`` and ``old_log_probs``, and not at the place that predicts it: position
    ``p`` of `SdpoItem.student_positions`, counted in prompt and response, belongs to entry ``p + 1 - len(prompt_ids)``.

    Args:
        rollouts: Rollout of each row; any, such as an empty one, for a row without error sites.
        items: Error sites of each row.
        scores: Log-probabilities of each error site's targets, as `Scorer.score` returns them; a site whose entry is
            None is left out. None leaves the teacher's column out, and no site.
        lengths: Number of tokens of each row's response.

    Returns:
        ``sdpo_error_mask``, ``sdpo_weights`` and, with ``scores``, ``sdpo_teacher_logprobs``: one list for each row.

    Raises:
        ValueError: A row with error sites has a rollout of another length; an error site does not fit its rollout, or
            has another number of log-probabilities.
    """
    names = (ERROR_MASK, WEIGHTS) if scores is None else (ERROR_MASK, WEIGHTS, TEACHER_LOGPROBS)
    columns: dict[str, list[list[float]]] = {name: [] for name in names}
    given: Sequence[Sequence[Sequence[float] | None]] = (
        scores if scores is not None else [[()] * len(of) for of in items]
    )
    for row, (rollout, sites, found, length) in enumerate(zip(rollouts, items, given, lengths, strict=True)):
        scored = [(site, score) for site, score in zip(sites, found, strict=True) if score is not None]
        if not scored:
            for name in names:
                columns[name].append([0.0] * length)
            continue
        tokens = len(rollout.completion_ids)
        if tokens != length:
            raise ValueError(f"row {row} has error sites and a response of {length} tokens, but a rollout of {tokens}")
        batch = collate_columns(
            [rollout],
            [[site for site, _ in scored]],
            pad_id=0,
            teacher_logprobs=None if scores is None else [[score for _, score in scored]],
        )
        for name in names:
            columns[name].append(batch[name][0, len(rollout.prompt_ids) :].float().tolist())
    return columns
