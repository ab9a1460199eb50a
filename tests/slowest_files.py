"""Lists the test files that cost most processor time, and has them start first where tests run side by side.

A run of suites ends with the list; ``python -m pytest --slowest-files 10 tests/server`` makes it of any tests. Counted
are the process that runs the tests and the processes that it started and waited for. Wall time would depend on the
other load of the machine.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Generator
from typing import TYPE_CHECKING

from pluggy import HookimplMarker

if TYPE_CHECKING:  # who runs suites needs the list, and starts sooner without pytest
    import pytest

hookimpl = HookimplMarker("pytest")
SLOWEST = {
    "tests/test_suites.py": "runs the suites of a small project many times, each in processes of its own",
    "tests/envs/test_bundled_tasks.py": "every bundled task is played several times in real sandboxes",
    "tests/trainer/test_trl_channels.py": "most of its tests train with TRL for some steps",
    "tests/envs/swe/test_prepare_real.py": "prepares and validates instances in real sandboxes, with pip inside",
    "tests/envs/test_task_checks.py": "`errata tasks check` plays and grades tasks in real sandboxes",
    "tests/envs/swe/test_prepare_environment.py": "builds environments with pip inside a sandbox",
    "tests/protocol/test_detect_shell.py": "600 random scripts, and inputs long enough to show that work is linear",
    "tests/envs/test_verifier_tools.py": "grades in real sandboxes, with test frameworks of several kinds",
    "tests/trainer/test_trl_ddp.py": "four processes import torch and TRL; three runs on two ranks and alone",
    "tests/trainer/test_fsdp.py": "three processes import torch; seven runs on two ranks, and nine alone",
    "tests/conformance/test_kit.py": "the whole kit against real servers",
    "tests/sandbox/test_hostile.py": "hostile commands in real sandboxes, each until its limit ends it",
    "tests/server/test_mux_simulation.py": "150 schedules of the whole server, most with an index, and seven controls",
    "tests/trainer/test_trl_teachers.py": "most of its tests train with TRL for a step, with teachers",
    "tests/trainer/test_projects.py": "trains a tiny policy, and plays generated tasks in the real terminal",
}
"""Files that cost most processor time in their suites, each with the reason. They start first."""

CPU_S = "cpu_s"
"""Name of the property of a report that has the processor time in seconds."""


def order(items: list[pytest.Item]) -> None:
    """Sort tests so that the slowest files come first: one that starts last would leave the other processes idle."""
    places = {file: place for place, file in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def cpu_s() -> float:
    """Return the processor time of this process and of the children that it has waited for, in seconds."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


class Times:
    """A pytest plugin that adds up what the reports of tests say of each file.

    With pytest-xdist they come from its workers.

    Args:
        shown: Number of files in the list at the end; 0 prints none.
    """

    def __init__(self, shown: int) -> None:
        self.shown = shown
        self.cpu: Counter[str] = Counter()
        self.wall: Counter[str] = Counter()
        self._last = 0.0

    @hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Begin to count."""
        self._last = cpu_s()
        return (yield)

    @hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add to a report what set-up, test or teardown took."""
        report = yield
        now = cpu_s()
        report.user_properties = [*report.user_properties, (CPU_S, now - self._last)]
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a report to its file."""
        file = report.nodeid.partition("::")[0]
        self.cpu[file] += dict(report.user_properties).get(CPU_S, 0.0)  # type: ignore[arg-type, call-overload]
        self.wall[file] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the list, if one is asked for."""
        if not self.shown:
            return
        terminalreporter.section(f"{sum(self.cpu.values()):.0f} s of CPU in tests; the files with most")
        for file, used in self.cpu.most_common(self.shown):
            reason = f": {SLOWEST[file]}" if file in SLOWEST else ""
            terminalreporter.write_line(f"{used:6.1f} s CPU {self.wall[file]:6.1f} s  {file}{reason}")
