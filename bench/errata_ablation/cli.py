"""``errata ablate``: compare training with and without hints and teachers."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from errata_protocol.errors import ErrataError

from .installation import install_command
from .plan import Plan, arms_of, read_plan

INTERRUPTED = 128 + signal.SIGINT
QUICK_STEPS = 2


def main(arguments: Sequence[str]) -> int:
    """Make the runs that are missing and print what all came to; return the exit status."""
    options = _parser().parse_args(list(arguments))
    for name in ("torch", "trl", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            print(f"errata ablate: {name} is not installed: {install_command()}", file=sys.stderr)
            return 1
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or its server would outlive it
    say = _Progress()
    try:
        own = read_plan(options.plan) if options.plan else Plan()
        if own.subject.get("family") or not own.subject:
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
        return _run(options, own, say, shlex.join(["errata", "ablate", *arguments]))
    except ErrataError as error:
        say.end()
        print(f"errata ablate: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say.end()
        print(f"errata ablate: interrupted; finished runs are kept in {options.out}", file=sys.stderr)
        return INTERRUPTED


def _run(options: argparse.Namespace, own: Plan, say: _Progress, command: str) -> int:
    import warnings

    import torch
    import transformers

    from .experiment import controlled_plan, run

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    named = {arm.name: arm for arm in own.arms}
    arms = tuple(named[name] if name in named else arms_of([name])[0] for name in options.arms) or own.arms
    steps = options.steps or (QUICK_STEPS if options.quick else None)
    grpo = {**own.grpo, "max_steps": steps} if steps else own.grpo
    seeds = options.seeds or ((0, 1) if options.quick else own.seeds)
    plan = Plan(arms, seeds, own.subject, grpo, own.channels, own.check, own.evaluation)
    if own.subject.get("family") or not own.subject:
        torch.set_num_threads(1)  # so small a policy is slower with more
    if not own.subject:
        if options.plan:
            say(f"{options.plan} names no policy, environment or tasks: the built-in tasks")
        plan = controlled_plan(plan)
    result = run(plan, options.out, say, command=command, resume=options.resume, only_report=options.report)
    say.end()
    print(json.dumps(result.data, indent=1, default=str) if options.json else result.text, end="")
    print(f"{options.out}: ablation.json, ablation.txt, ablation.png", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="errata ablate",
        description="Train the four arms (alpha_sdpo 0 or 0.1, beta_replay 0 or 0.05) with the same tasks and as many "
        "rollouts, over several seeds, and compare them; see docs/ablation.md.",
    )
    parser.add_argument(
        "plan", type=Path, nargs="?", metavar="PLAN.toml",
        help="model, environment, tasks and settings; without the first three, a tiny policy in the controlled family",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(".errata") / "ablation", metavar="DIR", help="[%(default)s]")
    parser.add_argument(
        "--seeds", type=_seeds, metavar="N|A-B|A,B", help="0 to N - 1, A to B, or these [the plan's, or 5]"
    )
    parser.add_argument("--steps", type=_positive, metavar="N", help="of the optimizer in each run [the plan's, or 24]")
    parser.add_argument(
        "--arms", nargs="+", default=[], metavar="ARM",
        help="grpo, grpo+sdpo, grpo+dpo, all, trl-sdpo; the first is what the others are compared with [the four]",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="two steps, two seeds: shows that everything runs")
    parser.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, default=True, help="keep finished runs of the same plan"
    )
    parser.add_argument("--report", action="store_true", help="make no run: report what is there")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of tables")
    return parser


def _seeds(text: str) -> tuple[int, ...]:
    if "," in text:
        return tuple(map(int, text.split(",")))
    first, dash, last = text.partition("-")
    if dash and int(last) < int(first):
        raise argparse.ArgumentTypeError(f"{text} goes down")
    return tuple(range(int(first), int(last) + 1)) if dash else tuple(range(_positive(text)))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


class _Progress:
    """Lines on standard error: one that moves on a terminal, elsewhere what begins and ends."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._moves = sys.stderr.isatty()
        self._width = 0

    def __call__(self, line: str) -> None:
        line = f"[{time.monotonic() - self._began:6.1f} s] {line}"
        if self._moves:
            print(f"\r{line:{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(line)
        elif ": step " not in line:
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave a line that moves."""
        if self._width:
            print(file=sys.stderr)
