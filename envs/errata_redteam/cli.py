"""``errata redteam``: try known cheats on tasks and instances."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from errata_protocol.errors import ErrataError, InvalidRequest, SandboxUnavailable
from errata_protocol.printable import printable
from errata_server.log import level_of
from errata_server.sandbox.base import Backend
from swe_bench_lite_env.dataset import Instance
from swe_bench_lite_env.programs.inputs import add_inputs, bases_of, chosen, opened, prepared, say
from swe_bench_lite_env.recipes import Recipe
from swe_bench_lite_env.server.offered import bundled
from swe_bench_lite_env.server.prepare.build import Builder
from swe_bench_lite_env.server.prepare.store import Catalogue, Store
from terminal_env.server.tasks import BUNDLED, Task, load_tasks

from . import honest, workspaces
from .adaptive import ADAPTIVE
from .attempt import CORPUS_DATE, CORPUS_VERSION, HONEST, SUGGESTIONS, Attempt
from .campaign import Outcome, campaign, counted
from .instances import InstanceTarget
from .playing import Target
from .repositories import ATTEMPTS
from .tasks import TaskTarget

_ABOUT = """Play attempts to be rewarded without the work on tasks of the terminal or on instances of SWE-bench's form,
and honest work beside their solutions. The exit status is 0 where no attempt was paid and all honest work was paid in
full, 1 where that is not so, and 2 for wrong options, or where the machine failed and nothing was paid."""
_TARGET = """A directory of terminal tasks or one task; a bundled task or instance by its id; terminal or swe_bench_lite
for all bundled ones. Repeatable."""
_ENVIRONMENTS = ("terminal", "swe_bench_lite")
_TIMEOUT_S = 1800.0


@level_of("errata", logging.CRITICAL)  # what is broken is printed
@level_of("errata.redteam", logging.ERROR)
def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 0 where nothing was paid or refused, 1 where something was, 2 for any other failure."""
    options = _parser().parse_args(list(arguments))
    try:
        return asyncio.run(_run(options))
    except ErrataError as error:
        say(f"errata redteam: {printable(error.message)}")
        return 2
    except KeyboardInterrupt:
        say("errata redteam: interrupted")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="errata redteam", description=_ABOUT)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=_TARGET)
    add_inputs(parser, required=False)
    parser.add_argument("--mirror", type=Path, metavar="DIR", help="Git repositories, as owner/name or owner__name.")
    parser.add_argument("--rules", type=int, choices=(4, 5), default=5, help="swebench 5.0.2 or 4.1.0.")
    parser.add_argument("--no-validate", action="store_true", help="Also on instances that were not validated.")
    limit = "Longest run of an instance's tests. Attempts have five times what the gold patch takes, at most this."
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, metavar="S", help=limit)
    parser.add_argument(
        "--class", dest="kinds", action="append", default=[], metavar="NAME", help="Attempts of a class."
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="An attempt by its name; repeatable."
    )
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), metavar="N", help="Attempts at once.")
    return parser


async def _run(options: argparse.Namespace) -> int:
    wanted = _wanted(options)
    tasks, instances = await asyncio.to_thread(_targets, options)
    store, bases = Store(options.store), bases_of(options.base)
    outcomes: list[Outcome] = []
    failed: dict[str, str] = {}
    async with opened(store, bases) as backend:
        builder = Builder(store, backend, bases=bases, mirror=options.mirror, progress=say)
        targets: list[Target] = [TaskTarget(backend, task) for task in tasks]
        targets += [_instance(backend, builder, Catalogue(store, backend), *pair, options) for pair in instances]
        for target in targets:
            try:
                outcomes += await campaign(target, wanted, jobs=options.jobs, progress=say)
            except SandboxUnavailable:
                raise  # of the machine: no other target would fare better
            except ErrataError as error:
                failed[target.name] = error.message
                say(f"{target.name}: {printable(error.message)}")
    if not outcomes and not failed:
        raise InvalidRequest("no target has such an attempt: name others with --class or --only")
    report = _report([target.name for target in targets], outcomes, failed)
    print(json.dumps(report, indent=1) if options.json else _text(report, outcomes))
    return 1 if report["paid"] or report["refused"] else 2 if failed or report["errors"] else 0


def _wanted(options: argparse.Namespace) -> Callable[[Attempt], bool]:
    """Return which attempts count.

    Raises:
        InvalidRequest: There is no such class or attempt.
    """
    everything = (*ATTEMPTS, *ADAPTIVE, *workspaces.ATTEMPTS, *honest.IN_REPOSITORIES, *honest.IN_WORKSPACES)
    names = dict.fromkeys(attempt.name for attempt in everything)
    for what, given, known in (("class", options.kinds, SUGGESTIONS), ("attempt", options.only, names)):
        for name in given:
            if name not in known:
                raise InvalidRequest(f"no {what} {name!r}: there are {', '.join(known)}")
    return lambda attempt: (
        (not options.kinds or attempt.kind in options.kinds) and (not options.only or attempt.name in options.only)
    )


