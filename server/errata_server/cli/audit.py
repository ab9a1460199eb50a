"""``errata audit``: count episodes with broken rules or tampering.

It counts turns marked as violations, the hint keys with which graders report tampering, and late rewards by source. In
a data directory it counts the episodes of all owners; a server shows those of one token, and the report says so.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from errata_protocol.errors import InvalidRequest, RemoteProtocolError
from errata_protocol.markers import ErrorKind
from errata_protocol.names import shown
from errata_protocol.replay import EpisodeDetail, RewardRecord

from .source import Source, directory
from .tables import Column, Table

CANARY = "policy.canary"
TAMPERING = "policy.tampering"
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

    Raises:
        InvalidRequest: ``--max-per-1000`` is given, and there is no episode that could be looked at.
    """
    parser = argparse.ArgumentParser(
        prog="errata audit", description="Violations and canary failures per 1,000 episodes, by task and over time."
    )
    help = "Journal to read, or a directory of several (ERRATA_DATA_DIR)."
    parser.add_argument("--data-dir", type=directory, metavar="PATH", help=help)
    parser.add_argument("--url", help="Server to ask instead of reading the disk.")
    parser.add_argument("--environment", metavar="NAME", help="Only episodes of this environment.")
    parser.add_argument("--by", choices=sorted(_FORMATS), default="day", help="Length of the periods.")
    bound = "End with status 1 if more episodes of 1,000 have a violation, wrong canaries or other tampering."
    parser.add_argument("--max-per-1000", type=_rate, metavar="N", help=f"{bound} An error if there is no episode.")
    parser.add_argument("--json", action="store_true", help="Machine-readable.")
    options = parser.parse_args(list(arguments))
    total, tasks, times = Count(), dict[str, Count](), dict[str, Count]()
    owners: dict[str, Count] = {}
    with Source(options.data_dir, options.url) as source:
        for episode in _episodes(source, options.environment):
            late = source.rewards(episode.eid)
            period = _period(episode, options.by)
            task = f"{episode.environment}/{episode.task or '-'}"
            counts = [total, tasks.setdefault(task, Count()), times.setdefault(period, Count())]
            if owner := source.owner(episode.eid):
                counts.append(owners.setdefault(owner, Count()))
            for count in counts:
                count.add(episode, late)
        seen = source.seen
    if options.max_per_1000 is not None and not total.episodes:
        raise InvalidRequest(
            f"no episode{f' of {options.environment}' if options.environment else ''} in {seen}: nothing was audited, "
            "so --max-per-1000 cannot be met; check --data-dir, --url, ERRATA_TOKEN and --environment"
        )
    report: dict[str, Any] = {
        "source": seen,
        "total": total.summary(),
        "tasks": {name: tasks[name].summary() for name in sorted(tasks)},
        "times": {name: times[name].summary() for name in sorted(times)},
        "owners": {name: owners[name].summary() for name in sorted(owners)},
    }
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    highest = max(report["total"]["per_1000_episodes"].values())
    return int(options.max_per_1000 is not None and highest > options.max_per_1000)


def _rate(text: str) -> float:
    """Parse the bound of a rate: nothing is larger than NaN, and a rate is at most 1000 episodes of 1000."""
    rate = float(text)
    if not 0 <= rate <= _PER:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate from 0 to {_PER}")
    return rate


def _episodes(source: Source, environment: str | None) -> Iterable[EpisodeDetail]:
    """Yield all episodes, page by page.

    Raises:
        RemoteProtocolError: The list has no end, as that of no server of ours: a page leads back to one that was read,
            or has no episode and leads on, or there are more than `MAX_PAGES`.
    """
    cursor = None
    read: set[str | None] = set()
    known: set[str] = set()
    while len(read) < MAX_PAGES:
        read.add(cursor)
        query = {"limit": 500, "cursor": cursor, "environment": environment, "error_kind": None, "episode_id": None}
        page = source.page(query)
        for episode in page.episodes:
            if episode.eid not in known:
                known.add(episode.eid)  # a copy of a journal, as of a salvage, has the same episodes
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


def _print(report: dict[str, Any]) -> None:
    """Print the report that `main` makes: a row for all episodes, and one for each task, period and owner.

    A row has the number of episodes and three rates per 1,000 episodes: with violations, with wrong canaries, and with
    other tampering.
    """
    names = ("violating", "canaries", "tampering")
    table = Table("", *(Column(name, right=True, whole=True) for name in ("episodes", *names)))
    for group in ("tasks", "times", "owners"):
        if group == "tasks":
            table.add("all", *_figures(report["total"], names))
        if report[group] and (group != "owners" or len(report[group]) > 1):
            table.add(f"by {group.removesuffix('s')}", "", "", "", "")
            for name, count in report[group].items():
                table.add(f"  {name}", *_figures(count, names))
    table.end()
    print(f"the last three per 1,000 episodes; read: {report['source']}")


def _figures(count: dict[str, Any], names: Sequence[str]) -> list[str]:
    return [str(count["episodes"]), *(f"{count['per_1000_episodes'][name]:g}" for name in names)]
