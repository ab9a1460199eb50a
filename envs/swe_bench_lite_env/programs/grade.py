"""``errata swe grade``: predictions in the benchmark's format in, its report out."""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errata_environment.grading.forks import forked
from errata_protocol.errors import ErrataError, InvalidRequest, SandboxUnavailable
from errata_server.sandbox.base import Backend, SandboxSnapshot

from ..dataset import Dataset
from ..rules.report import (
    Graded,
    Prediction,
    gold_predictions,
    instance_report,
    load_predictions,
    run_report,
)
from ..server import grading
from ..server.patches import applicable
from ..server.prepare.build import Builder
from ..server.prepare.store import Catalogue, Prepared, Store, problems_of
from ..server.workspaces import GRADING_LIMITS
from .inputs import add_inputs, bases_of, opened, prepared, read_dataset, read_recipes, say

_ABOUT = """Grade predictions by the rules of SWE-bench, each in forks of its instance's start. What is not prepared
is prepared first, as `errata swe prepare` does. The exit status is 0 where every prediction got a verdict, whatever it
is, and 1 where the machine failed one."""
_APPLY = (
    "git apply --verbose --whitespace=nowarn -",
    "git apply --verbose --whitespace=nowarn --reject -",
    "patch --batch --fuzz=5 -p1",
)
"""How a prediction is applied: the first that does it, in the benchmark's order."""
_TIMEOUT_S = 1800.0
_NOT_WRITABLE = "--out {}: {}: name a directory that can be written"


