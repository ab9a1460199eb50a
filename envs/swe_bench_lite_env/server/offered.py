"""The instances that a server offers: those that ship with the package, and those of the operator's data set."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from errata_environment.tasks import task_api
from errata_protocol.errors import InvalidRequest, NotSupported
from errata_protocol.exception_text import named_text_of
from errata_protocol.printable import printable

from ..dataset import (
    TEST_SPLIT,
    Dataset,
    EvaluationSplitWarning,
    Instance,
    UnknownInstance,
    UnknownSplit,
    load_dataset,
    some,
)
from ..recipes import Recipe, Recipes, load_recipes
from .prepare.images import image_recipes
from .settings import SweSettings, read_settings

log = logging.getLogger("errata.swe")

BUNDLED = "bundled"
"""The split of the instances that ship with the package."""

EVALUATION_WARNING = (
    f"the split {TEST_SPLIT} is for evaluation: a model that is trained on its episodes cannot be evaluated with it"
)

_TASKS = Path(__file__).resolve().parent.parent / "tasks"


class SplitNotOffered(task_api.UnknownSplit):
    """No split of that name, or none of the operator's can be used."""


@dataclass(frozen=True, slots=True)
class Offered:
    """Instances by split, and their recipes.

    Args:
        splits: All splits that a reset without a split's name may draw from, `BUNDLED` among them.
        default: The split of a reset that names none; empty where a reset has to name one.
        recipes: Recipes of the bundled instances under `BUNDLED`, those of the operator's under "".
        source: The operator's data set; empty without one.
        test: Whether the split ``test`` of ``source`` is loaded when a reset names it.
        broken: Reason why a row or a recipe of the operator's files cannot be used, by its place or instance id.
        unusable: Reason why none of the operator's data set can be used; empty if it can be. Then a reset has to name
            `BUNDLED` or one of its instances: an episode on another task than was meant would train the wrong thing.
    """

    splits: Mapping[str, Dataset]
    default: str
    recipes: Mapping[str, Recipes] = field(repr=False)
    source: str = ""
    test: bool = False
    broken: Mapping[str, str] = field(default_factory=dict, repr=False)
    unusable: str = ""

    def split(self, name: str | None) -> tuple[str, Dataset]:
        """Return a split by name; the default one without.

        Raises:
            SplitNotOffered: There is no such split, or none is named and there is no default.
        """
        if self.unusable and name != BUNDLED:
            raise SplitNotOffered(
                f"the data set {self.source} cannot be used: {self.unusable}; the split {BUNDLED!r} can be",
                known=list(self.splits),
            )
        if name is None and not self.default:
            raise SplitNotOffered(
                f"{self.source} has the split {TEST_SPLIT} only, which is for evaluation: reset(split={TEST_SPLIT!r}) "
                "takes it, or set ERRATA_SWE_SPLIT",
                known=list(self.splits),
            )
        name = self.default if name is None else name
        if name in self.splits:
            if name == TEST_SPLIT:
                log.warning("%s: %s", self.source, EVALUATION_WARNING)
            return name, self.splits[name]
        if name == TEST_SPLIT and self.test:
            found = _test_split(self.source)
            # A data set without splits is returned whole for every split: then these instances are not of ``test``.
            others = {name for known in self.splits.values() for name in known.ids}
            if others.isdisjoint(found.ids):
                log.warning("%s: %s", self.source, EVALUATION_WARNING)
                return name, found
        raise SplitNotOffered(f"no split {name!r}: there are {', '.join(self.splits)}", known=list(self.splits))

    def find(self, instance_id: str, split: str | None = None) -> tuple[str, Instance]:
        """Return the name of the split that has an instance, and the instance.

        Args:
            instance_id: The instance.
            split: Split to search; None for all of `splits`. These have ``test`` only if the operator chose that split.

        Raises:
            UnknownInstance: There is no such instance where it was searched.
            SplitNotOffered: There is no such split.
        """
        searched = [self.split(split)] if split is not None else list(self.splits.items())
        for name, dataset in searched:
            if instance_id in dataset.ids:
                if split is None and name == TEST_SPLIT:
                    log.warning("%s: %s", self.source, EVALUATION_WARNING)
                return name, dataset.find(instance_id)
        if split is None and self.test and instance_id in {row.instance_id for row in _test_rows(self.source)}:
            raise UnknownInstance(
                f"{instance_id} is of the split {TEST_SPLIT}, which is for evaluation: "
                f"reset(split={TEST_SPLIT!r}, instance_id={instance_id!r}) takes it",
                instance_id=instance_id,
            )
        if self.unusable:
            raise UnknownInstance(
                f"no instance {instance_id!r}: the data set {self.source} cannot be used: {self.unusable}",
                instance_id=instance_id,
            )
        there = "; ".join(f"{name} has {len(dataset)}, {some(dataset.ids)}" for name, dataset in searched)
        raise UnknownInstance(f"no instance {instance_id!r}: {there}", instance_id=instance_id)

    def choose(
        self, instance_id: str | None, split: str | None, index: int | None, seed: int | None
    ) -> tuple[str, Instance]:
        """Return the instance that a reset names, and its split.

        Args:
            instance_id: Id of the instance; None to choose by ``index`` or ``seed``.
            split: Split to choose from; None for all of `splits` with ``instance_id``, else for the default one.
            index: Position in the split, from 0.
            seed: Seed that draws an instance of the split where neither id nor index is given.

        Raises:
            InvalidRequest: There is no such instance, or it is named in two ways.
        """
        if instance_id:
            if index is not None:
                raise InvalidRequest("reset: name an instance by instance_id or by index, not by both")
            return self.find(instance_id, split)
        name, dataset = self.split(split)
        return name, task_api.pick(name, dataset, index, seed, word="instances")

    def recipe(self, split: str, instance: Instance) -> Recipe:
        """Return the recipe of an instance.

        Raises:
            RecipeMissing: It has none.
        """
        return self.recipes[BUNDLED if split == BUNDLED else ""].find(instance.instance_id, instance.repo)


