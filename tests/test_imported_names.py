"""What our files import of each other exists, in the environments of other frameworks too, which few runs build."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = (".", "protocol", "server", "client", "envs", "trainer_adapter", "bench", "conformance")


@functools.cache
def module_file(name: str) -> Path | None:
    """Return the file of a module of ours, ``None`` for other people's and for a folder without ``__init__.py``."""
    for source in SOURCES:
        place = ROOT.joinpath(source, *name.split("."))
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return file
    return None


Import = tuple[int, int, str | None, tuple[str, ...]]
"""Line, level, module and names of an import from a module."""


@functools.cache
def read(text: bytes) -> tuple[frozenset[str] | None, tuple[Import, ...]]:
    """Return what `names_of` and `imported` say of a module's text, which is parsed once."""
    tree = ast.parse(text)
    return names_in(tree), tuple(imports_in(tree))


def imports_in(tree: ast.Module) -> Iterator[Import]:
    """Yield the imports from modules, wherever in the statements they stand."""
    todo: list[Any] = [tree]
    while todo:
        one = todo.pop()
        if isinstance(one, ast.ImportFrom):
            yield one.lineno, one.level, one.module, tuple(alias.name for alias in one.names)
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            todo += getattr(one, part, ())


def names_of(file: Path) -> frozenset[str] | None:
    """Return what a module's own text binds at its top level, ``None`` if it makes names when asked for them."""
    return read(file.read_bytes())[0]


def names_in(tree: ast.Module) -> frozenset[str] | None:
    bound: set[str] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        one = todo.pop()
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(one.name)
        elif isinstance(one, ast.Import | ast.ImportFrom):
            bound.update(alias.asname or alias.name.split(".")[0] for alias in one.names)
        else:
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                bound.add(one.id)
            todo += ast.iter_child_nodes(one)
    return None if bound & {"__getattr__", "*"} else frozenset(bound)


def imported(file: Path, text: bytes) -> Iterator[tuple[int, str, str]]:
    """Yield line, module and name of every import from a module, relative ones spelled out."""
    place = file.relative_to(ROOT).with_suffix("").parts
    for source in sorted(SOURCES, key=len, reverse=True):
        if place[0] == source:
            place = place[1:]
    for line, level, from_module, names in read(text)[1]:
        above = ".".join(place[: len(place) - level]) if level else ""
        module = ".".join(part for part in (above, from_module) if part)
        yield from ((line, module, name) for name in names if name != "*")


def missing(file: Path, text: bytes) -> list[str]:
    """Return the imports of a file that name nothing."""
    found = []
    for line, module, name in imported(file, text):
        target = module_file(module)
        names = names_of(target) if target else None
        if names is not None and name not in names and not module_file(f"{module}.{name}"):
            found.append(f"{file.relative_to(ROOT)}:{line}: {module} has no {name}")
    return found


def our_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, check=True, text=True)
    names = [name for name in listed.stdout.split("\0") if name and "/tasks/" not in name and "/projects/" not in name]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_every_name_that_our_files_import_of_each_other_exists() -> None:
    files = our_files()
    assert len(files) > 800 and module_file("errata_trainer.episodes.tools")
    assert not [one for file in files for one in missing(file, file.read_bytes())]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"from errata_trainer.episodes.tools import schema_of", []),
        (b"from errata_trainer.recipes.verl.tool_calls import schema_of", ["schema_of"]),
        (b"def late():\n    from ..server.local_server import LocalServer, Absent", ["Absent"]),
        (b"from errata_trainer.recipes import verl, absent", ["absent"]),
        (b"from verl.utils import anything", []),
    ],
)
def test_an_import_of_a_name_that_has_moved_is_found(text: bytes, found: list[str]) -> None:
    said = missing(ROOT / "tests/verl/test_agent_loop.py", text)
    assert [one.rpartition(" ")[2] for one in said] == found
