"""Run suites of tests: `make test`, `.ci/run`, `make test-NAME`."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime

from ..slowest_files import SLOWEST
from . import keys
from .records import Flaky, Pass, Records
from .run import (
    LOGS,
    NO_TIME,
    OPENENV_ABSENT,
    UNAVAILABLE,
    Processes,
    Result,
    run,
    run_again,
    start_engine,
    starts_engine,
    stop_engine,
    unexpected,
)
from .table import Suite, load

MOST_FLAKY = 3
"""Number of flaky tests that one run may have."""


class Run:
    """Runs suites tier by tier, and prints what became of them.

    Args:
        common: Paths that every key has.
        records: Records of earlier runs, whose passes are not repeated; None if they are.
        ci: Whether failed tests are run again, and passes and flaky tests are recorded.
        at_once: Number of suites that run side by side.
        workers: Number of processes of a suite that runs alone.
        say: Called with each line of progress.
        left_s: Seconds until suites of tier 3 are ended unfinished, and no more of them begun.
    """

    def __init__(
        self,
        common: tuple[str, ...],
        records: Records | None,
        *,
        ci: bool,
        at_once: int,
        workers: int,
        say: Callable[[str], None],
        left_s: float = math.inf,
    ) -> None:
        self._common = common
        self._records = records
        self._ci = ci
        self._at_once = at_once
        self._workers = workers
        self._say = say
        self.processes = Processes(time.monotonic() + left_s)
        self.results: list[Result] = []
        self.seconds: Counter[int] = Counter()

    def tier(self, number: int, suites: list[Suite]) -> bool:
        """Run suites side by side, run their failed tests again, and return whether all passed."""
        began = time.monotonic()
        todo = [result for result in map(self._planned, suites) if result.status != "unchanged"]
        if all(result.suite.may_wait for result in todo):
            todo = self._ordered(todo)
        self._start_engines(todo)
        alone = [result for result in todo if result.suite.both or len(todo) == 1]
        for result in alone:
            self._one(result, max(self._workers, result.suite.workers), shown=len(todo) == 1)
        self._side_by_side([result for result in todo if result not in alone])
        if self._ci and 0 < sum(len(result.failed) for result in todo) <= MOST_FLAKY:
            for result in todo:
                if result.failed:
                    self._say(f"{result.suite.name}: running {len(result.failed)} failed tests again, alone")
                    run_again(result, self.processes)
                    Records().add_flaky([Flaky(test=test, date=_now(), commit=_commit()) for test in result.flaky])
        self.seconds[number] += int(time.monotonic() - began)
        return all(result.status != "failed" for result in todo)

    def _start_engines(self, todo: list[Result]) -> None:
        """Start the container engines of several suites before any of them uses one.

        An engine that starts makes the packet filter's chains anew, in which the other engines have their containers'
        ports: a container that another one starts at that moment fails ("No chain/target/match by that name").
        """
        engines = _engines(todo)
        if len(engines) > 1:
            for suite in engines:
                start_engine(suite, self.processes)

    def stop_engines(self) -> None:
        """Stop the container engines that were started for suites."""
        for suite in _engines(self.results):
            stop_engine(suite)

    def _parts(self, suite: Suite) -> dict[str, str]:
        return keys.parts(suite, self._common, keys.working_tree())

    def _planned(self, suite: Suite) -> Result:
        result = Result(suite=suite)
        self.results.append(result)
        if suite.keyed and self._records:
            key = keys.key(self._parts(suite))
            if known := self._records.passed(suite.name, key):
                result.status, result.why = "unchanged", f"unchanged since {known.key}, passed on {known.date[:10]}"
                self._say(f"{suite.name}: {result.why}")
        return result

    def _ordered(self, todo: list[Result]) -> list[Result]:
        """Return the longest first, so that none runs alone at the end; but where the time may be up before all have
        run, those that passed longest ago, so that each has its turn in one of the next runs."""
        known = {result.suite.name: Records().last_pass(result.suite.name) for result in todo}
        needed_s = sum(took for _, took in known.values()) / self._at_once
        fits = needed_s < self.processes.left_s()
        return sorted(todo, key=lambda result: -known[result.suite.name][1] if fits else known[result.suite.name][0])

    def _side_by_side(self, todo: list[Result]) -> None:
        waiting: queue.SimpleQueue[Result] = queue.SimpleQueue()
        for result in todo:
            waiting.put(result)

        def work() -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    result = waiting.get_nowait()
                    self._one(result, result.suite.workers, shown=False)

        threads = [threading.Thread(target=work) for _ in range(min(self._at_once, len(todo)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _one(self, result: Result, workers: int, *, shown: bool) -> None:
        if self.processes.ended:
            result.status, result.why = "not run", "the run was ended"
            return
        suite = result.suite
        recorded = self._ci and suite.keyed
        before = self._parts(suite) if recorded else {}
        self._say(f"{suite.name} ...")
        run(result, self.processes, workers, shown=shown)
        self._say(line(result))
        if recorded and result.status == "passed" and not _lacks_openenv(result):
            after = self._parts(suite)
            # The suite may have installed a program whose version was not known before. Files must be as they were.
            if {name: after[name] if value == keys.ABSENT else value for name, value in before.items()} == after:
                key = keys.key(after)
                Records().keep(
                    Pass(
                        suite=suite.name,
                        key=key,
                        date=_now(),
                        commit=_commit(),
                        passed=result.passed,
                        seconds=int(result.seconds),
                    )
                )
            else:
                self._say(f"{suite.name}: what it uses changed while it ran, so nothing is recorded")


def _engines(results: list[Result]) -> list[Suite]:
    """Return a suite for each of the engines that are started for some."""
    return list({one.suite.engine: one.suite for one in results if starts_engine(one.suite)}.values())


def _lacks_openenv(result: Result) -> bool:
    return any(OPENENV_ABSENT in reason for reason in result.skipped)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _commit() -> str:
    return keys.git("rev-parse", "HEAD")


def line(result: Result) -> str:
    """Return a suite's line of the summary."""
    skipped = sum(result.skipped.values())
    counts = f"{result.passed} passed" + (f", {skipped} skipped" if skipped else "")
    told = {
        "passed": counts if result.suite.tests else "ok",
        "failed": f"FAILED: {len(result.failed)} failed, {counts}",
        "not run": f"not run: {result.why}",
        "unchanged": result.why,
    }[result.status]
    flaky = f", {len(result.flaky)} flaky" if result.flaky else ""
    return f"{result.suite.name:<14} {result.seconds:5.0f} s  {told}{flaky}"


