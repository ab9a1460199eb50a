"""Where tests get their assertions from: helpers inside the repository, which judge as the tests do.

Pure: texts in, names of modules out. The *key* of a module is its path from where it is imported, without its suffix,
and of a package without its ``__init__.py``: ``flask/testing`` for ``src/flask/testing.py``. Files with equal
keys stand for the same module: the first one found decides what its import gives.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterable, Mapping

from .syntax import parsed

ROOTS = ("", "src/", "lib/")
"""Directories of a repository from which its modules are imported."""
MOST_NAMES = 500
"""Most names that are followed at one level."""

_ASSERTS = re.compile(r"_*(assert|raises|warns|expect|verify|approx$|deprecated_call$|fail$)", re.IGNORECASE)
_CASES = re.compile(r"(TestCase|TestsBase|TestBase|Case|TestMixin|TestsMixin)$")
_PLUGIN = re.compile(r"[\w-]+[\"']?\s*=\s*[\"']?([A-Za-z_][\w.]*)")
_PLUGIN_LINES = 20

Name = tuple[str, str]
"""A dotted module and a name in it; an empty name: the whole module."""


def module_of(path: str) -> str:
    """Return the key of a file of a module, whatever its form: source, byte code or extension module."""
    directory, name = posixpath.split(path)
    stem = name.split(".", 1)[0]
    found = directory if stem == "__init__" else posixpath.join(directory, stem)
    return next((found.removeprefix(root) for root in ROOTS if root and found.startswith(root)), found)


def candidates(name: Name) -> list[str]:
    """Return the source files in which a name may be, most likely first."""
    module, attribute = name
    paths = [module.replace(".", "/")]
    if attribute:
        paths.append(f"{paths[0]}/{attribute}")
    elif "." not in module:
        paths.append(f"_pytest/{module}")  # pytest's own plugins are named without their package
    return [f"{root}{path}{end}" for path in paths for root in ROOTS for end in (".py", "/__init__.py")]


def asserted(sources: Mapping[str, str]) -> tuple[Name, ...]:
    """Return the names that test modules import for assertions, test cases and plugins.

    Args:
        sources: Texts of test modules and of the conftest modules that they see, by path.
    """
    found: dict[Name, None] = {}
    for path, text in sources.items():
        tree = parsed(text)
        if tree is None:
            continue
        imported = _imports(tree, path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                uses = [base for base in node.bases if _CASES.search(_last(base, imported))]
            elif isinstance(node, ast.Call) and _ASSERTS.match(_last(node.func, imported)):
                uses = [node.func]
            else:
                continue
            for use in uses:
                found.update(dict.fromkeys(_resolved(use, imported)))
        found.update(dict.fromkeys(_plugins(tree)))
    return tuple(found)[:MOST_NAMES]


def declared(text: str) -> tuple[Name, ...]:
    """Return the modules that a repository's setup.cfg, pyproject.toml or setup.py declares as plugins of pytest."""
    lines = text.splitlines()
    found: dict[Name, None] = {}
    for at in [number for number, line in enumerate(lines) if "pytest11" in line][:_PLUGIN_LINES]:
        rest = [lines[at].split("pytest11", 1)[1].lstrip("\"'][({} =:"), *lines[at + 1 : at + _PLUGIN_LINES]]
        for line in rest:
            if line.startswith("["):
                break
            found.update({(module, ""): None for module in _PLUGIN.findall(line)})
    return tuple(found)


def followed(names: Iterable[Name], sources: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[Name, ...]]:
    """Return the files that define names, and the names of other modules from which files have them.

    Args:
        names: The names.
        sources: Texts of those of their `candidates` that exist, by path.
    """
    defining: dict[str, None] = {}
    further: dict[Name, None] = {}
    trees: dict[str, ast.Module | None] = {}
    for name in names:
        path = next((path for path in candidates(name) if path in sources), None)
        if path is None:
            continue
        if path not in trees:
            trees[path] = parsed(sources[path])
        tree = trees[path]
        attribute = name[1] if module_of(path) == name[0].replace(".", "/") else ""  # else a module of a package
        imported = {} if tree is None else _imports(tree, path)
        if attribute in imported:
            further[imported[attribute]] = None
        elif not attribute or tree is None or attribute in _defined(tree):
            defining[path] = None
            for node in [] if tree is None else tree.body:
                if isinstance(node, ast.ClassDef) and node.name == attribute:  # it judges with what it inherits
                    further.update(dict.fromkeys(found for base in node.bases for found in _resolved(base, imported)))
        else:
            further.update(dict.fromkeys((module, attribute) for module, star in imported.values() if star == "*"))
    return tuple(defining), tuple(further)[:MOST_NAMES]


def _imports(tree: ast.Module, path: str) -> dict[str, Name]:
    """Return what the names of a module are imported from; a star stands under a name of its own."""
    found: dict[str, Name] = {}
    package = module_of(path).split("/")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".", 1)[0]
                found[alias.asname or name] = (name, "")
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                inside = package if posixpath.basename(path) == "__init__.py" else package[:-1]
                above = inside[: len(inside) - node.level + 1]
                module = ".".join([*above, *filter(None, [module])])
            for alias in node.names:
                found[f"*{module}" if alias.name == "*" else alias.asname or alias.name] = (module, alias.name)
    return found


def _last(node: ast.expr, imported: Mapping[str, Name]) -> str:
    """Return the last part of a dotted name, as it was before an import renamed it; empty for another expression."""
    if isinstance(node, ast.Name):
        return imported[node.id][1] if node.id in imported else node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _resolved(node: ast.expr, imported: Mapping[str, Name]) -> list[Name]:
    """Return where a dotted name comes from; nothing where it is no import."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return []
    parts.reverse()
    if node.id not in imported:
        return [(module, node.id) for module, star in imported.values() if star == "*"]
    module, name = imported[node.id]
    whole = [part for part in (name, *parts) if part]
    if not whole:
        return [(module, "")]
    return [(".".join([module, *whole[:-1]]), whole[-1])]


def _plugins(tree: ast.Module) -> list[Name]:
    """Return the modules that ``pytest_plugins`` names."""
    found = []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "pytest_plugins" for target in targets):
            assert isinstance(node, ast.Assign)
            found += [
                (value.value, "")
                for value in ast.walk(node.value)
                if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value
            ]
    return found


def _defined(tree: ast.Module) -> set[str]:
    """Return the names that a module defines at its top level, also inside of conditions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found
