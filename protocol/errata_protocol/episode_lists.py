"""Lists of episodes: what they filter and sort by, their cursors, and sums over them by time.

Of a filter, an order and a cursor each answerer makes the same list, whether it reads a journal's index, rows in
memory or a bundle. A cursor is the place of an episode in the order, by what its summary says, and not a number of the
answerer's own: it means the same to several servers, whose pages can be merged (`merged`).
"""

from __future__ import annotations

import base64
import heapq
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

from .errors import InvalidRequest
from .replay import EpisodeAggregates, EpisodeBucket, EpisodePage, Origin

Sort = Literal["created", "last", "reward", "deliveries", "errors"]
Status = Literal["open", "detached", "closed", "lost", "expired", "done"]

MAX_CURSOR = 1024
"""Longest text of a cursor, in characters."""

DAY_S = 86_400
"""Length of a bucket of aggregates where none is given, seconds."""

MAX_BUCKET_S = 366 * DAY_S
"""Longest bucket of aggregates, seconds."""

MAX_BUCKETS = 1_000
"""Most buckets of one answer."""

MAX_COUNTS = 20_000
"""Most counts of kinds and hint keys in all buckets of one answer."""

_UPPER = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


class Listed(Protocol):
    """An episode as filters and orders see it; `errata_protocol.replay.EpisodeSummary` is one."""

    @property
    def eid(self) -> str: ...
    @property
    def episode_id(self) -> str | None: ...
    @property
    def environment(self) -> str: ...
    @property
    def created(self) -> float: ...
    @property
    def deliveries(self) -> int: ...
    @property
    def reward(self) -> float: ...
    @property
    def error_kinds(self) -> dict[str, int]: ...
    @property
    def hint_keys(self) -> dict[str, int]: ...
    @property
    def task(self) -> str | None: ...
    @property
    def status(self) -> str | None: ...
    @property
    def last(self) -> float | None: ...
    @property
    def origin(self) -> Origin | None: ...
    @property
    def group(self) -> str | None: ...
    @property
    def step(self) -> int | None: ...
    @property
    def run(self) -> str | None: ...