def summary(run: Run, before: list[Flaky], seconds: float) -> int:
    """Print what became of all suites, with what failed last, and return the exit status."""
    results = run.results
    print(f"\n=== summary, {seconds / 60:.1f} minutes", flush=True)
    for result in results:
        print(f"tier {result.suite.tier}  {line(result)}")
    tiers = ", ".join(f"tier {tier} {seconds} s" for tier, seconds in sorted(run.seconds.items()))
    cpu: Counter[str] = sum((result.cpu_s for result in results), Counter())
    print(f"{tiers}; {cpu.total():.0f} s of CPU in tests. The files with most:")
    for file, used in cpu.most_common(10):
        print(f"{used:7.1f} s CPU  {file}{': ' + SLOWEST[file] if file in SLOWEST else ''}")
    skipped: Counter[str] = sum((result.skipped for result in results), Counter())
    for reason, count in skipped.most_common():
        ours = [result.suite.name for result in results if reason in unexpected(result)]
        print(f"skipped {count}: {reason}" + (f" (.ci/run fails on it: {', '.join(ours)})" if ours else ""))
    earlier = {one.test: one for one in before}
    flaky = [test for result in results for test in result.flaky]
    too_often = [test for test, count in Counter(flaky).items() if count > 1 or test in earlier]
    for test in flaky:
        known = f" (also on {earlier[test].date[:10]}, {earlier[test].commit[:8]})" if test in earlier else ""
        print(f"FLAKY {test}{known}")
    failed = [(result.suite.name, test, text) for result in results for test, text in result.failed.items()]
    for suite, test, text in failed:
        print(f"\n--- [{suite}] {test}\n{text}")
    for suite, test, _ in failed:
        print(f"FAILED [{suite}] {test}")
    if not_run := [result.suite.name for result in results if result.status == "not run"]:
        print(f"not run (above): {', '.join(not_run)}")
    for result in results:
        if result.why == NO_TIME:
            print(f"NOT TESTED {result.suite.name}: {NO_TIME}; make test-{result.suite.name} runs it")
    if too_often:
        print(f"failed: a test was flaky for the second time: mend it, then remove it from {Records().flaky_file}")
    if len(flaky) > MOST_FLAKY:
        print(f"failed: {len(flaky)} flaky tests, more than {MOST_FLAKY}")
    print(f"{sum(r.passed for r in results)} passed, {len(failed)} failed, {skipped.total()} skipped", flush=True)
    broken = any(result.status == "failed" for result in results)
    return 1 if broken or too_often or len(flaky) > MOST_FLAKY else 0


