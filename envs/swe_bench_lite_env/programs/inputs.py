"""Options that the subcommands of ``errata swe`` share, and what they read and open for them."""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from errata_protocol.errors import InvalidRequest
from errata_server.sandbox import registry
from errata_server.sandbox.base import Backend
from errata_server.settings import Settings

from ..dataset import TEST_SPLIT, Dataset, EvaluationSplitWarning, Instance, UnknownSplit, load_dataset
from ..recipes import Recipe, Recipes, load_recipes
from ..server.prepare.build import Builder
from ..server.prepare.images import OFFICIAL, image_recipes
from ..server.prepare.store import Catalogue, Prepared, Store
from ..server.prepare.validate import validate


def add_inputs(parser: argparse.ArgumentParser, *, recipes: bool = True, required: bool = True) -> None:
    """Add the options that select instances and the store of prepared instances.

    Args:
        parser: The command's parser.
        recipes: Whether the command reads recipes.
        required: Whether it needs a data set.
    """
    rows = "Rows in the benchmark's schema: .jsonl, .json, .parquet, or a data set of the Hugging Face hub by name."
    parser.add_argument("--dataset", required=required, metavar="FILE", help=rows)
    if recipes:
        parser.add_argument("--recipes", type=Path, metavar="FILE", help="Recipes of the instances, JSON.")
        images = f"On the benchmark's images, {OFFICIAL} without a value; a recipe then only says what differs."
        parser.add_argument("--images", nargs="?", const=OFFICIAL, metavar="NAMESPACE[:TAG]", help=images)
    parser.add_argument("--split", metavar="NAME", help="The split of the data set; all without it.")
    which = "These instances; all that have a recipe without it. Repeatable."
    parser.add_argument("--instance", action="append", nargs="+", default=[], metavar="ID", help=which)
    parser.add_argument("--store", type=Path, metavar="DIR", help="Where prepared instances lie (ERRATA_SWE_STORE).")
    parser.add_argument("--base", action="append", default=[], metavar="NAME=PATH", help="A base tree; repeatable.")
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")


def read_dataset(options: argparse.Namespace, broken: MutableMapping[str, str] | None = None) -> Dataset:
    """Return the rows: those of the split ``test`` too, since nothing is trained here.

    Args:
        options: The command's options.
        broken: Mapping that gets why a row is left out, by the name of the row.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvaluationSplitWarning)
        if options.split:
            return load_dataset(options.dataset, options.split, broken=broken)
        try:
            rows = list(load_dataset(options.dataset, broken=broken))
        except UnknownSplit:
            rows = []
        try:
            tests = list(load_dataset(options.dataset, TEST_SPLIT, broken=broken))
        except UnknownSplit:
            tests = []
    known = {row.instance_id for row in rows}
    return Dataset([*rows, *(row for row in tests if row.instance_id not in known)], str(options.dataset))


def chosen(
    options: argparse.Namespace, broken: MutableMapping[str, str]
) -> tuple[list[tuple[Instance, Recipe]], list[str]]:
    """Return the instances that are meant with their recipes, and the ids of those that have none.

    Args:
        options: The command's options.
        broken: Mapping that gets the reason why a row or a recipe cannot be used, by its place or instance id.

    Raises:
        RecipeMissing: An instance that was named has no recipe.
        InvalidRequest: No instance has one.
    """
    dataset = read_dataset(options, broken)
    recipes = read_recipes(options, dataset, broken)
    named = [name for group in options.instance for part in group for name in part.split(",") if name]
    if named:
        rows = [dataset.find(name) for name in dict.fromkeys(named)]
        return [(row, recipes.find(row.instance_id, row.repo)) for row in rows], []
    pairs = [(row, recipes[row.instance_id]) for row in dataset if row.instance_id in recipes]
    if not pairs and not broken:
        first = next(iter(dataset), None)
        if first is None:
            raise InvalidRequest(f"{options.dataset} has no rows")
        recipes.find(first.instance_id, first.repo)
    known = {*recipes, *broken}
    return pairs, [row.instance_id for row in dataset if row.instance_id not in known]


def read_recipes(
    options: argparse.Namespace, dataset: Dataset, broken: MutableMapping[str, str] | None = None
) -> Recipes:
    """Return the recipes that were named, and those that the rows stand for with ``--images``.

    Args:
        options: The command's options.
        dataset: Rows that ``--images`` makes recipes for.
        broken: Mapping that gets the reason why a recipe cannot be used; None makes that an error. See `load_recipes`.

    Raises:
        InvalidRequest: Neither was given, or the file of recipes cannot be read.
    """
    if options.recipes is None and options.images is None:
        raise InvalidRequest("name the recipes with --recipes FILE, or build on the benchmark's images with --images")
    return load_recipes(options.recipes, broken=broken, defaults=image_recipes(dataset, options.images))


def bases_of(entries: Sequence[str]) -> dict[str, Path]:
    """Return base trees by name: those of the settings, and those of ``--base``.

    Raises:
        InvalidRequest: An entry is not NAME=PATH.
    """
    bases = dict(Settings().base)
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not (name and equals and path):
            raise InvalidRequest(f"--base takes NAME=PATH, not {entry!r}")
        bases[name] = Path(path)
    return bases


async def prepared(
    builder: Builder, catalogue: Catalogue, instance: Instance, recipe: Recipe, *, validated: bool
) -> Prepared:
    """Return an instance, built and validated first where it is not.

    Args:
        builder: Builder of the instance.
        catalogue: Catalogue that finds what is built.
        instance: The instance.
        recipe: Recipe of the instance.
        validated: Whether its validation has to pass.
    """
    await builder.build(instance, recipe)
    found = await catalogue.find(instance, recipe, validated=False)
    if validated and not found.validated:
        await validate(catalogue, instance, recipe, progress=builder.progress)
    return await catalogue.find(instance, recipe, validated=validated)


@asynccontextmanager
async def opened(store: Store, bases: dict[str, Path]) -> AsyncIterator[Backend]:
    """Yield a started backend; its files are beside the store and are removed at the end."""
    store.make()
    with tempfile.TemporaryDirectory(
        dir=store.directory, prefix=".sandboxes-", ignore_cleanup_errors=True
    ) as directory:
        backend = registry.create(Settings().sandbox, registry.config_for(Path(directory), bases))
        try:
            await backend.start()
            yield backend
        finally:
            await backend.close()


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)
