"""``errata swe``: prepare, validate and grade instances of SWE-bench."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from errata_protocol.errors import ErrataError
from errata_protocol.printable import printable

COMMANDS = {
    "prepare": ("prepare", "Fetch, build and validate instances, so that sessions can start on them."),
    "validate": (
        "validate",
        "Run the tests of prepared instances again.",
    ),
    "grade": ("grade", "Grade predictions; the report has the benchmark's format."),
    "recipe": ("recipe", "Draft the recipe of an instance."),
}
"""Module in this package and help by name; each has ``main(arguments) -> int``."""


def main(arguments: Sequence[str]) -> int:
    """Return the exit status of a subcommand; 2 for wrong options."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: errata swe COMMAND [OPTION...]\n\nInstances of SWE-bench: docs/swe_bench_lite.md\n")
        for name, (_, about) in COMMANDS.items():
            print(f"  {name:<10}{about}")
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        print(f"errata swe: no command {arguments[0]!r}: there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    program: Callable[[Sequence[str]], int] = import_module(f".{COMMANDS[arguments[0]][0]}", __package__).main
    try:
        return program(arguments[1:])
    except ErrataError as error:
        print(f"errata swe {arguments[0]}: {printable(error.message)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"errata swe {arguments[0]}: interrupted; what is done is kept, run it again to go on", file=sys.stderr)
        return 130
