"""``errata audit``: how often agents broke the rules of their environments, by task and over time.

It counts turns marked as violations, the hint keys with which graders report tampering, and late rewards by source.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from errata_protocol.errors import ErrataError, InvalidRequest, RemoteProtocolError
from errata_protocol.markers import ErrorKind
from errata_protocol.names import shown
from errata_protocol.printable import printable
from errata_protocol.replay import EpisodeDetail, RewardRecord

from .payloads import observation_in
from .source import Source

CANARY = "policy.canary"
TAMPERING = "policy.tampering"
_TASK_KEYS = ("instance_id", "task_id", "task")
MAX_PAGES = 10_000
"""Most pages that are read of a list of episodes; our servers put 500 episodes on each page but the last."""

_PER = 1000
_FORMATS = {"day": "%Y-%m-%d", "hour": "%Y-%m-%dT%H:00Z"}


@dataclass
class Count:
    """Counts of a group of episodes.

    Args:
        episodes: Number of episodes.
        finished: Episodes that are done.
        violating: Episodes with a turn marked ``policy_violation``.
        violations: Turns marked so.
        canaries: Episodes whose grading found wrong canaries.
        tampering: Episodes whose grading found tampering of another kind.
        rewards: Number of late rewards by source.
        reward: Sum of the episodes' rewards.
    """

    episodes: int = 0
    finished: int = 0
    violating: int = 0
    violations: int = 0
    canaries: int = 0
    tampering: int = 0
    rewards: Counter[str] = field(default_factory=Counter)
    reward: float = 0.0

    def add(self, episode: EpisodeDetail, late: Iterable[RewardRecord]) -> None:
        """Add an episode and its late rewards to the counts."""
        marked = [turn for turn in episode.turns if turn.error_kind == ErrorKind.POLICY_VIOLATION]
        keys = {turn.hint_template_key for turn in marked}
        self.episodes += 1
        self.finished += episode.done
        self.violations += len(marked)
        self.violating += bool(marked)
        self.canaries += CANARY in keys
        self.tampering += TAMPERING in keys
        self.reward += episode.reward
        self.rewards.update(record.source for record in late)

    def summary(self) -> dict[str, Any]:
        """Return the counts and their rates per 1,000 episodes, ready for JSON."""
        per = _PER / self.episodes if self.episodes else 0.0
        rates = {name: round(getattr(self, name) * per, 3) for name in ("violating", "canaries", "tampering")}
        return {**asdict(self), "rewards": dict(self.rewards), "per_1000_episodes": rates}


def main(arguments: Sequence[str]) -> int:
    """Run the command and print its report.

    Returns:
        The exit status: 0, or 1 if a rate exceeds ``--max-per-1000``. Wrong options exit with status 2.
    """
    parser = argparse.ArgumentParser(
        prog="errata audit", description="Violations and canary failures per 1,000 episodes, by task and over time."
    )
    parser.add_argument("--data-dir", type=Path, metavar="PATH", help="Journal to read (ERRATA_DATA_DIR).")
    parser.add_argument("--url", help="Server to ask instead of reading the disk.")
    parser.add_argument("--environment", metavar="NAME", help="Only episodes of this environment.")
    parser.add_argument("--by", choices=sorted(_FORMATS), default="day", help="Length of the periods.")
    bound = "End with status 1 if more episodes of 1,000 have a violation, wrong canaries or other tampering."
    parser.add_argument("--max-per-1000", type=float, metavar="N", help=bound)
    parser.add_argument("--json", action="store_true", help="Machine-readable.")
    options = parser.parse_args(list(arguments))
    total, tasks, times = Count(), dict[str, Count](), dict[str, Count]()
    with Source(options.data_dir, options.url) as source:
        for episode in _episodes(source, options.environment):
            late = source.rewards(episode.eid)
            period = _period(episode, options.by)
            task = f"{episode.environment}/{_task(source, episode)}"
            for count in (total, tasks.setdefault(task, Count()), times.setdefault(period, Count())):
                count.add(episode, late)
    report = {
        "total": total.summary(),
        "tasks": {name: tasks[name].summary() for name in sorted(tasks)},
        "times": {name: times[name].summary() for name in sorted(times)},
    }
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    highest = max(report["total"]["per_1000_episodes"].values())
    return int(options.max_per_1000 is not None and highest > options.max_per_1000)


def _episodes(source: Source, environment: str | None) -> Iterable[EpisodeDetail]:
    """Yield all episodes, page by page.

    Raises:
        RemoteProtocolError: The list has no end, as that of no server of ours: a page leads back to one that was read,
            or has no episode and leads on, or there are more than `MAX_PAGES`.
    """
    cursor = None
    read: set[str | None] = set()
    while len(read) < MAX_PAGES:
        read.add(cursor)
        query = {"limit": 500, "cursor": cursor, "environment": environment, "error_kind": None, "episode_id": None}
        page = source.page(query)
        for episode in page.episodes:
            yield source.detail(episode.eid)
        cursor = page.next
        if cursor is None:
            return
        if cursor in read:
            raise _endless(f"the page {shown(cursor)} came before")
        if not page.episodes:
            raise _endless(f"a page without episodes leads to the page {shown(cursor)}")
    raise _endless(f"it has more than {MAX_PAGES:,} pages")


def _endless(why: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"the list of episodes has no end: {why}; check --url")


def _period(episode: EpisodeDetail, by: str) -> str:
    """Return the name of the period in which an episode began."""
    try:
        return datetime.fromtimestamp(episode.created, UTC).strftime(_FORMATS[by])
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidRequest(
            f"episode {episode.eid} began at {episode.created:g}, which is no time: {error}"
        ) from error


def _task(source: Source, episode: EpisodeDetail) -> str:
    """Return the task that an episode's first observation names; ``-`` if it names none or cannot be read."""
    if not episode.deliveries:
        return "-"
    try:
        payload, _, _ = source.state(episode.eid, 0)
        observation = observation_in(payload)
    except ErrataError:  # the row is lost or damaged: the episode is counted all the same
        return "-"
    return next((str(observation[key]) for key in _TASK_KEYS if observation.get(key)), "-")


def _print(report: dict[str, Any]) -> None:
    """Print the report that `main` makes: a row for all episodes, one for each task and one for each period.

    A row has the number of episodes and three rates per 1,000 episodes: with violations, with wrong canaries, and with
    other tampering.
    """
    print(f"{'':<48}{'episodes':>9}{'violating':>11}{'canaries':>10}{'tampering':>11}   (per 1,000 episodes)")
    for title, group in (("", {"all": report["total"]}), ("task", report["tasks"]), ("time", report["times"])):
        if title:
            print(f"by {title}")
        for name, count in group.items():
            rates = count["per_1000_episodes"]
            figures = "".join(
                f"{rates[key]:>{width}g}" for key, width in (("violating", 11), ("canaries", 10), ("tampering", 11))
            )
            print(f"  {printable(name[:44]):<46}{count['episodes']:>9}{figures}")