def write_summary(run: Run, seconds: float) -> None:
    """Write what became of all suites to ``.cache/ci/summary.json``."""
    told = [
        {
            "suite": result.suite.name,
            "tier": result.suite.tier,
            "status": result.status,
            "why": result.why,
            "seconds": round(result.seconds, 1),
            "passed": result.passed,
            "failed": result.failed,
            "flaky": result.flaky,
            "skipped": dict(result.skipped),
            "cpu_s": dict(result.cpu_s),
        }
        for result in run.results
    ]
    text = json.dumps({"seconds": round(seconds, 1), "suites": told}, indent=1)
    (LOGS / "summary.json").write_text(text, encoding="utf-8")


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=__doc__)
    parser.add_argument("suites", nargs="*", help="suites to run; without any, those of --tiers")
    parser.add_argument("--tiers", type=int, nargs="+", default=[], help="tiers in order; one may be given twice")
    parser.add_argument(
        "--ci", action="store_true", help="skip unchanged suites, run failed tests again, and record outcomes"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="end suites of tier 3, and begin no more, so many minutes after the start ($CI_BEGAN, else now)",
    )
    parser.add_argument("--keep-going", action="store_true", help="go on with the next tier after one that failed")
    more = (os.cpu_count() or 1) + 1  # tests wait for a third of their time
    parser.add_argument("--at-once", type=int, default=more, help="suites that run side by side (default: cores + 1)")
    parser.add_argument("--workers", type=int, default=more, help="processes of a suite that runs alone (cores + 1)")
    parser.add_argument("--list", action="store_true", help="show the suites and exit")
    parser.add_argument("--keys", action="store_true", help="show the keys of the suites, as JSON, and exit")
    args = parser.parse_args()
    common, suites = load()
    if unknown := [name for name in args.suites if name not in suites]:
        parser.error(f"no suite {', '.join(unknown)}; there are {', '.join(suites)}")
    tiers = [(tier, [one for one in suites.values() if one.tier == tier]) for tier in args.tiers]
    if args.suites:
        tiers = [(suites[name].tier, [suites[name]]) for name in args.suites]
    if args.list:
        print("\n".join(f"{one.name:<14} tier {one.tier}  {one.about}" for one in suites.values()))
        return 0
    if args.keys:
        tree = keys.working_tree()
        chosen = [suite for _, tier in tiers for suite in tier]
        found = {suite.name: keys.parts(suite, common, tree) for suite in chosen}
        print(json.dumps({name: {"key": keys.key(one), **one} for name, one in found.items()}, indent=1))
        return 0
    return run_all(args, common, tiers)


def run_all(args: argparse.Namespace, common: tuple[str, ...], tiers: list[tuple[int, list[Suite]]]) -> int:
    """Run the tiers and return the exit status."""
    began = float(os.environ.get("CI_BEGAN") or time.time())
    LOGS.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        # One write, because suites that run side by side say something at the same time.
        os.write(1, f"{(time.time() - began) / 60:5.1f} min  {text}\n".encode())

    whole = Run(
        common,
        Records() if args.ci and not args.suites else None,
        ci=args.ci,
        at_once=args.at_once,
        workers=args.workers,
        say=say,
        left_s=began + args.minutes * 60 - time.time(),
    )

    stopped: list[int] = []

    def stop(number: int, _: object) -> None:
        stopped.append(number)
        whole.processes.end()  # the suites that run then end as failed, and the others are not run

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)

    def run_tiers() -> None:
        for number, suites in tiers:
            if not whole.tier(number, suites) and not args.keep_going:
                break

    try:
        before = Records().flaky()
        # Not in this thread: a signal's handler, which runs in it, would come between a process and the list of those
        # that it has to end.
        running = ThreadPoolExecutor(1).submit(run_tiers)
        while not running.done():  # a signal that comes just before a wait is seen at its end only
            wait([running], timeout=0.5)
        running.result()
    except (ValueError, OSError) as error:
        print(f"suites: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"suites: {error}: {error.stderr.strip()}", file=sys.stderr)
        return 2
    finally:
        whole.stop_engines()
    write_summary(whole, time.time() - began)
    status = summary(whole, before, time.time() - began)
    if stopped:
        print(f"failed: the run was ended by {signal.Signals(stopped[0]).name}", flush=True)
        return 128 + stopped[0]
    if args.suites and not status and any(result.status == "not run" for result in whole.results):
        return UNAVAILABLE
    return status


if __name__ == "__main__":
    sys.exit(main())
