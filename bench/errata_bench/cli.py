"""``errata bench``: measure Errata and stock OpenEnv in alternating rounds."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

SMOKE_ROUNDS = 1
SMOKE_SESSIONS = 20
SMOKE_SECONDS = 0.3

INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str]) -> int:
    """Run the chosen scenarios and print the table; return the exit status, 1 if a scenario failed."""
    options = _parser().parse_args(arguments)
    from . import machine, suite, table
    from .report import Report
    from .scenario import Plan
    from .scenarios import SCENARIOS

    if options.list:
        for scenario in SCENARIOS:
            size = f"{scenario.sessions:,} {scenario.counted}, {scenario.rounds} rounds"
            print(f"{scenario.name:22}{scenario.title} ({size})")
        return 0
    try:
        pairs = bool(options.against or options.no_stock)
        scenarios = suite.chosen(SCENARIOS, options.only, smoke=options.quick, pairs=pairs)
        against = machine.interpreter(options.against) if options.against else None
    except ValueError as error:
        return _refuse(str(error))
    directory: Path = options.data_dir
    directory.mkdir(parents=True, exist_ok=True)
    disk = machine.file_system(directory)
    if disk in machine.IN_MEMORY:
        if not options.quick:
            return _refuse(
                f"{directory} lies on {disk}, in memory: give a --data-dir on the disk that is to be measured"
            )
        _say(f"warning: {directory} lies on {disk}, in memory")
    load_before = os.getloadavg()[0]
    _say(f"{directory} on {disk}, load average {load_before:.2f}")
    reports = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the servers would go on running
    interrupted = False
    for scenario in scenarios:
        plan = Plan(
            sessions=options.sessions
            or ((scenario.smoke_sessions or SMOKE_SESSIONS) if options.quick else scenario.sessions),
            rounds=options.rounds or (SMOKE_ROUNDS if options.quick else scenario.rounds),
            seconds=options.seconds or (SMOKE_SECONDS if options.quick else scenario.seconds),
            sockets=options.sockets,
            directory=directory,
            smoke=options.quick,
            progress=partial(_say, scenario.name),
            against=options.against,
            stock=not options.no_stock,
        )
        _say(scenario.name, f"{plan.sessions:,} {scenario.counted}, {plan.rounds} rounds")
        try:
            report = asyncio.run(suite.run(scenario, plan, _command(options, scenario.name)))
        except KeyboardInterrupt:
            _say(scenario.name, "interrupted; what was measured before it follows")
            interrupted = True
            break
        _say(scenario.name, f"{report.status} after {report.seconds:.0f} s {report.reason}".rstrip())
        reports.append(report)
    result = Report(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["errata", "bench", *arguments]),
        smoke=options.quick,
        machine=machine.describe(directory, load_before),
        against=against,
        scenarios=reports,
    )
    if options.json:
        options.json.write_text(result.model_dump_json(by_alias=True, indent=1) + "\n")
    print(table.text(result), end="")
    if interrupted:
        return INTERRUPTED
    return 1 if any(report.status != "ok" for report in reports) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="errata bench",
        description="Measure stock OpenEnv and Errata in alternating rounds on this machine; see docs/performance.md.",
    )
    parser.add_argument("--quick", action="store_true", help="small and short: shows that everything runs, no figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round of every figure there")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these scenarios; --list names them")
    parser.add_argument("--sessions", type=_positive, metavar="N", help="instead of each scenario's own number")
    parser.add_argument("--rounds", type=_positive, metavar="R", help="instead of each scenario's own number")
    parser.add_argument("--seconds", type=float, metavar="S", help="of stepping, in each arm and round")
    parser.add_argument("--sockets", type=_positive, default=16, metavar="K", help="multiplexed sockets [16]")
    parser.add_argument(
        "--data-dir", type=Path, default=_scratch(), metavar="DIR", help=f"on the disk to be measured [{_scratch()}]"
    )
    parser.add_argument(
        "--against",
        type=_executable,
        metavar="PYTHON",
        help="also measure the Errata that is installed for this interpreter, each arm right beside its own",
    )
    parser.add_argument("--no-stock", action="store_true", help="leave stock OpenEnv out")
    parser.add_argument("--list", action="store_true", help="name the scenarios and end")
    return parser


def _scratch() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "errata" / "bench"


def _executable(text: str) -> Path:
    found = shutil.which(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is no program")
    return Path(os.path.abspath(found))  # noqa: PTH100 - resolve() would follow a virtual environment's link to its base


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _command(options: argparse.Namespace, name: str) -> str:
    """Return the command that measures one scenario again."""
    words = ["errata", "bench", "--only", name]
    if options.quick:
        words.append("--quick")
    for option in ("sessions", "rounds", "seconds"):
        if getattr(options, option):
            words += [f"--{option}", f"{getattr(options, option):g}"]
    if options.against:
        words += ["--against", str(options.against)]
    if options.no_stock:
        words.append("--no-stock")
    if options.sockets != 16:
        words += ["--sockets", str(options.sockets)]
    return shlex.join([*words, "--data-dir", str(options.data_dir)])


def _refuse(why: str) -> int:
    print(f"errata bench: {why}", file=sys.stderr)
    return 2


def _say(*line: str) -> None:
    print(time.strftime("%H:%M:%S"), ": ".join(line), file=sys.stderr, flush=True)
