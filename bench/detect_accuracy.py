"""Measure the detectors on labelled outputs: precision, recall, sites, negatives and time.

    python bench/detect_accuracy.py [FILE.jsonl ...] [--json] [--fail-under] [--verbose]

A row has id, cwd, command, exit_code, timed_out, stdout, stderr, expected_kind and expected_site, and optionally
ambiguous, also_accept, also_accept_sites, limit_hit and host_roots: directories of the server, where the command ran on
its machine and in no sandbox; no_site then says that nothing may be a site. Rows marked ambiguous are left out; a null
expected_site, or a null key of it, is not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errata_protocol.detect import detect
from errata_protocol.markers import Detection

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_FILES = (
    ROOT.parent / "shared" / "data" / "error_corpus.jsonl",
    ROOT / "tests" / "protocol" / "data" / "outputs.jsonl",
    ROOT / "tests" / "protocol" / "data" / "outputs2.jsonl",
    ROOT / "tests" / "protocol" / "data" / "swe_turns.jsonl",
    ROOT / "tests" / "protocol" / "data" / "unsandboxed.jsonl",
)
SITE_KEYS = ("file", "line", "test_id", "action_span")
BARS = {"precision": 0.97, "recall": 0.95, "site": 0.9}
MAX_NEGATIVES_MARKED = 1


@dataclass
class Score:
    """Counts over the rows of one file."""

    rows: int = 0
    positives: int = 0
    negatives: int = 0
    right: int = 0
    marked: int = 0
    negatives_marked: int = 0
    sites: Counter[str] = field(default_factory=Counter)
    sites_right: Counter[str] = field(default_factory=Counter)
    confusion: Counter[tuple[str, str]] = field(default_factory=Counter)
    times_ms: list[float] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)

    @property
    def precision(self) -> float:
        """Marked rows with a right kind, by marked rows."""
        return self.right / self.marked if self.marked else 1.0

    @property
    def recall(self) -> float:
        """Rows with an error and a right kind, by rows with an error."""
        return self.right / self.positives if self.positives else 1.0

    def site(self, key: str) -> float:
        """Sites with the right value of ``key``, by rows where it is given."""
        return self.sites_right[key] / self.sites[key] if self.sites[key] else 1.0

    def failures(self) -> list[str]:
        """Return what stays under the bars."""
        out = [f"{n} {getattr(self, n):.3f} < {BARS[n]}" for n in ("precision", "recall") if getattr(self, n) < BARS[n]]
        out += [f"site {k} {self.site(k):.3f} < {BARS['site']}" for k in SITE_KEYS if self.site(k) < BARS["site"]]
        if self.negatives_marked > MAX_NEGATIVES_MARKED:
            out.append(f"{self.negatives_marked} negatives marked")
        return out

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        times = sorted(self.times_ms)
        return {
            "rows": self.rows,
            "positives": self.positives,
            "negatives": self.negatives,
            "precision": round(self.precision, 4),
            "recall": round(self.recall, 4),
            "site": {k: {"accuracy": round(self.site(k), 4), "measured": self.sites[k]} for k in SITE_KEYS},
            "negatives_marked": self.negatives_marked,
            "confusion": {f"{a} -> {b}": n for (a, b), n in sorted(self.confusion.items()) if a != b},
            "time_ms": {"p50": round(times[len(times) // 2], 3), "p99": round(times[int(len(times) * 0.99)], 3)},
        }


def score_rows(rows: list[dict[str, Any]]) -> Score:
    """Run the detectors over labelled rows."""
    score = Score()
    for row in rows:
        if row.get("ambiguous"):
            continue
        score.rows += 1
        start = time.perf_counter()
        found = detect(
            row["command"],
            row["exit_code"],
            row["stdout"],
            row["stderr"],
            timed_out=bool(row.get("timed_out")),
            limit_hit=row.get("limit_hit"),
            cwd=row.get("cwd"),
            is_host_file=_host_files(row["host_roots"]) if row.get("host_roots") else None,
        )
        score.times_ms.append((time.perf_counter() - start) * 1000)
        _count(score, row, found)
    return score


def _count(score: Score, row: dict[str, Any], found: Detection) -> None:
    expected = row["expected_kind"]
    kind = found.error_kind.value if found.error_kind else None
    right = kind == expected or kind in row.get("also_accept", ())
    score.confusion[(str(expected), str(kind))] += 1
    if expected is None:
        score.negatives += 1
        score.negatives_marked += kind is not None and not right
    else:
        score.positives += 1
    if kind is not None:
        score.marked += 1
        score.right += right
    if not right:
        score.misses.append(f"{row['id']}: {row['command'][:100]!r} expected {expected}, got {kind}")
    if expected is not None and row.get("expected_site"):
        _count_site(score, row, found)
    if row.get("no_site"):
        placed = [s for s in found.error_sites if s.file or s.action_span or s.test_id]
        score.sites["action_span"] += 1
        score.sites_right["action_span"] += not placed
        score.misses += [f"{row['id']}: {row['command'][:100]!r} a site where there is none: {s}" for s in placed]


def _host_files(roots: list[str]) -> Callable[[str], bool]:
    return lambda path: path.startswith(tuple(f"{root}/" for root in roots))


def _count_site(score: Score, row: dict[str, Any], found: Detection) -> None:
    expected = row["expected_site"]
    got = found.error_site.model_dump(mode="json") if found.error_site else {}
    others = [s for s in row.get("also_accept_sites", ()) if s]
    accepted = any(all(got.get(k) == v for k, v in s.items() if v is not None) for s in others)
    for key in SITE_KEYS:
        if expected.get(key) is None:
            continue
        score.sites[key] += 1
        if accepted or got.get(key) == expected[key]:
            score.sites_right[key] += 1
        else:
            score.misses.append(
                f"{row['id']}: {row['command'][:100]!r} {key} expected {expected[key]}, got {got.get(key)}"
            )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read one JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def main() -> int:
    """Print the figures of each file; with --fail-under return 1 when one stays under the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--fail-under", action="store_true", help="exit 1 when a figure stays under its bar")
    parser.add_argument("--verbose", action="store_true", help="list every miss")
    options = parser.parse_args()
    files = options.files or [f for f in DEFAULT_FILES if f.exists()]
    if not files:
        parser.error("no labelled outputs found; name a JSON Lines file")
    scores = {path.name: score_rows(read_rows(path)) for path in files}
    if options.json:
        print(json.dumps({name: s.as_dict() for name, s in scores.items()}, indent=2))
    else:
        _print_table(scores, verbose=options.verbose)
    failures = [f"{name}: {failure}" for name, s in scores.items() for failure in s.failures()]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures and options.fail_under else 0


def _print_table(scores: dict[str, Score], *, verbose: bool) -> None:
    for name, score in scores.items():
        figures = score.as_dict()
        print(f"{name}: {score.rows} rows ({score.positives} errors, {score.negatives} negatives)")
        print(
            f"  precision {score.precision:.3f}   recall {score.recall:.3f}   negatives marked {score.negatives_marked}"
        )
        print("  sites     " + "   ".join(f"{k} {score.site(k):.3f} of {score.sites[k]}" for k in SITE_KEYS))
        print(f"  time      p50 {figures['time_ms']['p50']} ms   p99 {figures['time_ms']['p99']} ms")
        for pair, count in figures["confusion"].items():
            print(f"  {count:3d}  {pair}")
        for miss in score.misses if verbose else ():
            print(f"       {miss}")


if __name__ == "__main__":
    sys.exit(main())
