"""Recipes: where the source of an instance comes from, and how its environment is built and its tests are run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from errata_protocol.errors import InvalidRequest
from errata_protocol.printable import printable

from .input_files import FileRefused, json_values

SOURCE_KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sdist": ("name", "version"),
        "git": (),
        "tree": ("path",),
        "directory": ("path",),
        "image": ("name",),
    }
)
"""Kinds of a source, with the keys that each needs."""

RUNNERS = ("pytest", "django", "sympy")
"""Test runners that a recipe may name. The parser of the log goes by the repository first."""

BASE_PYTHON = "base"
"""What a recipe names as its Python where that of the base tree, with its pytest and nothing installed, will do."""

_SOURCE_KEYS = {
    "sdist": {"kind", "name", "version", "sha256"},
    "git": {"kind", "repo", "commit"},
    "tree": {"kind", "path"},
    "directory": {"kind", "path"},
    "image": {"kind", "name"},
}
_KEYS = {
    "instance_id",
    "source",
    "python",
    "pins",
    "install",
    "env",
    "test_command",
    "exclude_pass_to_pass",
    "runner",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class RecipeInvalid(InvalidRequest):
    """A recipe that cannot be used; the message names the key and what to write."""


class RecipeMissing(InvalidRequest, LookupError):
    """An instance has no recipe; the message names the next step."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the tree at the base commit comes from.

    Args:
        kind: Kind of the source: ``sdist`` (a source archive of the package index), ``git`` (a local mirror), ``tree``
            (an exported root file system that has the repository in ``/testbed``), ``directory`` (files beside the
            recipe), or ``image`` (an image of the container engine that has the repository in ``/testbed``).
        name: Project on the index (``sdist``), or name of the image (``image``).
        version: Version of the release (``sdist``).
        sha256: Digest of the archive, hexadecimal (``sdist``); empty uses the digest that the index gives, if any.
        repo: Repository in the mirror, ``owner/name`` (``git``); empty uses the row's.
        commit: Commit in the mirror (``git``); empty uses the row's ``base_commit``.
        path: Path of the files (``tree`` and ``directory``), absolute or relative to the file of recipes.
    """

    kind: str
    name: str = ""
    version: str = ""
    sha256: str = ""
    repo: str = ""
    commit: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one instance is built and tested.

    Args:
        instance_id: The instance.
        source: Source of the tree at the base commit.
        python: Version of the interpreter, ``3.9`` or ``3.9.18``; or `BASE_PYTHON`.
        pins: Requirements that are installed before and after ``install``.
        install: Commands run in the tree before the base commit is made.
        env: Variables of the build, of the agent's shell and of the tests.
        test_command: Shell command that runs the tests of the instance in the tree, their files or modules included.
        exclude_pass_to_pass: Tests that are left out of PASS_TO_PASS.
        runner: Test runner, one of `RUNNERS`.
        root: Directory of the file that the recipe was read from; None for one made in memory.
    """

    instance_id: str
    source: Source
    python: str
    test_command: str
    pins: tuple[str, ...] = ()
    install: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    exclude_pass_to_pass: tuple[str, ...] = ()
    runner: str = "pytest"
    root: Path | None = None

    @property
    def source_path(self) -> Path:
        """Path of the source of kind ``tree`` or ``directory``."""
        return (self.root or Path()) / Path(self.source.path).expanduser()

    @property
    def digest(self) -> str:
        """sha256 over all that shapes the environment and the tests."""
        return f"sha256:{hashlib.sha256(json.dumps(self.values(), sort_keys=True).encode()).hexdigest()}"

    def values(self) -> dict[str, Any]:
        """Return the recipe as its file has it, without keys that hold their default."""
        source = {name: value for name in Source.__slots__ if (value := getattr(self.source, name))}
        values: dict[str, Any] = {
            "instance_id": self.instance_id,
            "source": source,
            "python": self.python,
            "pins": list(self.pins),
            "install": list(self.install),
            "env": dict(self.env),
            "test_command": self.test_command,
            "exclude_pass_to_pass": list(self.exclude_pass_to_pass),
            "runner": self.runner,
        }
        return {name: value for name, value in values.items() if value and (name, value) != ("runner", "pytest")}


