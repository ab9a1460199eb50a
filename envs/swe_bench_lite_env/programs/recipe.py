"""``errata swe recipe``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from errata_protocol.errors import InvalidRequest, NotSupported

from ..input_files import json_values
from ..server.prepare.index import PackageIndex
from ..server.prepare.store import Store
from .inputs import add_inputs, read_dataset, say

_ABOUT = """Draft recipes, to be read before use: from the benchmark's own specification where --swebench names a Python
that has swebench 4.1, else from the repository's set-up files and what was on the package index at the time."""


def _drafts(path: Path) -> list[dict[str, Any]]:
    """Return the recipes of a file that drafts are added to.

    Raises:
        InvalidRequest: It is no list of recipes.
    """
    try:
        found = json_values(path)
    except ValueError as error:
        raise InvalidRequest(f"--output {path}: no JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(recipe, dict) for recipe in found):
        raise InvalidRequest(f"--output {path}: it has to hold a list of recipes, or not to exist")
    return found


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 0, or 2 for wrong options."""
    parser = argparse.ArgumentParser(prog="errata swe recipe", description=_ABOUT)
    add_inputs(parser, recipes=False)
    parser.add_argument("--mirror", type=Path, metavar="DIR", help="Git repositories, as owner/name or owner__name.")
    parser.add_argument("--swebench", type=Path, metavar="PYTHON", help="A Python that has swebench 4.1.0.")
    parser.add_argument("--output", type=Path, metavar="FILE", help="Add the drafts to the recipes of this file.")
    options = parser.parse_args(arguments)
    try:
        from ..server.prepare.draft import draft, specifications
    except ImportError as error:  # it compares versions as pip does
        raise NotSupported(f"drafts need the package packaging ({error}): pip install packaging") from error
    broken: dict[str, str] = {}
    dataset = read_dataset(options, broken)
    for why in broken.values():
        print(f"left out: {why}", file=sys.stderr)
    named = [name for group in options.instance for part in group for name in part.split(",") if name]
    if not named:
        raise InvalidRequest("name the instances with --instance ID")
    rows = [dataset.find(name) for name in dict.fromkeys(named)]
    index = PackageIndex(Store(options.store).packages)
    specs = specifications(options.swebench) if options.swebench else None
    known = _drafts(options.output) if options.output and options.output.exists() else []
    made = []
    for row in rows:
        found = draft(row, mirror=options.mirror, index=index, specs=specs)
        made.append(found.recipe.values())
        for note in found.notes:
            say(f"{row.instance_id}: {note}")
    if options.output:
        kept = [recipe for recipe in known if recipe.get("instance_id") not in named]
        options.output.write_text(json.dumps([*kept, *made], indent=1) + "\n", "utf-8")
        say(f"wrote {len(made)} to {options.output}")
    else:
        print(json.dumps(made, indent=1))
    return 0
