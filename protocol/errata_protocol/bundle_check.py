"""Checks whole episodes, read from a bundle or from a journal."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable

from pydantic import BaseModel, Field

from .bundle import (
    BundledReward,
    BundleEnd,
    BundleHeader,
    DeliveryRecord,
    EpisodeRecord,
    FailureRecord,
    Line,
    check_header,
    parse_line,
)
from .payload import DIGEST_PREFIX
from .replay import Origin

MAX_PROBLEMS = 1000
"""Most problems, and most notes, that a result lists; the last one says how many more there are."""


class Problem(BaseModel):
    """One error in a bundle or a journal.

    Attributes:
        line: Line in the file, from 1; None if it concerns no single line.
        eid: The episode, if it concerns one.
        t: The delivery, if it concerns one.
        what: What is wrong.
    """

    line: int | None = None
    eid: str | None = None
    t: int | None = None
    what: str


class Verification(BaseModel):
    """The result of checking whole episodes.

    Attributes:
        ok: Whether there are no problems.
        problems: What is wrong.
        notes: What could not be checked, e.g. a fork whose parent is missing.
    """

    ok: bool = True
    episodes: int = 0
    deliveries: int = 0
    errors: int = 0
    rewards: int = 0
    problems: list[Problem] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


class EpisodeCheck:
    """Checks the records of whole episodes one by one: digests, t without gaps, origins of forks, rewards.

    Memory grows with the number of episodes, not with their payloads.
    """

    def __init__(self) -> None:
        self.found = Verification()
        self._line: int | None = None
        self._episodes: dict[str, EpisodeRecord] = {}
        self._last: dict[str, int] = {}
        self._count: dict[str, int] = {}
        self._reward_ids: dict[str, set[str]] = {}
        self._wanted: dict[tuple[str, int], list[str]] = {}
        self._origins: dict[str, str] = {}
        self._unlisted = 0
        self._unlisted_notes = 0

    def expect(self, fork: str, origin: Origin) -> None:
        """Announce a fork whose parent's records come later; not needed if all `EpisodeRecord`s come first."""
        self._wanted.setdefault((origin.eid, origin.t), []).append(fork)

    def take(self, record: Line, line: int | None = None) -> None:
        """Check one record. Problems are added to ``found``.

        Args:
            record: The record; headers and ends are not checked.
            line: Its line in the file, from 1, which problems name.
        """
        self._line = line
        match record:
            case EpisodeRecord():
                self._episode(record)
            case DeliveryRecord():
                self._delivery(record)
            case FailureRecord():
                self.found.errors += 1
                if self._known(record) and self._last.get(record.eid) != record.after_t:
                    self.wrong(f"an error stands after t={record.after_t} and is not there", record.eid, record.after_t)
                self._digest(record, record.after_t)
            case BundledReward():
                self._reward(record)
            case BundleHeader() | BundleEnd():
                pass

    def done(self) -> Verification:
        """Return the result; called after the last record."""
        self._line = None
        for eid, episode in self._episodes.items():
            if self._count.get(eid, 0) != episode.deliveries:
                self.wrong(f"it has {self._count.get(eid, 0)} deliveries of {episode.deliveries}", eid)
            if len(self._reward_ids.get(eid, ())) != episode.rewards:
                self.wrong(f"it has {len(self._reward_ids.get(eid, ()))} late rewards of {episode.rewards}", eid)
        self.found.ok = not self.found.problems
        if self._unlisted:
            self.found.problems.append(Problem(what=f"{self._unlisted:,} more problems are not listed"))
        if self._unlisted_notes:
            self.found.notes.append(f"{self._unlisted_notes:,} more notes are not listed")
        return self.found

    def wrong(self, what: str, eid: str | None = None, t: int | None = None, line: int | None = None) -> None:
        """Add a problem to the result.

        Args:
            what: What is wrong.
            eid: The episode, if it concerns one.
            t: The delivery, if it concerns one.
            line: The line in the file; 0 for none, None for that of the record which is checked.
        """
        if len(self.found.problems) < MAX_PROBLEMS:
            self.found.problems.append(
                Problem(line=(self._line if line is None else line) or None, eid=eid, t=t, what=what)
            )
        else:
            self._unlisted += 1

    def _episode(self, record: EpisodeRecord) -> None:
        self.found.episodes += 1
        if record.eid in self._episodes:
            self.wrong("it stands there twice", record.eid)
            return
        self._episodes[record.eid] = record
        if record.origin is None:
            return
        if record.origin.eid in self._episodes:
            self.expect(record.eid, record.origin)
        elif len(self.found.notes) < MAX_PROBLEMS:
            self.found.notes.append(
                f"{record.eid} was forked from t={record.origin.t} of {record.origin.eid}, which is not there"
            )
        else:
            self._unlisted_notes += 1

    def _known(self, record: DeliveryRecord | FailureRecord | BundledReward) -> bool:
        if record.eid in self._episodes:
            return True
        self.wrong(f"a {record.record} is of an episode that is not there", record.eid)
        return False

    def _delivery(self, record: DeliveryRecord) -> None:
        self.found.deliveries += 1
        if not self._known(record):
            return
        eid, t = record.eid, record.t
        last = self._last.get(eid)
        # A step or a tools/call before any reset begins an episode too, at t=1; a fork has the t=0 of its origin.
        without_reset = t == 1 and record.kind != "reset" and self._episodes[eid].origin is None
        if last is None and t != 0 and not without_reset:
            self.wrong(f"it begins with t={t}", eid, t)
        elif last is not None and t != last + 1:
            self.wrong(f"t={t} follows t={last}", eid, t)
        self._last[eid] = t
        self._count[eid] = self._count.get(eid, 0) + 1
        self._digest(record, t)
        origin = self._episodes[eid].origin
        if t == 0 and origin is not None and eid in self._origins and record.digest != self._origins[eid]:
            self.wrong(f"its t=0 is not t={origin.t} of {origin.eid}, from which it was forked", eid, 0)
        elif t == 0 and origin is not None and origin.eid in self._episodes and eid not in self._origins:
            self.wrong(f"t={origin.t} of {origin.eid}, from which it was forked, is not there before it", eid, 0)
        for child in self._wanted.get((eid, t), ()):
            self._origins[child] = record.digest

    def _digest(self, record: DeliveryRecord | FailureRecord, t: int) -> None:
        what = f"t={t}" if isinstance(record, DeliveryRecord) else f"the error after t={t}"
        payload = record.payload_bytes
        if DIGEST_PREFIX + hashlib.sha256(payload).hexdigest() != record.digest:
            self.wrong(f"the payload of {what} does not match its digest", record.eid, t)
            return
        try:
            json.loads(payload)  # which reads what earlier versions wrote: deep nesting, halves of surrogate pairs
        except (ValueError, RecursionError):
            self.wrong(f"the payload of {what} is no JSON", record.eid, t)

    def _reward(self, record: BundledReward) -> None:
        self.found.rewards += 1
        if not self._known(record):
            return
        ids = self._reward_ids.setdefault(record.eid, set())
        if record.reward_id in ids:
            self.wrong(f"the reward_id {record.reward_id!r} stands there twice", record.eid, record.t)
        ids.add(record.reward_id)
        if record.t > self._last.get(record.eid, -1):
            self.wrong(f"a reward is of t={record.t}, which is not there", record.eid, record.t)
        if not math.isfinite(record.value):
            self.wrong("a reward is not finite", record.eid, record.t)


