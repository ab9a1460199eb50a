"""What the scripted agent does: real mistakes of many kinds on the way, as a small model makes them."""

from __future__ import annotations

from dataclasses import dataclass

from ..models import TerminalAction


@dataclass(frozen=True, slots=True)
class Episode:
    """One task played from reset to submit.

    Args:
        task_id: Id of the bundled task.
        actions: Actions in order; the last is ``submit``.
        fork_at: Delivery to fork from; None if the episode ends well.
        better: Actions of the fork, the last of which is ``submit``; empty without a fork.
    """

    task_id: str
    actions: tuple[TerminalAction, ...]
    fork_at: int | None = None
    better: tuple[TerminalAction, ...] = ()


def run(command: str, timeout_s: float | None = None) -> TerminalAction:
    """Return a ``run`` action."""
    return TerminalAction(tool="run", command=command, timeout_s=timeout_s)


SUBMIT = TerminalAction(tool="submit")

_RESOLVED = """{
  "name": "relay",
  "port": 9090,
  "timeout_s": 60,
  "retries": 5,
  "log": "info",
  "tls": true,
  "queue": "fast"
}
"""

_INTERVALS = '''"""Half-open integer intervals ``(start, end)``: start belongs to the interval, end does not."""


def merge(intervals):
    """Return the union of the intervals as sorted, disjoint ones; touching ones are joined, empty ones dropped."""
    merged = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def gaps(intervals, start, end):
    """Return the parts of ``(start, end)`` that no interval covers, sorted."""
    free = []
    at = start
    for low, high in merge(intervals):
        if min(low, end) > at:
            free.append((at, min(low, end)))
        at = max(at, high)
    if at < end:
        free.append((at, end))
    return free


def overlap(one, other):
    """Return how many integers lie in both intervals."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
'''

EPISODES = (
    Episode(
        "access-report",
        (
            run("head -2 acces.log"),
            run("head -2 access.log"),
            run("cut -d' ' -f9 access.log | countlines"),
            run("sort --reverze access.log"),
            run("awk '{print $1' access.log"),
            run("curl -s https://example.com/GeoIP.csv -o geo.csv"),
            TerminalAction(tool="search", command="status 500"),
            run(
                'awk -F\'"\' \'{split($3, s, " "); split($1, a, " "); if (s[1] ~ /^5/) n[a[1]]++} '
                "END {for (i in n) print n[i], i}' access.log | LC_ALL=C sort -k1,1nr -k2,2 | head -n 5 "
                "> top_errors.txt; cat top_errors.txt"
            ),
            run(
                'awk -F\'"\' \'{split($2, q, " "); split($3, s, " "); if (q[1] == "GET" && q[2] ~ /^\\/api\\// && '
                's[1] ~ /^2/ && s[2] != "-") sum += s[2]} END {print sum + 0}\' access.log > bytes.txt'
            ),
            run(
                "{ echo hour,requests; cut -d: -f2 access.log | sort | uniq -c | awk '{print $2\",\"$1}'; } > hours.csv"
            ),
            SUBMIT,
        ),
    ),
    Episode(
        "python-intervals",
        (
            run("cd intervals && python3 -m pytest -q"),
            run("python3 -c 'import interval'"),
            run("python3 -c 'import intervals; print(intervals.merge(None))'"),
            run("sleep 30", timeout_s=1.0),
            run("python3 -c 'x = bytearray(10**10)'"),
            TerminalAction(tool="write_file", path="intervals.py", content=_INTERVALS),
            run("python3 -m pytest -q"),
            SUBMIT,
        ),
    ),
    Episode(
        "c-run-length",
        (
            run("make -C rle"),
            run("chown root rle/Makefile"),
            SUBMIT,
        ),
    ),
    Episode(
        "git-merge-conflict",
        (
            run("cd relay && git log --oneline --graph --all"),
            run("git merge queue"),
            run("git diff --name-only --diff-filter=U"),
            run("git checkout --ours settings.json && git add settings.json && git commit -qm 'Merge branch queue'"),
            SUBMIT,
        ),
        fork_at=3,
        better=(
            run("cat settings.json"),
            TerminalAction(tool="write_file", path="settings.json", content=_RESOLVED),
            run("git add settings.json && git commit -qm 'Merge branch queue'"),
            SUBMIT,
        ),
    ),
)
