"""`Metrics`: figures of a running server in Prometheus' text format; docs/metrics.md names them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.utils import floatToGoString

from errata_protocol.markers import ErrorKind

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_KINDS = frozenset(ErrorKind)
_GROUPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)


class Metrics:
    """What one runtime counts. A registry of its own: two servers in one process do not mix."""

    def __init__(self) -> None:
        self._registry = _Registry()
        self._watched: dict[str, tuple[Callable[[], int], Callable[[], int]]] = {}
        one = ("environment",)
        self._opened = Counter("errata_sessions_opened_total", "Sessions opened.", one, registry=self._registry)
        self._ended = Counter(
            "errata_sessions_ended_total", "Sessions ended, by how.", (*one, "how"), registry=self._registry
        )
        self._active = Gauge(
            "errata_sessions_active", "Sessions that hold an environment instance.", one, registry=self._registry
        )
        self._detached = Gauge(
            "errata_sessions_detached", "Of those, sessions without a socket.", one, registry=self._registry
        )
        self._requests = _Durations(
            "errata_request_seconds",
            "Time from admission to commit of a mutating request, by kind and outcome (ok, or an error code).",
            (*one, "kind", "outcome"),
        )
        self._registry.register(self._requests)
        self._refused = Counter(
            "errata_sessions_refused_total",
            "Sessions refused at a limit of environment instances, by whose limit it is.",
            (*one, "of"),
            registry=self._registry,
        )
        self._evicted = Counter(
            "errata_sessions_evicted_total",
            "Detached sessions whose instance was taken for another's, by what became of them.",
            (*one, "how"),
            registry=self._registry,
        )
        self._reexecuted = Counter(
            "errata_reexecutions_total",
            "Sessions brought back by running their requests again, by outcome.",
            (*one, "outcome"),
            registry=self._registry,
        )
        self._rewarded = Counter(
            "errata_rewards_total",
            "Late rewards committed, by who gave them.",
            (*one, "origin"),
            registry=self._registry,
        )
        self._marked = Counter(
            "errata_marked_turns_total",
            "Turns committed with an error marker, by its kind.",
            (*one, "error_kind"),
            registry=self._registry,
        )
        self._commit = Histogram(
            "errata_journal_commit_seconds",
            "Time that one transaction took to be durable; failed attempts too.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._group = Histogram(
            "errata_journal_group_commits",
            "Commits that shared a transaction.",
            buckets=_GROUPS,
            registry=self._registry,
        )

    def watch(self, environment: str, active: Callable[[], int], detached: Callable[[], int]) -> None:
        """Ask these functions for an environment's gauges whenever they are read."""
        self._active.labels(environment).set_function(active)
        self._detached.labels(environment).set_function(detached)
        self._watched[environment] = (active, detached)

    def sessions(self) -> tuple[int, int]:
        """Return how many sessions of all environments hold an instance, and how many of those have no socket."""
        return sum(active() for active, _ in self._watched.values()), sum(away() for _, away in self._watched.values())

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge that asks ``value`` whenever it is read."""
        Gauge(name, text, registry=self._registry).set_function(value)

    def counter(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a counter that somebody else keeps: ``value`` is asked whenever it is read."""
        self._registry.register(_KeptElsewhere(name, text, value))

    def opened(self, environment: str) -> None:
        """Count a session that was opened."""
        self._opened.labels(environment).inc()

    def ended(self, environment: str, how: str) -> None:
        """Count a session that is over: ``closed`` or ``lost``."""
        self._ended.labels(environment, how).inc()

    def refused(self, environment: str, of: str) -> None:
        """Count a session that was refused at the limit of the ``environment`` or of its ``principal``."""
        self._refused.labels(environment, of).inc()

    def evicted(self, environment: str, how: str) -> None:
        """Count a detached session that was evicted for another: ``hibernated`` or ``lost``."""
        self._evicted.labels(environment, how).inc()

    def reexecuted(self, environment: str, outcome: str) -> None:
        """Count a session whose requests were run again: ``ok``, ``differs`` or ``failed``."""
        self._reexecuted.labels(environment, outcome).inc()

    def rewarded(self, environment: str, origin: str) -> None:
        """Count a late reward: of the ``environment`` itself, or ``posted``."""
        self._rewarded.labels(environment, origin).inc()

    def marked(self, environment: str, error_kind: str) -> None:
        """Count a turn that was committed with an error marker. A kind that the protocol does not name is ``other``."""
        self._marked.labels(environment, error_kind if error_kind in _KINDS else "other").inc()

    def written(self, commits: int, seconds: float) -> None:
        """Count one transaction of the journal; from any thread."""
        self._group.observe(commits)
        self._commit.observe(seconds)

    def request(self, environment: str, kind: str, outcome: str, seconds: float) -> None:
        """Count a mutating request: how it ended, and after how long."""
        labels = (environment, kind, outcome)
        series = self._requests.series.get(labels) or self._requests.add(labels)
        series[bisect_left(_SECONDS, seconds)] += 1
        series[_SUM] += seconds

    def text(self) -> bytes:
        """Return all figures as a scrape of ``/metrics`` reads them."""
        return generate_latest(self._registry)


class _Registry(CollectorRegistry):
    """Leaves out the time at which each series began: it doubles the text, and the library's switch is global."""

    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


_SUM = len(_SECONDS) + 1
"""Where a series of `_Durations` has the sum of what was observed, behind a count for each bucket."""


class _Durations:
    """A histogram for every step: the library's takes two locks and ten times as long.

    Counts of two threads that observe at the same moment may lose one of them; a server observes on one event loop.

    Attributes:
        series: By the values of the labels, the counts and the sum that an observation adds to.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.series: dict[tuple[str, ...], list[float]] = {}

    def add(self, labels: tuple[str, ...]) -> list[float]:
        """Begin a series."""
        series = self.series[labels] = [0] * (_SUM + 1)
        return series

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*map(floatToGoString, _SECONDS), "+Inf"]
        for labels, series in list(self.series.items()):
            family.add_metric(labels, list(zip(bounds, accumulate(series[:_SUM]), strict=True)), series[_SUM])
        yield family


class _KeptElsewhere:
    def __init__(self, name: str, text: str, value: Callable[[], float]) -> None:
        self._name, self._text, self._value = name, text, value

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._text, value=self._value())