@dataclass(slots=True)
class _Results:
    graded: dict[str, Graded] = field(default_factory=dict)
    detail: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 0 where all predictions got a verdict, 1 where one did not, 2 for wrong options."""
    parser = argparse.ArgumentParser(prog="errata swe grade", description=_ABOUT)
    add_inputs(parser)
    predictions = "Predictions: JSON lines, a JSON list or a JSON object by instance id; or the word gold."
    parser.add_argument("--predictions", required=True, metavar="FILE", help=predictions)
    parser.add_argument("--rules", type=int, choices=(4, 5), default=5, help="swebench 5.0.2 or 4.1.0.")
    parser.add_argument("--mirror", type=Path, metavar="DIR", help="Git repositories, as owner/name or owner__name.")
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, metavar="S", help="Of one run of the tests.")
    parser.add_argument("--no-validate", action="store_true", help="Also on instances that were not validated.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="Write report.json and test_output.txt by instance.")
    options = parser.parse_args(list(arguments))
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> int:
    dataset = read_dataset(options)
    recipes = read_recipes(options, dataset)
    named = [name for group in options.instance for part in group for name in part.split(",") if name]
    if named:
        dataset = Dataset([dataset.find(name) for name in dict.fromkeys(named)], dataset.name)
    given = gold_predictions(dataset) if options.predictions == "gold" else load_predictions(options.predictions)
    known = {instance.instance_id: instance for instance in dataset}
    pairs = [
        (known[prediction.instance_id], prediction)
        for prediction in given
        if prediction.instance_id in known and prediction.model_patch
    ]
    if options.predictions == "gold":
        pairs = [pair for pair in pairs if pair[0].instance_id in recipes]
        given = [prediction for _, prediction in pairs]
    for instance, _ in pairs:
        recipes.find(instance.instance_id, instance.repo)  # refused before anything runs
    if options.out is not None:
        await asyncio.to_thread(_check_out, options.out, [instance.instance_id for instance, _ in pairs])
    store, bases, results = Store(options.store), bases_of(options.base), _Results()
    async with opened(store, bases) as backend:
        builder = Builder(store, backend, bases=bases, mirror=options.mirror, progress=say)
        catalogue = Catalogue(store, backend)
        for instance, prediction in pairs:
            recipe = recipes.find(instance.instance_id, instance.repo)
            try:
                start = await prepared(builder, catalogue, instance, recipe, validated=not options.no_validate)
                await _one(backend, start, prediction, options, results)
            except SandboxUnavailable:
                raise  # of the machine: no other instance would fare better
            except ErrataError as error:
                why = results.failed[instance.instance_id] = "\n".join(problems_of(error))
                say(f"{instance.instance_id}: no verdict: {why}")
    report = run_report(dataset, given, results.graded, options.rules)
    logs = {name: detail.pop("log") for name, detail in results.detail.items()}
    report["instances"] = results.detail
    report["infrastructure_errors"] = results.failed
    report["tampering_ids"] = sorted(name for name, detail in results.detail.items() if detail["tampering"])
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        for name, detail in results.detail.items():
            state = "tampering" if detail["tampering"] else "resolved" if detail["resolved"] else "unresolved"
            print(f"{state:<11}{name} ({detail['seconds']:.1f} s, canaries {detail['canaries']})")
            for line in detail["tampering"]:
                print(f"           {line}")
        print(f"{report['resolved_instances']} of {len(given)} resolved, {len(results.failed)} without a verdict")
    if options.out is not None:  # last, so that the results are printed whatever happened to the directory meanwhile
        await asyncio.to_thread(_write, options.out, given, results, logs, report)
    return 1 if results.failed else 0


async def _one(
    backend: Backend, prepared: Prepared, prediction: Prediction, options: argparse.Namespace, results: _Results
) -> None:
    name = prepared.instance.instance_id
    state, said = await _applied(backend, prepared, prediction.model_patch or "")
    if state is None:
        results.graded[name] = Graded(None, said)
        results.detail[name] = {
            **instance_report(prediction, None, options.rules)[name],
            **{"tampering": [], "canaries": "none", "seconds": 0.0, "error": "the patch does not apply", "log": said},
        }
        return
    found = await grading.grade(backend, state, prepared, rules=options.rules, timeout_s=options.timeout)
    timed_out = found.exit_code is None
    results.graded[name] = Graded(None if timed_out else found.resolution, found.log)
    results.detail[name] = {
        **instance_report(prediction, None if timed_out else found.resolution, options.rules)[name],
        "tampering": list(found.tampering),
        "canaries": found.canaries,
        "reward": found.reward,
        "exit_code": found.exit_code,
        "invalid": found.resolution.invalid,
        "rules": f"swebench {found.resolution.rules}",
        "seconds": round(found.seconds, 2),
        "tests_s": round(found.tests_s, 2),
        "log": said + found.log,
    }


async def _applied(backend: Backend, prepared: Prepared, patch: str) -> tuple[SandboxSnapshot | None, str]:
    """Return the start with a patch, and what was printed; None where no way of applying it does."""
    said = ""
    for command in _APPLY:
        async with forked(backend, prepared.snapshot, limits=GRADING_LIMITS) as fork:
            given = applicable(patch)
            result = await fork.run(f"cd {prepared.workdir} && {command} 2>&1", stdin=given, clean=True, timeout_s=120)
            said += result.stdout
            if result.exit_code == 0:
                return await fork.snapshot(), said + ">>>>> Applied Patch\n"
    return None, said + ">>>>> Patch Apply Failed\n"


def _check_out(place: Path, names: Sequence[str]) -> None:
    """Make the directory of the reports, and check that they can be written.

    Raises:
        InvalidRequest: They cannot.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
        for directory in [place, *(place / name for name in names)]:
            if directory.exists() and not directory.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{directory} is not a directory")
            for file in (directory / "report.json", directory / "test_output.txt"):
                if file.is_dir() or (file.exists() and not os.access(file, os.W_OK)):
                    raise IsADirectoryError(errno.EISDIR, f"{file} cannot be replaced")
    except OSError as error:
        raise InvalidRequest(_NOT_WRITABLE.format(place, error.strerror)) from error


def _write(
    place: Path, given: Sequence[Prediction], results: _Results, logs: dict[str, str], report: dict[str, Any]
) -> None:
    """Write the benchmark's files: the report of the run, and of each instance its log and its report."""
    keys = (
        "patch_is_None",
        "patch_exists",
        "patch_successfully_applied",
        "resolved",
        "infra_failure",
        "infra_failure_reason",
        "tests_status",
    )
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name in (prediction.instance_id for prediction in given if prediction.instance_id in logs):
            directory = place / name
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "test_output.txt").write_text(logs[name], "utf-8", "backslashreplace")
            found = {name: {key: results.detail[name][key] for key in keys if key in results.detail[name]}}
            (directory / "report.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        (place / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise InvalidRequest(_NOT_WRITABLE.format(place, error.strerror)) from error
