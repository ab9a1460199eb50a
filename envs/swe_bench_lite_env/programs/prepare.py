"""``errata swe prepare`` and ``errata swe validate``."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from errata_protocol.errors import ErrataError, InvalidRequest, SandboxUnavailable

from ..dataset import Instance
from ..recipes import Recipe
from ..server.prepare.build import Builder
from ..server.prepare.sources import build_key
from ..server.prepare.space import disk_limit, trim, usage
from ..server.prepare.store import Build, Catalogue, Store, Validation, prepared_digest, problems_of
from ..server.prepare.validate import RUNS, validate
from ..server.validation import graded
from .inputs import add_inputs, bases_of, chosen, opened, say

_ABOUT = """Fetch the code of instances, build their environments in a sandbox and validate them: with the empty patch
their tests have to fail, with the gold patch they have to pass, three times each. What is done already is not done
again, so a run that was interrupted goes on where it stopped. The package index is used here and never afterwards."""


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 0 where all instances can be served, 1 where one cannot, 2 for wrong options."""
    parser = argparse.ArgumentParser(prog="errata swe prepare", description=_ABOUT)
    add_inputs(parser)
    parser.add_argument("--mirror", type=Path, metavar="DIR", help="Git repositories, as owner/name or owner__name.")
    parser.add_argument("--again", action="store_true", help="Also what is done already.")
    parser.add_argument("--no-validate", action="store_true", help="Build only: such instances are not served.")
    limit = "Above this, drop what was not used for the longest time (ERRATA_SWE_DISK_LIMIT_GIB, 64)."
    parser.add_argument("--disk-limit", type=float, metavar="GIB", help=limit)
    options = parser.parse_args(arguments)
    return asyncio.run(_run(options, build=True))


def validate_main(arguments: Sequence[str]) -> int:
    """Return the exit status of ``errata swe validate``: as `main`."""
    parser = argparse.ArgumentParser(
        prog="errata swe validate", description="Run the tests of prepared instances again and keep what that shows."
    )
    add_inputs(parser)
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help="Runs with each patch.")
    options = parser.parse_args(arguments)
    options.again, options.no_validate, options.mirror, options.disk_limit = True, False, None, None
    if options.runs < 1:
        parser.error("--runs takes a number from 1 on")
    return asyncio.run(_run(options, build=False))


async def _run(options: argparse.Namespace, *, build: bool) -> int:
    broken: dict[str, str] = {}
    pairs, without = chosen(options, broken)
    results = [{"row": name, "prepared": False, "validated": False, "problems": [why]} for name, why in broken.items()]
    if not options.json:
        for why in broken.values():
            print(f"FAILED {why}")
    if not pairs:
        raise InvalidRequest(f"no row with a recipe can be used: {next(iter(broken.values()), 'there are none')}")
    bases, store = bases_of(options.base), Store(options.store)
    limit = disk_limit(options.disk_limit)
    keep: set[str] = set()
    async with opened(store, bases) as backend:
        builder = Builder(store, backend, bases=bases, mirror=options.mirror, progress=say)
        for instance, recipe in pairs:
            started = time.monotonic()
            try:
                result = await _one(builder, instance, recipe, options, build=build)
            except SandboxUnavailable:
                raise  # of the machine: no other instance would fare better
            except ErrataError as error:
                result = {"instance_id": instance.instance_id, "prepared": False, "validated": False}
                result |= {"problems": problems_of(error)}
            else:
                keep.add(build_key(instance, recipe))
                for line in await asyncio.to_thread(trim, store, limit, keep):
                    say(line)
            result["took_s"] = round(time.monotonic() - started, 1)
            results.append(result)
            if not options.json:
                _print(result)
    if without and not options.json:
        print(f"{len(without)} more instances have no recipe: `errata swe recipe` drafts one")
    good = [result for result in results if result["prepared"] and (result["validated"] or options.no_validate)]
    used = usage(store)
    if used.total > limit:
        say(f"{store.directory} takes {used.total / 1024**3:.1f} GiB: all of it is of this call or in use")
    if options.json:
        print(
            json.dumps(
                {
                    "store": str(store.directory),
                    "instances": results,
                    "without_recipe": without,
                    "disk_bytes": asdict(used),
                },
                indent=1,
            )
        )
    else:
        print(f"{len(good)} of {len(results)} instances can be served")
    return 0 if len(good) == len(results) else 1


async def _one(
    builder: Builder, instance: Instance, recipe: Recipe, options: argparse.Namespace, *, build: bool
) -> dict[str, Any]:
    store = builder.store
    if build:
        made = await builder.build(instance, recipe, again=options.again)
    else:
        catalogue = Catalogue(store, builder.backend)
        await catalogue.find(instance, recipe, validated=False)  # refused where it was not prepared
        made = await builder.build(instance, recipe)
    found = made.validation
    digest = prepared_digest(instance, recipe, made)
    if not options.no_validate and (options.again or found is None or found.digest != digest or not found.passed):
        catalogue = Catalogue(store, builder.backend)
        runs = getattr(options, "runs", RUNS)
        found = await validate(catalogue, instance, recipe, runs=runs, grader=graded, progress=builder.progress)
    return _result(made, found if found is not None and found.digest == digest else None)


def _result(made: Build, found: Validation | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "instance_id": made.instance_id,
        "prepared": True,
        "validated": found is not None and found.passed,
        "problems": list(found.problems) if found else [],
        "flaky": list(found.flaky) if found else [],
        "before": dict(found.before) if found else {},
        "after": dict(found.after) if found else {},
        "runs": found.runs if found else 0,
        "rules": found.rules if found else "",
        "tests_s": found.seconds if found else None,
        "source": made.source,
        "python": made.interpreter or "of the base tree",
        "base": made.base,
        "size_bytes": made.size_bytes,
        "build_s": made.seconds,
        "notes": list(made.notes),
    }
    return result


def _print(result: dict[str, Any]) -> None:
    state = "ready" if result["validated"] else "built" if result["prepared"] and not result["problems"] else "FAILED"
    after = result.get("after") or {}
    counts = ", ".join(f"{name.upper()} {passed}/{total}" for name, (passed, total) in after.items())
    print(f"{state:<7}{result['instance_id']}{f': {counts}' if counts else ''} ({result['took_s']:.0f} s)")
    for line in result["problems"]:
        print(f"       {line}")
    for line in result.get("notes", []):
        print(f"       note: {line}")
    if result.get("flaky"):
        print(f"       flaky, left out: {', '.join(result['flaky'])}")