def verify_bundle(lines: Iterable[bytes], progress: Callable[[int], None] = lambda _: None) -> Verification:
    """Check a bundle completely: digests, t without gaps, origins of forks, and its last line.

    Semantic digests are not checked, because they depend on which fields were declared volatile.

    Args:
        lines: Lines with their newlines.
        progress: Called with the number of each line.

    Raises:
        InvalidRequest: It is not a bundle, or of another version.
    """
    check, sha, end, number = EpisodeCheck(), hashlib.sha256(), None, 0
    for number, line in enumerate(lines, start=1):
        progress(number)
        try:
            record = parse_line(line)
        except ValueError as error:
            if number == 1:
                check_header(None)
            check.wrong(f"it cannot be read: {error}", line=number)
            record = None
        if number == 1:
            check_header(record)
        if end is not None:
            check.wrong("it stands behind the end", line=number)
        if isinstance(record, BundleEnd):
            end = record
            if (end.records, end.sha256) != (number - 1, sha.hexdigest()):
                check.wrong("a line before it was changed, added or lost", line=number)
        elif record is not None:
            check.take(record, number)
        sha.update(line)
    if number == 0:
        check_header(None)
    if end is None:
        check.wrong("the bundle was cut off: its last line is missing", line=0)
    return check.done()
