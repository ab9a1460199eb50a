"""Items and pairs of rows as text, which travels in columns of VeRL's batches between its processes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ...rollouts.record_files import from_json, to_json
from ...rollouts.rollout import DpoPair, SdpoItem

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


def text_of(records: Sequence[SdpoItem | DpoPair]) -> str:
    """Return records as JSON text."""
    return json.dumps([to_json(record) for record in records], ensure_ascii=False)


def items_of(text: str) -> tuple[SdpoItem, ...]:
    """Return the error sites of `text_of`'s text."""
    return tuple(one for one in map(from_json, json.loads(text)) if isinstance(one, SdpoItem))


def pairs_of(text: str) -> tuple[DpoPair, ...]:
    """Return the pairs of `text_of`'s text."""
    return tuple(one for one in map(from_json, json.loads(text)) if isinstance(one, DpoPair))
