"""Command line and tables of the demo."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from .training import Result

STEPS, ROLLOUTS, WARM_UP = 6, 8, 150


def main(arguments: Sequence[str] = ()) -> int:
    """Run the demo. Return 0 if every channel had something to train on and no episode was lost."""
    parser = argparse.ArgumentParser(
        prog="errata demo training",
        description="A tiny policy, made on the spot, trains by three channels; no download.",
    )
    parser.add_argument("--data-dir", type=Path, default=Path(".errata") / "training", help="journal, layers and pairs")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of the optimizer; {STEPS} without")
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS, help=f"of a step; {ROLLOUTS} without")
    parser.add_argument("--seed", type=int, default=0, help="of weights and samples")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(list(arguments))
    console = Console(stderr=options.json, width=None if sys.stdout.isatty() else 160)
    started = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[{time.monotonic() - started:5.1f} s] {line}", markup=False, highlight=False)

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    say("loading torch and TRL")
    import torch

    from .training import train

    torch.set_num_threads(1)  # a policy this small is no faster with more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers renames its options
        result = train(
            options.data_dir.resolve(),
            steps=options.steps,
            rollouts=options.rollouts,
            warm_up_steps=WARM_UP,
            seed=options.seed,
            say=say,
        )
    if options.json:
        print(result.to_json())
    else:
        _show(console, result, options.data_dir, time.monotonic() - started)
    for failure in result.failures:
        print(f"errata demo training: {failure}", file=sys.stderr)
    return 1 if result.failures else 0


def _show(console: Console, result: Result, data_dir: Path, took_s: float) -> None:
    console.print()
    console.print(_steps(result))
    console.print()
    console.print(_marked(result))
    console.print()
    console.print(_pairs(result))
    console.print()
    tried, better = sum(one.tried for one in result.marked), sum(one.better for one in result.marked)
    counts = result.teachers
    lines = [
        f"counterfactual check: {tried} turns played again in forks of their episodes with the hint before them, "
        f"the error gone in {better}",
        f"teachers: {counts['teachers/states']:.0f} states read by state(t), {counts['teachers/asked']:.0f} votes, "
        f"{counts.get('teachers/posted', 0.0):.0f} posted to the journal, {counts['teachers/usd']:.2f} dollars",
        f"all of it in {took_s:.0f} s; these few steps show the parts at work, not whether they teach anything",
    ]
    shown = next((one for one in result.marked if one.eid is not None and one.t is not None), None)
    if shown is not None:
        lines += [
            "",
            "next:",
            f"  errata replay {shown.eid} {shown.t} --agent-text --data-dir {data_dir}",
            f"  errata episodes rewards {shown.eid} --data-dir {data_dir}",
            "  docs/training.md, examples/",
        ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _steps(result: Result) -> Table:
    table = _table("total = grpo + 0.1 sdpo_kl + 0.05 trace_replay_dpo")
    for name in (
        "step",
        "reward",
        "errors a rollout",
        "grpo",
        "sdpo_kl",
        "trace_replay_dpo",
        "forks so far",
        "pairs so far",
    ):
        table.add_column(name, justify="right")
    for step in result.steps:
        table.add_row(
            str(step.number),
            f"{step.reward:.2f}",
            f"{step.sites + step.dropped:.2f}",
            f"{step.grpo:+.4f}",
            "" if step.sdpo is None else f"{step.sdpo:.4f}",
            "" if step.dpo is None else f"{step.dpo:.4f}",
            str(step.asked),
            str(step.pairs),
        )
    return table


def _marked(result: Result) -> Table:
    table = _table("markers that became hints of channel 2")
    table.add_column("kind")
    table.add_column("turns", justify="right")
    table.add_column("helped", justify="right")
    table.add_column("the first one", max_width=34, no_wrap=True, overflow="ellipsis")
    table.add_column("its hint", max_width=84, no_wrap=True, overflow="ellipsis")
    for one in result.marked:
        hint = escape(one.hint.removeprefix("Hint for your next action: "))
        helped = f"{one.better}/{one.tried}"
        table.add_row(one.error_kind, str(one.count), helped, escape(one.command), hint)
    return table


def _pairs(result: Result) -> Table:
    table = _table("pairs of channel 3, most frequent first")
    table.add_column("states", justify="right")
    table.add_column("teachers agree on", max_width=74, no_wrap=True, overflow="ellipsis")
    table.add_column("the student did", max_width=74, no_wrap=True, overflow="ellipsis")
    for pair in result.pairs[:5]:
        table.add_row(str(pair.states), *(escape(_bare(text)) for text in (pair.chosen, pair.rejected)))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


def _bare(text: str) -> str:
    return text.replace("<tool_call>", "").replace("</tool_call>", "").strip()
