"""Labels of a trainer's episodes: which run, training step and group of rollouts they belong to."""

from __future__ import annotations

from typing import Any

from errata_protocol.labels import MAX_LABEL, MAX_STEP, Labels


def episode_labels(*, run: Any = None, step: Any = None, group: Any = None) -> Labels:
    """Return labels of what a trainer calls its run, step and group.

    A text that is too long loses its beginning, where paths of one machine are alike; characters that a label cannot
    have become spaces.

    Args:
        run: Name of the run; None for no label.
        step: Number of the training step; None, or one below 0 as before the first step, for no label.
        group: Name of the rollouts that are compared with each other; None for no label.
    """
    number = None if step is None else int(step)
    known = number is not None and 0 <= number <= MAX_STEP
    return Labels(run=_text(run), step=number if known else None, group=_text(group))


def _text(value: Any) -> str | None:
    shown = "" if value is None else str(value).encode("utf-8", "replace").decode()
    return "".join(" " if ord(one) < 32 or 127 <= ord(one) < 160 else one for one in shown)[-MAX_LABEL:] or None