class Recipes(Mapping[str, Recipe]):
    """Recipes by instance id.

    Args:
        recipes: The recipes, by instance id.
        name: Name of the recipes in error messages, e.g. the path of their file.
        broken: Reason why a recipe cannot be used, by instance id, or by its place if it names no instance.
    """

    def __init__(
        self,
        recipes: Mapping[str, Recipe],
        name: str = "the recipes",
        broken: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._recipes = dict(recipes)
        self._broken = dict(broken)
        self.name = name

    def __getitem__(self, instance_id: str) -> Recipe:
        return self._recipes[instance_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._recipes)

    def __len__(self) -> int:
        return len(self._recipes)

    def find(self, instance_id: str, repo: str = "owner/name") -> Recipe:
        """Return the recipe of an instance.

        Args:
            instance_id: The instance.
            repo: Its repository, for the error's example.

        Raises:
            RecipeMissing: It has none; the message holds a recipe to start from.
            RecipeInvalid: Its recipe cannot be used.
        """
        if instance_id in self._recipes:
            return self._recipes[instance_id]
        if instance_id in self._broken:
            raise RecipeInvalid(self._broken[instance_id])
        example = {
            "instance_id": instance_id,
            "source": {"kind": "git", "repo": repo},
            "python": "3.9",
            "pins": ["pytest==7.4.4"],
            "install": ["pip install -e ."],
            "test_command": "pytest -rA tests/test_example.py",
        }
        raise RecipeMissing(
            f"{self.name} has no recipe for {instance_id}: `errata swe recipe` drafts one; or write "
            f"{json.dumps(example)}",
            instance_id=instance_id,
        )


def read_recipe(values: Any, where: str = "recipe", root: Path | None = None) -> Recipe:
    """Return the recipe that a JSON object describes.

    Args:
        values: The JSON object.
        where: Name of the recipe in error messages.
        root: Directory that relative paths of the source start from.

    Raises:
        RecipeInvalid: A key is missing, unknown or cannot be read.
    """
    if not isinstance(values, Mapping):
        raise RecipeInvalid(f"{where}: a recipe has to be an object, not {type(values).__name__}")
    instance_id = values.get("instance_id")
    if not isinstance(instance_id, str) or not instance_id:
        raise RecipeInvalid(f'{where}: write "instance_id": the id of the instance')
    where = f"{where} ({instance_id})"
    where = printable(where, 300)
    unknown = sorted(set(values) - _KEYS)
    if unknown:
        raise RecipeInvalid(f"{where}: unknown key {unknown[0]!r}: a recipe has {', '.join(sorted(_KEYS))}")
    python = values.get("python")
    if not isinstance(python, str) or not re.fullmatch(rf"3\.\d+(\.\d+)?|{BASE_PYTHON}", python):
        raise RecipeInvalid(f'{where}: write "python": "3.9", the version of the interpreter, not {python!r}')
    if python == BASE_PYTHON and (values.get("pins") or values.get("install")):
        raise RecipeInvalid(f'{where}: "python": "{BASE_PYTHON}" takes no pins and no install: write a version, "3.9"')
    command = values.get("test_command")
    if not isinstance(command, str) or not command.strip():
        raise RecipeInvalid(
            f'{where}: write "test_command": "pytest -rA tests/test_example.py", the command of its tests'
        )
    runner = values.get("runner") or "pytest"
    if runner not in RUNNERS:
        raise RecipeInvalid(f"{where}: unknown runner {printable(repr(runner), 80)}: one of {', '.join(RUNNERS)}")
    env = values.get("env") or {}
    if not isinstance(env, Mapping) or not all(
        isinstance(name, str) and _NAME.fullmatch(name) and isinstance(value, str) for name, value in env.items()
    ):
        raise RecipeInvalid(f'{where}: write "env": {{"NAME": "text"}}, variables with their values as text')
    return Recipe(
        instance_id=instance_id,
        source=_source(values.get("source"), where),
        python=python,
        test_command=command,
        pins=_texts(values.get("pins"), where, "pins", '["pytest==7.4.4"]'),
        install=_texts(values.get("install"), where, "install", '["pip install -e ."]'),
        env=MappingProxyType(dict(env)),
        exclude_pass_to_pass=_texts(
            values.get("exclude_pass_to_pass"), where, "exclude_pass_to_pass", '["tests/test_a.py::test_b"]'
        ),
        runner=runner,
        root=root,
    )


def load_recipes(
    path: str | Path | None,
    *,
    broken: MutableMapping[str, str] | None = None,
    defaults: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Recipes:
    """Read a file of recipes: a JSON list, a JSON object by instance id, or JSON lines (``.jsonl``).

    Args:
        path: The file; None for the defaults alone.
        broken: Gets the reason why a recipe cannot be used, by its instance's id or its place; `Recipes.find` raises
            that reason. None: such a recipe is an error.
        defaults: Recipes as JSON objects by instance id. One in the file only needs the keys that differ from them.

    Raises:
        RecipeInvalid: The file cannot be read; or a recipe of it cannot, or two are of one instance, and ``broken`` is
            None.
    """
    made = {name: read_recipe(values) for name, values in defaults.items()}
    if path is None:
        return Recipes(made)
    path = Path(path).expanduser()
    try:
        found = json_values(path)
    except FileRefused as error:
        raise RecipeInvalid(error.message) from error
    except OSError as error:
        raise RecipeInvalid(f"{path}: {error.strerror or error}: name a file of recipes") from error
    except ValueError as error:
        raise RecipeInvalid(f"{path}: no JSON: {error}") from error
    if isinstance(found, dict):
        found = [{"instance_id": name, **value} if isinstance(value, dict) else value for name, value in found.items()]
    if not isinstance(found, list):
        raise RecipeInvalid(f"{path}: it has to hold a list of recipes, or an object of them by instance id")
    recipes: dict[str, Recipe] = {}
    problems: dict[str, str] = {}
    for number, values in enumerate(found, 1):
        where = f"{path.name} recipe {number}"
        if isinstance(values, Mapping):
            values = {**defaults.get(str(values.get("instance_id")), {}), **values}
        try:
            recipe = read_recipe(values, where, path.resolve().parent)
            if recipe.instance_id in recipes:
                raise RecipeInvalid(f"{path}: two recipes of {recipe.instance_id}: keep one")
        except RecipeInvalid as error:
            if broken is None:
                raise
            named = values.get("instance_id") if isinstance(values, Mapping) else None
            problems[named if isinstance(named, str) and named else where] = printable(error)
        else:
            recipes[recipe.instance_id] = recipe
    if broken is not None:
        broken.update({printable(name): why for name, why in problems.items()})
    # Of two recipes of an instance neither is known to be the right one.
    kept = {name: recipe for name, recipe in (made | recipes).items() if name not in problems}
    return Recipes(kept, str(path), problems)


def _source(values: Any, where: str) -> Source:
    example = '"source": {"kind": "sdist", "name": "Flask", "version": "2.2.5", "sha256": "..."}'
    if not isinstance(values, Mapping) or values.get("kind") not in tuple(SOURCE_KINDS):
        raise RecipeInvalid(f"{where}: write {example}, with a kind of {', '.join(SOURCE_KINDS)}")
    kind = values["kind"]
    missing = [name for name in SOURCE_KINDS[kind] if not values.get(name)]
    if missing:
        raise RecipeInvalid(f'{where}: a source of kind {kind} needs "{missing[0]}"')
    unknown = sorted(set(values) - _SOURCE_KEYS[kind])
    if unknown:
        allowed = ", ".join(sorted(_SOURCE_KEYS[kind]))
        raise RecipeInvalid(f"{where}: unknown key {unknown[0]!r} in a source of kind {kind}: it has {allowed}")
    if not all(isinstance(value, str) for value in values.values()):
        raise RecipeInvalid(f"{where}: the values of source have to be text")
    if values.get("sha256") and not re.fullmatch(r"[0-9a-f]{64}", values["sha256"]):
        raise RecipeInvalid(f"{where}: sha256 has to be 64 hexadecimal digits, in lower case")
    return Source(**values)


def _texts(values: Any, where: str, name: str, example: str) -> tuple[str, ...]:
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise RecipeInvalid(f'{where}: write "{name}": {example}, a list of texts')
    return tuple(values)
