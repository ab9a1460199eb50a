"""The demo's command line and its tables."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from errata_environment.demos import Played
from errata_protocol.errors import InvalidRequest
from errata_server.cli.turn_table import TurnTable

from ..dataset import LITE, load_dataset
from ..recipes import load_recipes
from .play import Result, play
from .script import script

BUNDLED = "errata-examples__pagelist-1"

WHERE = (
    f"A real instance: errata demo swe --dataset FILE --recipes FILE. Rows are those of {LITE} on the Hugging Face hub "
    f"(hf download --repo-type dataset {LITE} --local-dir DIR, then --dataset DIR --split dev); `errata swe recipe` "
    "drafts their recipes, docs/swe_bench_lite.md has one."
)


def main(arguments: Sequence[str] = ()) -> int:
    """Run ``errata demo swe`` and return its exit status.

    Returns:
        0: every check of the demo passed. 1: a check failed, or the instance could not be prepared. 2: the arguments,
        the data set or the recipes are invalid.
    """
    parser = argparse.ArgumentParser(
        prog="errata demo swe", description="A scripted agent repairs an instance of SWE-bench.", epilog=WHERE
    )
    parser.add_argument("--dataset", metavar="FILE", help="rows of SWE-bench; without, an instance of this package")
    parser.add_argument("--recipes", type=Path, metavar="FILE", help="their recipes")
    parser.add_argument("--instance", metavar="ID", help="which; without, the first that has a recipe")
    parser.add_argument("--split", help="of the data set; test has to be named")
    parser.add_argument("--mirror", type=Path, metavar="DIR", help="git repositories, for recipes that name one")
    parser.add_argument("--data-dir", type=Path, default=Path(".errata") / "demo-swe", help="journal and layers")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(list(arguments))
    if bool(options.dataset) != bool(options.recipes):
        print(f"errata demo: --dataset and --recipes go together. {WHERE}", file=sys.stderr)
        return 2
    console = Console(stderr=options.json, width=None if sys.stdout.isatty() else 160)
    started = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[{time.monotonic() - started:5.1f} s] {line}", markup=False, highlight=False, soft_wrap=True)

    tasks = Path(__file__).resolve().parent.parent / "tasks"
    env = {}
    try:
        if options.dataset:
            dataset, recipes = load_dataset(options.dataset, options.split), load_recipes(options.recipes)
            names = [options.instance] if options.instance else [name for name in dataset.ids if name in recipes]
            if not names:
                raise InvalidRequest(f"{options.recipes} has no recipe of an instance in {options.dataset}")
            env = {"ERRATA_SWE_DATASET": str(Path(options.dataset).expanduser().resolve())}
            env["ERRATA_SWE_RECIPES"] = str(options.recipes.resolve())
            if options.split:
                env["ERRATA_SWE_SPLIT"] = options.split
        else:
            dataset, recipes = load_dataset(tasks / "instances.jsonl"), load_recipes(tasks / "recipes.json")
            names = [options.instance or BUNDLED]
        instance = dataset.find(names[0])
        recipe = recipes.find(instance.instance_id, instance.repo)
    except InvalidRequest as error:
        print(f"errata demo: {error.message}", file=sys.stderr)
        return 2
    if options.dataset:
        say(f"errata swe prepare {instance.instance_id}: what is prepared already is kept")
        command = [sys.executable, "-m", "errata_server.cli", "swe", "prepare", "--dataset", options.dataset]
        command += ["--recipes", str(options.recipes), "--instance", instance.instance_id]
        command += ["--split", options.split] if options.split else []
        command += ["--mirror", str(options.mirror)] if options.mirror else []
        if subprocess.run(command, stdout=sys.stderr).returncode != 0:
            print("errata demo: the instance could not be prepared: see above", file=sys.stderr)
            return 1

    result = asyncio.run(
        play(
            instance.instance_id,
            script(instance, recipe),
            options.data_dir.resolve(),
            say,
            lambda result, played: _show(console, result, played),
            env,
        )
    )
    if options.json:
        print(result.to_json())
    else:
        _summary(console, result, options.data_dir, time.monotonic() - started, own=not options.dataset)
    for failure in result.failures:
        print(f"errata demo: {failure}", file=sys.stderr)
    return 1 if result.failures else 0


def _show(console: Console, result: Result, played: Played) -> None:
    if played.forked_from is None:
        title = f"{result.instance_id}: {result.issue.strip().splitlines()[0]}   {played.eid}"
    else:
        title = f"{result.instance_id}   {played.eid}   fork of {played.forked_from[0]} at t={played.forked_from[1]}"
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    table = TurnTable(console.file)
    for turn in played.turns:
        table.add(turn)
    table.end()
    verdict = "resolved" if played.reward == 1.0 else "not resolved"
    console.print(f"verdict: {verdict}, reward {played.reward:g}\n", markup=False, highlight=False)


def _summary(console: Console, result: Result, data_dir: Path, took_s: float, *, own: bool) -> None:
    counts = ", ".join(f"{n} {when}" for when, n in result.compared.items())
    parent, child = result.episodes
    lines = [
        f"{len(result.kinds)} kinds of mistakes marked: {', '.join(result.kinds)}",
        f"state(t) equal byte for byte, with what the agent read: {counts}",
        f"{result.instance_id}: reward {parent.reward:g}, and {child.reward:g} in the fork from before the submit",
        f"all of it in {took_s:.0f} s; the journal is in {result.data_dir / 'journal'}",
        "",
        "next:",
        f"  errata replay {parent.eid} 7 --agent-text --data-dir {data_dir}",
        f"  errata serve swe_bench_lite --data-dir {data_dir}",
    ]
    for line in [*lines, "", WHERE] if own else lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