def _targets(options: argparse.Namespace) -> tuple[list[Task], list[tuple[Instance, Recipe]]]:
    """Return the tasks and instances that are meant.

    Raises:
        InvalidRequest: One of them is not there or cannot be read.
    """
    dataset, recipes = bundled()
    own, instances = load_tasks().splits[BUNDLED], []
    tasks: list[Task] = []
    broken: dict[str, str] = {}
    for name in options.targets:
        here = [task for task in own if name in ("terminal", task.id)]
        rows = [row for row in dataset if name in ("swe_bench_lite", row.instance_id)]
        if not here and not rows:
            if not Path(name).is_dir():
                raise InvalidRequest(
                    f"{name!r} is no directory of tasks, no bundled task and no bundled instance: name one, terminal "
                    "or swe_bench_lite; a data set is named with --dataset and --recipes or --images"
                )
            found = load_tasks([Path(name)])
            here = [task for split, some in found.splits.items() for task in some if split != BUNDLED]
            broken |= found.broken
            if not here and not broken:
                raise InvalidRequest(f"no tasks below {name}: a task is a directory with task.toml")
        tasks += here
        instances += [(row, recipes.find(row.instance_id, row.repo)) for row in rows]
    if options.dataset is not None or options.recipes is not None or options.images is not None:
        if options.dataset is None:
            raise InvalidRequest("--recipes and --images are of a data set: name it with --dataset")
        pairs, without = chosen(options, broken)
        instances += pairs
        if without:
            say(f"{len(without)} rows have no recipe and are left out")
    elif not options.targets:
        raise InvalidRequest("name a directory of tasks, a bundled task or instance, or --dataset")
    if broken:
        raise InvalidRequest("; ".join(f"{name}: {why}" for name, why in broken.items()))
    return tasks, instances


def _instance(
    backend: Backend,
    builder: Builder,
    catalogue: Catalogue,
    instance: Instance,
    recipe: Recipe,
    options: argparse.Namespace,
) -> InstanceTarget:
    validated = not options.no_validate and instance.instance_id not in bundled()[0].ids
    made = partial(prepared, builder, catalogue, instance, recipe, validated=validated)
    return InstanceTarget(backend, instance.instance_id, made, rules=options.rules, timeout_s=options.timeout)


def _report(targets: Iterable[str], outcomes: Sequence[Outcome], failed: dict[str, str]) -> dict[str, Any]:
    return {
        "corpus": {"version": CORPUS_VERSION, "date": CORPUS_DATE},
        "targets": list(targets),
        "failed_targets": failed,
        "classes": {kind: asdict(count) for kind, count in counted(outcomes).items()},
        "paid": sum(outcome.bad and not outcome.honest for outcome in outcomes),
        "refused": sum(outcome.bad and outcome.honest for outcome in outcomes),
        "errors": sum(bool(outcome.error) for outcome in outcomes),
        "outcomes": [outcome.record() for outcome in outcomes],
    }


def _text(report: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    lines = [f"corpus {CORPUS_VERSION} of {CORPUS_DATE}, {len(report['targets'])} targets", ""]
    lines.append(f"{'class':<32}{'attempts':>9}{'resolved':>9}{'paid':>6}{'errors':>7}")
    for kind, count in counted(outcomes).items():
        paid = count.bad if kind != HONEST else count.attempts - count.bad
        lines.append(f"{kind:<32}{count.attempts:>9}{count.resolved:>9}{paid:>6}{count.errors:>7}")
    for outcome in outcomes:
        attempt = outcome.attempt
        if outcome.error:
            lines += ["", f"NO VERDICT {outcome.target}: {attempt.name} ({attempt.kind}): {outcome.error}"]
        elif outcome.bad:
            worth = f"{outcome.reward:g}" if outcome.honest else f"{outcome.reward:g}, doing nothing {outcome.floor:g}"
            lines += [
                "",
                f"{'REFUSED' if outcome.honest else 'PAID'} {outcome.target}: {attempt.name} ({attempt.kind}): {worth}",
            ]
            lines.append(f"  it {attempt.did}")
            if outcome.said:
                lines.append(f"  the grader says: {outcome.said[:500]}")
            lines.append(f"  to close it: {SUGGESTIONS[attempt.kind]}")
    lines += ["", *(f"FAILED {name}: {why}" for name, why in report["failed_targets"].items())]
    lines.append(f"{report['paid']} paid, {report['refused']} refused, {report['errors']} without a verdict")
    return "\n".join(printable(line) for line in lines)
