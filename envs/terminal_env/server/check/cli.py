"""``errata tasks``: check that tasks reward their solution and nothing else."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from errata_protocol.errors import SandboxUnavailable
from errata_protocol.printable import printable
from errata_server.log import level_of
from errata_server.sandbox import registry
from errata_server.sandbox.base import Backend
from errata_server.settings import Settings

from ..tasks import BUNDLED, Task, load_tasks
from .checker import check
from .results import BUNDLED_RESULTS, Result, Results, base_id

_ABOUT = """Check tasks before they are served. Three times each: the untouched start has to be worth less than 1, the
reference solution 1, and without its tools the verifier has to fail instead of scoring. Then programs that solve
nothing, such as deleting everything, have to be worth 0. A server refuses a local task that has not passed."""


@level_of("errata.terminal", logging.CRITICAL)  # what is broken is printed
def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 0 where all tasks passed, 1 where one did not, 2 for wrong options."""
    options = _parser().parse_args(arguments)
    if options.write:
        options.again = options.bundled = True
    if not options.directories and not options.bundled:
        _say("name a directory of tasks, or say --bundled")
        return 2
    tasks, broken = _tasks(options.directories, bundled=options.bundled)
    if not tasks and not broken:
        _say(f"no tasks below {', '.join(map(str, options.directories))}: a task is a directory with task.toml")
        return 2
    results = asyncio.run(_run(tasks, options)) if tasks else []
    if options.json:
        unread = [{"task": name, "problems": [why]} for name, why in broken.items()]
        print(json.dumps([*(result.record() for result in results), *unread]))
    else:
        for why in broken.values():
            print(f"FAILED {printable(why)}")
        passed = sum(_passed(result, options) for result in results)
        print(f"{passed} of {len(results) + len(broken)} passed")
    if options.write and not broken:
        records = [result.record() for result in sorted(results, key=lambda result: result.task)]
        BUNDLED_RESULTS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        _say(f"wrote {BUNDLED_RESULTS}")
    return 0 if not broken and all(_passed(result, options) for result in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="errata tasks", description="Tasks of the terminal environment.")
    command = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "check", help="Check that tasks reward their solution and nothing else.", description=_ABOUT
    )
    command.add_argument("directories", nargs="*", type=Path, metavar="DIR", help="A task, or a directory of tasks.")
    command.add_argument("--bundled", action="store_true", help="The tasks of this package, too.")
    command.add_argument(
        "--strict", action="store_true", help="A program that solves nothing and earns something fails."
    )
    command.add_argument("--again", action="store_true", help="Also tasks whose result is known.")
    command.add_argument("--json", action="store_true", help="Print the results as JSON.")
    command.add_argument("--base", action="append", default=[], metavar="NAME=PATH", help="A base tree; repeatable.")
    command.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="Tasks at once.")
    command.add_argument("--write", action="store_true", help="Write the results that ship with the package.")
    return parser


def _tasks(directories: Sequence[Path], *, bundled: bool) -> tuple[list[Task], dict[str, str]]:
    found = load_tasks(directories)
    tasks = [task for split, tasks in found.splits.items() for task in tasks if split != BUNDLED or bundled]
    return tasks, dict(found.broken)


async def _run(tasks: Sequence[Task], options: argparse.Namespace) -> list[Result]:
    settings = Settings()
    bases = dict(settings.base) | dict(_base(entry) for entry in options.base)
    with tempfile.TemporaryDirectory(prefix="errata-tasks-", ignore_cleanup_errors=True) as directory:
        backend = registry.create(settings.sandbox, registry.config_for(Path(directory), bases))
        await backend.start()
        turns = asyncio.Semaphore(max(1, options.jobs))

        async def one(task: Task) -> Result:
            async with turns:
                return await _checked(backend, task, options)

        try:
            return await asyncio.gather(*map(one, tasks))
        finally:
            await backend.close()


async def _checked(backend: Backend, task: Task, options: argparse.Namespace) -> Result:
    results = Results()
    try:
        known = None if options.again else results.find(task, await base_id(backend, task.base))
        result = known or await check(backend, task, progress=lambda line: _say(f"{task.id}: {line}", transient=True))
        if known is None:
            results.keep(result)
    except SandboxUnavailable as error:
        if task.base == "default":
            raise
        known, result = None, Result(task.id, task.whole_digest, task.base, problems=(error.message,))
    if not options.json:
        print(f"{'passed' if _passed(result, options) else 'FAILED'} {task.id}{' (known)' if known else ''}")
        for problem in result.problems:
            print(f"       {printable(problem)}")
        for warning in result.warnings:
            print(f"       warning: {printable(warning)}")
        sys.stdout.flush()
    return result


def _passed(result: Result, options: argparse.Namespace) -> bool:
    return result.passed and not (options.strict and result.holes)


def _base(entry: str) -> tuple[str, Path]:
    name, equals, path = entry.partition("=")
    if not (name and equals and path):
        raise SystemExit(f"errata tasks check: --base takes NAME=PATH, not {entry!r}")
    return name, Path(path)


def _say(line: str, *, transient: bool = False) -> None:
    if not transient or sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
