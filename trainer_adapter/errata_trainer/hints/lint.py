"""Checks packs of hint templates.

python -m errata_trainer.hints.lint [DIRECTORY ...]
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from errata_protocol.markers import HINT_TEMPLATE_KEYS

from ..rollouts.transcript import MALFORMED_KEY
from .neutral import Count, approximate_tokens, neutral
from .pack import FRAME, HintPack, slots_in
from .slots import SLOTS

OWN_KEYS = frozenset({MALFORMED_KEY})
"""Keys of markers that the trainer's side gives, besides `errata_protocol.HINT_TEMPLATE_KEYS`."""

MAX_TOKENS = 80  # of the text itself; slots come on top
_GRADERS = re.compile(r"\b(hidden tests?|verifier|grader|grading|gold|solution|expected (output|answer|value))\b", re.I)


def lint(pack: HintPack, count: Count = approximate_tokens) -> list[str]:
    """Return problems as lines of text: keys and slots, the order of variants, length, words about grading.

    Args:
        pack: Templates to check.
        count: Returns the number of tokens of a text.
    """
    known = {*HINT_TEMPLATE_KEYS.values(), *OWN_KEYS}
    general = pack.templates.get("", {})
    problems = [f"{key}: there is no template for all environments" for key in sorted(known - general.keys())]
    for environment, table in sorted(pack.templates.items()):
        for key, texts in sorted(table.items()):
            where = f"{environment}/{key}" if environment else key
            if not environment and slots_in(texts[-1]):
                problems.append(f"{where}: the last text has slots, so that there can be nothing to say")
            elif environment and key not in general and slots_in(texts[-1]):
                problems.append(f"{where}: the last text has slots, and no general template follows")
            for index, text in enumerate(texts):
                problems += [f"{where}[{index}]: {problem}" for problem in _of_text(text, texts[:index], count)]
    return problems


def _of_text(text: str, before: tuple[str, ...], count: Count) -> list[str]:
    problems = []
    slots = slots_in(text)
    if unknown := sorted(slots - SLOTS.keys()):
        problems.append(f"unknown slots {', '.join(unknown)}")
    if any(slots_in(earlier) <= slots for earlier in before):
        problems.append("never taken: an earlier text needs no more slots")
    if neutral(text, len(text) + 1) != text:
        problems.append("is not one line of plain text without chat tokens")
    if not text.endswith((".", "!")):
        problems.append("is no sentence")
    if found := _GRADERS.search(text):
        problems.append(f"mentions {found.group()!r}: a hint must not be about grading")
    tokens = count(FRAME.format(hint=text))
    if tokens > MAX_TOKENS:
        problems.append(f"has {tokens} tokens, at most {MAX_TOKENS}")
    return problems


def main() -> int:
    """Check the installed pack and the directories named on the command line.

    Returns:
        The exit status: 1 for problems, 2 for a directory or a file that cannot be read.
    """
    parser = argparse.ArgumentParser(prog="python -m errata_trainer.hints.lint", description="Check hint templates.")
    parser.add_argument("directories", nargs="*", type=Path, metavar="DIRECTORY", help="goes before the ones before it")
    directories = parser.parse_args().directories
    for directory in directories:
        if not directory.is_dir():
            print(f"{directory}: there is no such directory", file=sys.stderr)
            return 2
    try:
        problems = lint(HintPack.load(*directories))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