@lru_cache(maxsize=1)
def bundled() -> tuple[Dataset, Recipes]:
    """Return the instances that ship with the package, and their recipes."""
    return load_dataset(_TASKS / "instances.jsonl", BUNDLED), load_recipes(_TASKS / "recipes.json")


def offered(settings: SweSettings) -> Offered:
    """Return what a server with these settings offers; files are read when they changed.

    A row or a recipe that cannot be used is left out, and a data set that cannot be read hides no bundled instance.
    """
    if settings.dataset is None:
        return _offered(None, None, None, None, ())
    files = [Path(path).expanduser() for path in (settings.dataset, settings.recipes) if path is not None]
    changes = tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in files)
    try:
        return _offered(settings.dataset, settings.recipes, settings.images, settings.split, changes)
    except NotSupported as error:  # the hub cannot be reached now: the next reset tries again
        return _bundled_only(settings.dataset, error.message)


def unusable() -> dict[str, str]:
    """Return why parts of the operator's files cannot be used, by row, instance or file."""
    found = offered(read_settings())
    return {**({found.source: found.unusable} if found.unusable else {}), **found.broken}


@lru_cache(maxsize=4)
def _offered(
    source: str | None, recipes: Path | None, images: str | None, split: str | None, changes: tuple[int, ...]
) -> Offered:
    del changes  # part of the key
    own, own_recipes = bundled()
    if source is None:
        return Offered({BUNDLED: own}, BUNDLED, {BUNDLED: own_recipes})
    try:
        return _with_own(source, recipes, images, split)
    except NotSupported:
        raise
    except InvalidRequest as error:
        why = error.message
    except Exception as error:  # of a parser: it hides no bundled instance all the same
        log.exception("the data set %s", source)
        why = named_text_of(error)
    log.warning("the data set %s cannot be used: %s", source, printable(why))
    return _bundled_only(source, why)


def _bundled_only(source: str, why: str) -> Offered:
    own, own_recipes = bundled()
    return Offered({BUNDLED: own}, "", {BUNDLED: own_recipes}, source, unusable=printable(why))


def _with_own(source: str, recipes: Path | None, images: str | None, split: str | None) -> Offered:
    """Return the bundled instances and the operator's.

    Raises:
        InvalidRequest: A file cannot be used, or two instances have one id.
    """
    own, own_recipes = bundled()
    broken: dict[str, str] = {}
    test = split is None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EvaluationSplitWarning)  # `Offered.split` says it at each use
            splits = load_dataset(source, split, broken=broken).splits
    except UnknownSplit as error:
        if split is not None or error.details.get("known") != [TEST_SPLIT]:
            raise
        splits = {}
    if BUNDLED in splits:
        raise InvalidRequest(f"{source}: the split {BUNDLED!r} is that of the instances in this package: rename it")
    own_ids = set(own.ids)
    both = [name for dataset in splits.values() for name in dataset.ids if name in own_ids]
    if both:
        raise InvalidRequest(f"{source}: {both[0]} is an instance of this package too: rename it")
    default = split or next((name for name in ("train", *splits) if name in splits), "")
    rows = [row for dataset in splits.values() for row in dataset]
    if images is not None and test:
        rows += _test_rows(source)
    theirs = load_recipes(recipes, broken=broken, defaults=image_recipes(rows, images))
    for why in broken.values():
        log.warning("not offered: %s", why)
    return Offered({**splits, BUNDLED: own}, default, {BUNDLED: own_recipes, "": theirs}, source, test, broken)


@lru_cache(maxsize=2)
def _test_split(source: str) -> Dataset:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvaluationSplitWarning)
        broken: dict[str, str] = {}
        found = load_dataset(source, TEST_SPLIT, broken=broken)
    for why in broken.values():
        log.warning("not evaluated: %s", why)
    return found


def _test_rows(source: str) -> list[Instance]:
    try:
        return list(_test_split(source))
    except UnknownSplit:
        return []