L = TypeVar("L", bound=Listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFilter:
    """What an episode has to be to stand in a list; None leaves a field out.

    Attributes:
        environment: Name of the episode's environment.
        task: Name of the episode's task, all of it.
        status: Status that the episode's summary has.
        error_kind: Kind that at least one of the episode's turns is marked with.
        episode_id: Alias that the client gave the episode.
        text: Text that the episode's eid, alias or task contains; letters A to Z match in both cases.
        reward_min: Lowest sum of the episode's rewards.
        reward_max: Highest sum of the episode's rewards.
        created_from: Earliest time at which the episode was created, seconds since the epoch.
        created_before: Time before which the episode was created, seconds since the epoch.
        last_from: Earliest time of the episode's newest delivery, seconds since the epoch.
        last_before: Time before which the episode's newest delivery was made, seconds since the epoch.
        group: Label ``group`` that the episode has.
        step: Label ``step`` that the episode has, the training step.
        run: Label ``run`` that the episode has.
        origin: eid of the episode that the episode was forked from.
    """

    environment: str | None = None
    task: str | None = None
    status: Status | None = None
    error_kind: str | None = None
    episode_id: str | None = None
    text: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    created_from: float | None = None
    created_before: float | None = None
    last_from: float | None = None
    last_before: float | None = None
    group: str | None = None
    step: int | None = None
    run: str | None = None
    origin: str | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> EpisodeFilter:
        """Return the filter of those parameters of a list that are a filter's."""
        return cls(**{name: parameters.get(name) for name in FILTERS})

    def parameters(self) -> dict[str, Any]:
        """Return the fields that are given, as parameters of ``GET /episodes``."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def matches(self, one: Listed) -> bool:
        """Return whether an episode is in the list."""
        last = one.last if one.last is not None else one.created
        return (
            self.environment in (None, one.environment)
            and self.task in (None, one.task)
            and self.status in (None, one.status)
            and (self.error_kind is None or self.error_kind in one.error_kinds)
            and self.episode_id in (None, one.episode_id)
            and (self.reward_min is None or one.reward >= self.reward_min)
            and (self.reward_max is None or one.reward <= self.reward_max)
            and (self.created_from is None or one.created >= self.created_from)
            and (self.created_before is None or one.created < self.created_before)
            and (self.last_from is None or last >= self.last_from)
            and (self.last_before is None or last < self.last_before)
            and self.group in (None, one.group)
            and self.step in (None, one.step)
            and self.run in (None, one.run)
            and (self.origin is None or (one.origin is not None and one.origin.eid == self.origin))
            and (self.text is None or _contains(one, self.text))
        )


FILTERS: tuple[str, ...] = tuple(EpisodeFilter.__dataclass_fields__)
"""Names of the filters, as fields and as parameters of ``GET /episodes``."""

EVERY = EpisodeFilter()
"""The filter that each episode matches."""


class ListPlace(NamedTuple):
    """The place of an episode in an order: what it is sorted by, then its eid."""

    value: float
    eid: str


@dataclass(frozen=True, slots=True)
class EpisodeOrder:
    """The order of a list: by one field, and by eid where that is equal.

    Attributes:
        by: Field of the summary; ``errors`` is the number of turns that are marked with an error.
        descending: Highest first.
        error_kind: Kind of the errors that are counted, None for all. A server counts those of the list's filter.
    """

    by: Sort = "created"
    descending: bool = True
    error_kind: str | None = None

    @classmethod
    def of(cls, by: Sort, descending: bool, wanted: EpisodeFilter) -> EpisodeOrder:
        """Return the order of a list with a filter: by errors, those of the filter's kind are counted."""
        return cls(by, descending, wanted.error_kind if by == "errors" else None)

    @classmethod
    def of_query(cls, given: Mapping[str, Any]) -> EpisodeOrder:
        """Return the order that the parameters of ``GET /episodes`` ask for."""
        return cls.of(given.get("sort") or "created", given.get("order") != "asc", EpisodeFilter.of(given))

    def place(self, one: Listed) -> ListPlace:
        """Return where an episode is in this order."""
        value = one.last if self.by == "last" and one.last is not None else one.created
        if self.by == "reward":
            value = one.reward
        elif self.by == "deliveries":
            value = one.deliveries
        elif self.by == "errors" and self.error_kind is not None:
            value = one.error_kinds.get(self.error_kind, 0)
        elif self.by == "errors":
            value = sum(one.error_kinds.values())
        return ListPlace(value, one.eid)

    def is_after(self, one: Listed, place: ListPlace | None) -> bool:
        """Return whether an episode comes behind a place; always where that is None, the beginning."""
        if place is None:
            return True
        return self.place(one) < place if self.descending else self.place(one) > place

    def page(self, listed: Iterable[L], limit: int) -> tuple[list[L], ListPlace | None]:
        """Return the first episodes, at most ``limit``, and the place of the last one if others follow, else None."""
        first = heapq.nlargest if self.descending else heapq.nsmallest
        found = first(limit + 1, listed, key=self.place)
        return found[:limit], self.place(found[limit - 1]) if len(found) > limit else None

    def cursor(self, place: ListPlace) -> str:
        """Return a place of this order as the text of a cursor."""
        text = json.dumps([self.by, self.descending, *place], separators=(",", ":"))
        return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()

    def place_of(self, cursor: str) -> ListPlace:
        """Return the place that a cursor of this order names.

        Raises:
            InvalidRequest: It is no cursor, or one of a list in another order.
        """
        by, descending, place = _read(cursor)
        if (by, descending) != (self.by, self.descending):
            raise InvalidRequest(
                f"the cursor is of another list, sorted by {by} {'down' if descending else 'up'}: give the sort and "
                "order of the page that it came with"
            )
        return place


NEWEST = EpisodeOrder()
"""Newest first, the order of a list that names none."""


def page_query(
    limit: int, cursor: str | None, given: Mapping[str, Any], wanted: EpisodeFilter, order: EpisodeOrder
) -> dict[str, Any]:
    """Return the parameters of ``GET /episodes`` for a page.

    Args:
        limit: At most this many episodes.
        cursor: ``next`` of the page before, None for the first page.
        given: Filters by name, which replace those of ``wanted`` that are not None here.
        wanted: The filter.
        order: The order. The default one is left out: servers before it have no such parameter.
    """
    query = {"limit": limit, "cursor": cursor, **wanted.parameters()}
    query |= {name: value for name, value in given.items() if value is not None}
    if order != NEWEST:
        query |= {"sort": order.by, "order": "desc" if order.descending else "asc"}
    return query


def check_cursor(cursor: str) -> str:
    """Return ``cursor``.

    Raises:
        InvalidRequest: It is no cursor.
    """
    _read(cursor)
    return cursor


Pages = Callable[[int, str | None], EpisodePage]
"""Returns a page of one answerer: at most so many episodes, from a cursor on; None is the beginning."""


def merged(answerers: Sequence[Pages], order: EpisodeOrder, limit: int, cursor: str | None) -> EpisodePage:
    """Return one page of the episodes of several answerers, each of which is asked for one page.

    Args:
        answerers: Each returns its own episodes in ``order``, with the same filter.
        order: The order of the list.
        limit: At most this many episodes.
        cursor: ``next`` of the page before, None for the first page. All answerers are asked with the same one.

    Raises:
        InvalidRequest: The cursor is none, or one of a list in another order.
    """
    if cursor is not None:
        order.place_of(cursor)
    pages = [answerer(limit, cursor) for answerer in answerers]
    episodes = heapq.merge(*(page.episodes for page in pages), key=order.place, reverse=order.descending)
    taken = list(islice(episodes, limit))
    more = len(taken) < sum(len(page.episodes) for page in pages) or any(page.next is not None for page in pages)
    return EpisodePage(episodes=taken, next=order.cursor(order.place(taken[-1])) if more and taken else None)


def aggregated(episodes: Iterable[Listed], bucket_s: int) -> EpisodeAggregates:
    """Return what episodes add up to, by the time of their creation.

    Args:
        episodes: The episodes.
        bucket_s: Length of a bucket, seconds.

    Raises:
        InvalidRequest: There are more than `MAX_BUCKETS` buckets, or more than `MAX_COUNTS` counts in them.
    """
    buckets: dict[int, EpisodeBucket] = {}
    for one in episodes:
        start = int(one.created / bucket_s) * bucket_s  # as SQLite computes it, to the last bit
        bucket = buckets.get(start)
        if bucket is None:
            bucket = buckets[start] = EpisodeBucket(start=start)
        bucket.episodes += 1
        bucket.done += one.status == "done"
        bucket.deliveries += one.deliveries
        bucket.reward += one.reward
        _add(bucket.error_kinds, one.error_kinds)
        _add(bucket.hint_keys, one.hint_keys)
    return summed([EpisodeAggregates(bucket_s=bucket_s, buckets=list(buckets.values()))])


def summed(parts: Sequence[EpisodeAggregates]) -> EpisodeAggregates:
    """Return the sum of what several answerers have, at least one; each has its own episodes.

    Raises:
        InvalidRequest: Their buckets are not equally long, or there are too many buckets or counts in them.
    """
    bucket_s, *others = {part.bucket_s for part in parts}
    if others:
        raise InvalidRequest("aggregates with buckets of different lengths cannot be summed: ask for one bucket_s")
    buckets: dict[int, EpisodeBucket] = {}
    for bucket in (bucket for part in parts for bucket in part.buckets):
        sum_of = buckets.setdefault(bucket.start, EpisodeBucket(start=bucket.start))
        sum_of.episodes += bucket.episodes
        sum_of.done += bucket.done
        sum_of.deliveries += bucket.deliveries
        sum_of.reward += bucket.reward
        _add(sum_of.error_kinds, bucket.error_kinds)
        _add(sum_of.hint_keys, bucket.hint_keys)
    counts = sum(len(bucket.error_kinds) + len(bucket.hint_keys) for bucket in buckets.values())
    if len(buckets) > MAX_BUCKETS or counts > MAX_COUNTS:
        raise InvalidRequest(
            f"buckets of {bucket_s} s are more than {MAX_BUCKETS}, or have more than {MAX_COUNTS} counts of kinds and "
            "hint keys: give a longer bucket_s or a narrower filter"
        )
    for bucket in buckets.values():
        bucket.reward = _finite(bucket.reward)
        bucket.error_kinds = dict(sorted(bucket.error_kinds.items()))
        bucket.hint_keys = dict(sorted(bucket.hint_keys.items()))
    return EpisodeAggregates(bucket_s=bucket_s, buckets=[buckets[start] for start in sorted(buckets)])


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for key, count in more.items():
        counts[key] = counts.get(key, 0) + count


def _finite(value: float) -> float:
    """Return a sum as JSON can carry it: the largest double for one beyond it, 0 for infinities that cancel out."""
    return 0.0 if math.isnan(value) else max(-sys.float_info.max, min(sys.float_info.max, value))


def _read(cursor: str) -> tuple[str, bool, ListPlace]:
    try:
        if len(cursor) > MAX_CURSOR:
            raise ValueError("too long")
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        by, descending, value, eid = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        known = by in get_args(Sort) and isinstance(descending, bool) and isinstance(eid, str)
        if not known or isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise ValueError("not the fields of a cursor")
        return by, descending, ListPlace(float(value), eid)
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise InvalidRequest(f"{cursor[:100]!a} is not a cursor that an earlier page had as next") from error


def _contains(one: Listed, text: str) -> bool:
    sought = folded(text)
    return any(sought in folded(found) for found in (one.eid, one.episode_id, one.task) if found is not None)


def folded(text: str) -> str:
    """Return a text with its letters A to Z as small ones: what `EpisodeFilter.text` compares."""
    return text.translate(_UPPER)
