"""Write the tables of docs/scale.md: what 10,000, 100,000 and a million sessions take, from measured constants.

    scripts/scale.py [--check]

The constants are medians of the reports in bench/results. What nothing measures is an `Assumptions` and said to be one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/scale.md"
RESULTS = ROOT / "bench/results"

SESSIONS = (10_000, 100_000, 1_000_000)
DAY_S = 86_400
KIB, GIB, TB = 1024, 1024**3, 1e12

MUX_1, MUX_64 = "errata, mux, frames of 1", "errata, mux, frames of 64"


@dataclass(frozen=True)
class Assumptions:
    """What the tables suppose.

    Args:
        step_every_s: Time between two steps of a session, seconds.
        steps_a_submit: Steps of a SWE session for one submit.
        busy: Highest share of a core that a worker's process is planned to use, and of a box's cores.
        sessions_a_worker: Most sessions of a worker: the largest number that was measured.
        box_cores: Cores of a box.
        box_gib: Memory of a box, GiB.
    """

    step_every_s: float = 30.0
    steps_a_submit: int = 50
    busy: float = 0.6
    sessions_a_worker: int = 10_000
    box_cores: int = 64
    box_gib: int = 256


@dataclass(frozen=True)
class Constant:
    """A measured number.

    Args:
        name: What it is.
        value: The number.
        unit: Unit of the constant.
        command: The command that gives it.
        file: Report in bench/results that has it.
        load: Load average of the machine when the measurement began, empty where the report has none.
    """

    name: str
    value: float
    unit: str
    command: str
    file: str
    load: str


@dataclass(frozen=True)
class Kind:
    """What a session of a kind costs.

    Args:
        name: Name of the kind of session.
        server_us: CPU of a worker's process for a step.
        below_us: CPU of the processes below it for a step.
        memory_kib: Memory of a worker for a held session.
        disk_kib: Disk of a held session, without what its steps add to the journal.
        journal_bytes: Bytes of the journal for a step, without what its payload has more than the measured one's.
        payload_bytes: Bytes that a payload is assumed to have more than the measured one's.
    """

    name: str
    server_us: float
    below_us: float
    memory_kib: float
    disk_kib: float
    journal_bytes: float
    payload_bytes: float


@dataclass(frozen=True)
class Need:
    """What some sessions of a kind take.

    Args:
        steps_s: Steps a second.
        server_cores: Cores of the workers' processes.
        below_cores: Cores of the processes below them.
        memory_gib: Memory of the workers.
        disk_gib: Disk of held sessions.
        journal_tb_day: Bytes of the journals a day.
        workers: Number of workers.
        boxes: Number of boxes.
    """

    steps_s: float
    server_cores: float
    below_cores: float
    memory_gib: float
    disk_gib: float
    journal_tb_day: float
    workers: int
    boxes: int


def need(kind: Kind, sessions: int, worker_mib: float, given: Assumptions) -> Need:
    """Return what some sessions of a kind take.

    Args:
        kind: The kind.
        sessions: Number of sessions, all held at once.
        worker_mib: Private memory of a worker without sessions.
        given: What is assumed.
    """
    steps_s = sessions / given.step_every_s
    server, below = steps_s * kind.server_us / 1e6, steps_s * kind.below_us / 1e6
    workers = max(math.ceil(server / given.busy), math.ceil(sessions / given.sessions_a_worker))
    memory = sessions * kind.memory_kib * KIB + workers * worker_mib * KIB * KIB
    boxes = max(
        math.ceil((server + below) / (given.box_cores * given.busy)),
        math.ceil(memory / GIB / (given.box_gib * given.busy)),
    )
    return Need(
        steps_s=steps_s,
        server_cores=server,
        below_cores=below,
        memory_gib=memory / GIB,
        disk_gib=sessions * kind.disk_kib * KIB / GIB,
        journal_tb_day=steps_s * (kind.journal_bytes + kind.payload_bytes) * DAY_S / TB,
        workers=workers,
        boxes=boxes,
    )


def resume_s(sessions: int, workers: int, start_s: float, all_s: float, measured: int) -> float:
    """Return how long the sessions of a worker take to be resumed once a process starts on its directory, seconds.

    Args:
        sessions: Number of sessions of all workers.
        workers: Number of workers.
        start_s: Measured time until the first session has made a step.
        all_s: Measured time until all have.
        measured: Number of sessions of that measurement.
    """
    return start_s + (all_s - start_s) * (sessions / workers) / measured


class Measured:
    """The constants, read from the reports.

    Args:
        results: Directory of the reports.
    """

    def __init__(self, results: Path = RESULTS) -> None:
        self._results = results
        swe = json.loads((results / "swe_sessions.json").read_text())
        grading = sorted(found["submit_s"] for found in swe["grading"].values())
        cost = "python bench/swe_sessions.py"
        self.echo_1 = self._of(
            "steps", "steps-any-thread", MUX_1, "server_cpu_us", "CPU a step of echo, frames of 1", "us"
        )
        self.echo_64 = self._of("steps", "steps-any-thread", MUX_64, "server_cpu_us", "the same, frames of 64", "us")
        self.idle = self._of(
            "sessions", "memory", "errata, mux", "kib_per_session", "memory of an idle echo session", "KiB"
        )
        self.asleep = self._of(
            "sessions", "memory", "errata, hibernated", "kib_per_session", "the same, hibernated", "KiB"
        )
        self.echo_bytes = self._of(
            "constants",
            "constants",
            "echo, frames of 64",
            "segment_bytes",
            "segments of the journal a step of echo",
            "B",
        )
        self.echo_written = self._of(
            "constants", "constants", "echo, frames of 64", "written_bytes", "writes to storage a step of echo", "B"
        )
        self.terminal = self._of(
            "terminal", "terminal", MUX_64, "server_cpu_us", "worker's CPU for a terminal's command `true`", "us"
        )
        self.below = self._of(
            "constants", "constants", "terminal", "sandbox_cpu_us", "CPU below the worker for it", "us"
        )
        self.terminal_memory = self._of(
            "terminal", "terminal", MUX_64, "kib_per_session", "memory of a held terminal session", "KiB"
        )
        self.terminal_disk = self._of(
            "terminal", "terminal", MUX_64, "disk_kib_per_session", "disk of one, its command included", "KiB"
        )
        self.terminal_bytes = self._of(
            "constants", "constants", "terminal", "segment_bytes", "segments of the journal a command", "B"
        )
        self.swe_memory = Constant(
            "memory of a held SWE session", swe["many"]["memory_kib_each"], "KiB", cost, "swe_sessions", ""
        )
        self.swe_disk = Constant(
            "disk of one, a command included", swe["many"]["disk_kib_each"], "KiB", cost, "swe_sessions", ""
        )
        self.submit = Constant(
            "a submit of a bundled instance, wall time", grading[len(grading) // 2], "s", cost, "swe_sessions", ""
        )
        self.start = self._of(
            "constants", "constants", "start of a worker", "start_cpu_ms", "CPU of the start of a worker", "ms"
        )
        self.worker = self._of(
            "constants", "constants", "start of a worker", "private_mib", "private memory of a worker", "MiB"
        )
        self.first = self._of(
            "restart",
            "restart",
            MUX_64,
            "first_stepped_s",
            "`kill -9` until the first of 10,000 sessions has stepped",
            "s",
        )
        self.all = self._of("restart", "restart", MUX_64, "all_stepped_s", "until all have", "s")

    def _of(self, file: str, scenario: str, arm: str, key: str, name: str, unit: str) -> Constant:
        report = json.loads((self._results / f"{file}.json").read_text())
        (found,) = (one for one in report["scenarios"] if one["name"] == scenario)
        (figure,) = (one for one in found["figures"] if (one["arm"], one["key"]) == (arm, key))
        command = f"errata bench --only {scenario}"
        return Constant(name, figure["values"]["median"], unit, command, file, f"{found['load_average_before']:.0f}")

    def all_of(self) -> list[Constant]:
        """Return the constants in the order of the table."""
        return [value for value in vars(self).values() if isinstance(value, Constant)]

    def kinds(self, given: Assumptions) -> list[Kind]:
        """Return what the sessions of each kind cost."""
        submit_us = self.submit.value * 1e6 / given.steps_a_submit
        terminal_us, below_us = self.terminal.value, self.below.value
        journal = self.terminal_bytes.value
        return [
            Kind("echo", self.echo_1.value, 0.0, self.idle.value, 0.0, self.echo_bytes.value, 0.0),
            Kind(
                "terminal", terminal_us, below_us, self.terminal_memory.value, self.terminal_disk.value, journal, 2048
            ),
            Kind("SWE", terminal_us, below_us + submit_us, self.swe_memory.value, self.swe_disk.value, journal, 4096),
        ]


def constants(measured: Measured) -> str:
    """Return the table of constants."""
    lines = ["| | median | command | report | load |", "|---|---|---|---|---|"]
    for one in measured.all_of():
        report = f"[{one.file}.json](../bench/results/{one.file}.json)"
        lines.append(f"| {one.name} | {_short(one.value)} {one.unit} | `{one.command}` | {report} | {one.load} |")
    return "\n".join(lines) + "\n"


def needs(measured: Measured, given: Assumptions) -> str:
    """Return the table of what sessions take."""
    heads = ["kind", "sessions", "steps/s", "cores: workers", "cores: below", "memory", "disk held", "journal a day"]
    heads += ["workers", "boxes"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for kind in measured.kinds(given):
        for sessions in SESSIONS:
            it = need(kind, sessions, measured.worker.value, given)
            cells = [kind.name, f"{sessions:,}", _short(it.steps_s), _short(it.server_cores), _short(it.below_cores)]
            cells += [f"{_short(it.memory_gib)} GiB", f"{_short(it.disk_gib)} GiB", f"{_short(it.journal_tb_day)} TB"]
            cells += [f"{it.workers:,}", f"{it.boxes:,}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def losses(measured: Measured, given: Assumptions) -> str:
    """Return the table of what a lost box means, at the largest number of sessions."""
    lines = ["| kind | sessions of a box | workers of a box | resumed after detection |", "|---|---|---|---|"]
    for kind in measured.kinds(given):
        sessions = SESSIONS[-1]
        it = need(kind, sessions, measured.worker.value, given)
        seconds = resume_s(sessions, it.workers, measured.first.value, measured.all.value, 10_000)
        each = math.ceil(it.workers / it.boxes)
        lines.append(f"| {kind.name} | {math.ceil(sessions / it.boxes):,} | {each:,} | {seconds:.1f} s |")
    return "\n".join(lines) + "\n"


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def written(page: str) -> str:
    """Return the page with its tables as the reports give them."""
    measured, given = Measured(), Assumptions()
    tables = {
        "constants": constants(measured),
        "sessions": needs(measured, given),
        "a lost box": losses(measured, given),
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name}: scripts/scale.py -->\n", f"<!-- end of {name} -->\n"
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{PAGE} has no place for the table of {name}")
        page = f"{head}{begin}{table}{end}{tail}"
    return page


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where the page differs")
    check = parser.parse_args().check
    page = PAGE.read_text("utf-8")
    made = written(page)
    if check:
        return int(made != page)
    PAGE.write_text(made, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
