"""One list of the episodes of several journals, newest first, page by page."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from errata_protocol.errors import InvalidRequest
from errata_protocol.replay import EpisodePage, EpisodeSummary

Pages = Callable[[int, str | None], EpisodePage]
"""Returns a page of one journal's episodes: at most so many, from a cursor on; None is the beginning."""

_START, _END, _SEPARATOR = "s", "e", "."


def merged_page(journals: Sequence[Pages], query: Mapping[str, Any]) -> EpisodePage:
    """Return one page of the episodes of all journals.

    Args:
        journals: Reads each journal, always in the same order.
        query: The ``limit`` of the page, and its ``cursor``: ``next`` of the page before, or None. The cursor of one
            journal is its own; that of several has a part for each.

    Raises:
        InvalidRequest: The cursor is of another number of journals.
    """
    limit, cursor = query["limit"], query["cursor"]
    cursors = cursor.split(_SEPARATOR) if cursor is not None else [_START] * len(journals)
    if len(cursors) != len(journals) or not all(at in (_START, _END) or at.isdecimal() for at in cursors):
        raise InvalidRequest(f"the cursor {cursor} is of another list than this one of {len(journals)} journals")
    pages = [
        pages(limit, None if at == _START else at) if at != _END else EpisodePage(episodes=[])
        for pages, at in zip(journals, cursors, strict=True)
    ]
    merged = heapq.merge(*(_numbered(n, page) for n, page in enumerate(pages)), key=lambda one: -one[1].created)
    taken = list(islice(merged, limit))
    counts = Counter(n for n, _ in taken)
    following = []
    for n, page in enumerate(pages):
        if counts[n] == len(page.episodes):
            following.append(page.next or _END)
        elif counts[n]:
            again = journals[n](counts[n], None if cursors[n] == _START else cursors[n])
            following.append(again.next or _END)
        else:
            following.append(cursors[n])
    is_last = all(at == _END for at in following)
    return EpisodePage(episodes=[one for _, one in taken], next=None if is_last else _SEPARATOR.join(following))


def _numbered(n: int, page: EpisodePage) -> Iterator[tuple[int, EpisodeSummary]]:
    return ((n, episode) for episode in page.episodes)
