"""``errata-conformance URL``: check a server or a client for the statements of rfcs/notes."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .printable import printable
from .report import as_json, as_junit, as_text, broken
from .results import Outcome, Result
from .server_side.probe import KNOWN, Probe
from .server_side.run import prepared, run, selected
from .server_side.target import SeveralEnvironments, Target

RFCS = ("014", "015", "016")


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="errata conformance",
        description="Check an OpenEnv server against the statements R-014 (error markers), R-015 (reading earlier "
        "deliveries, forks) and R-016 (multiplexing, late rewards). Each check names its statement. 'not supported' "
        "and 'not tested' are no passes.",
        epilog="Exit status: 0 no MUST is broken, 1 a MUST is broken, 2 the call is wrong, nobody answers, no action "
        "works on the environment, or the client cannot be started.",
    )
    parser.add_argument(
        "url", nargs="?", help="base URL of the server, such as http://127.0.0.1:8000, with its path if any"
    )
    parser.add_argument(
        "--client",
        metavar="CMD",
        help="check a client instead of a server: a program that is driven by JSON lines (README)",
    )
    parser.add_argument(
        "--rfc", nargs="+", choices=RFCS, default=list(RFCS), help="only the statements R-NNN of these numbers"
    )
    parser.add_argument(
        "--profile",
        choices=("0.3", "0.5", "0.10", "none"),
        default="none",
        help="also check the released protocol of this version of OpenEnv",
    )
    parser.add_argument("--only", nargs="+", metavar="ID", default=[], help="only these statements, such as R-016-7")
    parser.add_argument(
        "--probe",
        help=f"actions for the environment: {', '.join(KNOWN)}, or a JSON file (default: what the server offers, else "
        "guessed from GET /schema)",
    )
    parser.add_argument("--token", help="bearer token")
    parser.add_argument("--other-token", help="token of another principal, for the checks of R-015-29")
    parser.add_argument("--production", action="store_true", help="the server runs in production mode")
    parser.add_argument("--faults", action="store_true", help="also flood the server and cut many connections")
    parser.add_argument("--stop", metavar="CMD", help="with --faults: a command that asks the server to stop (SIGTERM)")
    parser.add_argument("--kill", metavar="CMD", help="with --faults: a command that kills the server (SIGKILL)")
    parser.add_argument(
        "--start", metavar="CMD", help="with --stop or --kill: a command that starts the server again and returns"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="checks that run concurrently; the server needs capacity for as many sessions (default 1)",
    )
    parser.add_argument(
        "--timeout", type=float, default=15.0, metavar="S", help="time limit for a reply, in seconds (default 15)"
    )
    parser.add_argument(
        "--strict", action="store_true", help="a SHOULD that is not followed counts for the exit status"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write the report as JUnit XML")
    parser.add_argument("-v", "--verbose", action="store_true", help="name the checks that passed too")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 or 2, as the README lists them."""
    parser = arguments()
    asked = parser.parse_args(argv)
    if (asked.url is None) == (asked.client is None):
        parser.error("give the URL of a server, or --client CMD")
    if asked.client is not None:
        try:
            command = shlex.split(asked.client)
        except ValueError as error:
            parser.error(f"--client: {error}")
        if not command:
            parser.error("--client: the command is empty")
        return _client(asked, command)
    if "://" not in asked.url:
        asked.url = f"http://{asked.url}"
    probe, given = None, Probe()
    if asked.probe in KNOWN:
        probe = asked.probe
    elif asked.probe is not None:
        try:
            given = Probe.read(Path(asked.probe))
        except (OSError, ValueError) as error:
            return _fail(f"--probe {asked.probe}: {error}; or one of {', '.join(KNOWN)}")
    if (asked.stop or asked.kill) and not (asked.faults and asked.start):
        parser.error("--stop and --kill need --faults and --start")
    target = Target(
        asked.url,
        given,
        asked.token,
        asked.other_token,
        asked.production,
        asked.stop,
        asked.kill,
        asked.start,
        reply_s=asked.timeout,
    )
    return asyncio.run(_main(asked, target, probe))


def _client(asked: argparse.Namespace, command: Sequence[str]) -> int:
    try:
        from .client_side.scenarios import run_client
    except ModuleNotFoundError as error:
        return _fail(f"--client needs {error.name}: install openenv-errata-conformance[sample]")
    try:
        results = asyncio.run(run_client(command, asked.only))
    except OSError as error:
        return _fail(f"--client: the program cannot be started: {error}")
    results = [one for one in results if one.statement.split("-")[1] in asked.rfc]
    if asked.junit is not None:
        asked.junit.write_text(as_junit(results, f"conformance of {asked.client}"))
    about = {"client": asked.client, "rfcs": asked.rfc}
    print(printable(as_json(results, about) if asked.json else as_text(results, asked.verbose)))
    return 1 if broken(results, asked.strict) else 0


async def _main(asked: argparse.Namespace, target: Target, probe: str | None) -> int:
    try:
        name = await prepared(target, probe)
    except SeveralEnvironments as error:
        return _fail(f"{asked.url}: {error}")
    except OSError as error:
        return _fail(f"{asked.url} does not answer: {error}")
    profile = None if asked.profile == "none" else asked.profile
    checks = [
        one for one in selected(asked.rfc, profile, asked.only) if asked.faults or not _by_faults(one.body.__module__)
    ]
    if not checks:
        return _fail("no check is selected")
    done = 0

    def progress(result: Result) -> None:
        nonlocal done
        done += 1
        if not asked.quiet and sys.stderr.isatty():
            print(
                f"\r{done}/{len(checks)} {result.statement:12}", end="" if done < len(checks) else "\n", file=sys.stderr
            )

    results = await run(target, checks, max(1, asked.jobs), progress)
    about = {
        "url": asked.url,
        "probe": name,
        "extensions": target.extensions,
        "recovery": target.recovery,
        "rfcs": asked.rfc,
        "profile": profile,
    }
    if asked.junit is not None:
        asked.junit.write_text(as_junit(results, f"conformance of {asked.url}"))
    if asked.json:
        print(printable(as_json(results, about)))
    else:
        offers = f"extensions {target.extensions or 'none'}; recovery {target.recovery}"
        print(printable(f"{asked.url}: actions {name}; {offers}\n{as_text(results, asked.verbose)}"))
    if broken(results, asked.strict):
        return 1
    if not target.probe.step and any(one.outcome is Outcome.NOT_TESTED for one in results):
        return _fail(f"no step was tested: actions {name}")
    return 0


def _fail(message: str) -> int:
    """Print why nothing can be checked, in one line, and return the exit status for that."""
    text = printable(" ".join(message.split()))
    print(f"errata conformance: {text[:4000]}", file=sys.stderr)
    return 2


def _by_faults(module: str) -> bool:
    return module.endswith("check_faults")


if __name__ == "__main__":
    sys.exit(main())
