"""Imports the modules of an environment's directory, however they import each other (decision 170).

They become one package, so that ``from ..models import`` works. The absolute imports in them that mean a module of the
same directory (``from models import``, ``from server.app import``) are redirected into that package: they get the same
module, also where one of that name is installed or another directory has one. Statements of all other code are not
redirected.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_SUFFIXES = (".py", *EXTENSION_SUFFIXES)
_SITES = frozenset({"site-packages", "dist-packages"})

_directories: dict[str, Directory] = {}
"""Directories that were imported, by the names of their packages."""


class Directory:
    """A directory whose modules are imported as a package.

    Args:
        root: The directory, resolved.
        package: Name of the package in ``sys.modules``.
        names: Names by which its modules may import the package.

    Attributes:
        init_error: ImportError that its ``__init__.py`` raised; None if it raised none.
    """

    def __init__(self, root: Path, package: str, names: Iterable[str]) -> None:
        self.root = root
        self.package = package
        self.init_error: ImportError | None = None
        self._names = frozenset((package, *names))
        source = root / "src"
        has_source = source.is_dir() and not (source / "__init__.py").is_file()
        self._search = [root, source] if has_source else [root]
        self._elsewhere: dict[str, bool] = {}
        self._builtins = {**vars(builtins), "__import__": self._import}

    @classmethod
    def of(cls, root: Path, preferred: str, names: Iterable[str]) -> Directory:
        """Import a directory as a package, once.

        Args:
            root: The directory, resolved.
            preferred: Name of the package, unless another module is called so; its name is then made unique.
            names: Further names by which its modules may import it.
        """
        for known in _directories.values():
            if known.root == root and known.package in sys.modules:
                return known
        package, number = preferred, 2
        while not _is_free(package, root):
            package, number = f"{preferred}_{number}", number + 1
        made = cls(root, package, (preferred, *names))
        _directories[package] = made
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        try:
            made._run_init()
        except BaseException:
            del _directories[package]
            raise
        return made

    def module(self, name: str) -> ModuleType:
        """Import a module by the name that the directory's own modules use: its own, or an installed one."""
        found = self._own(name.split("."), "", ())
        return importlib.import_module(found[0] if found is not None else name)

    def find(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """Return the spec of a module of the package; None if the directory has none of that name."""
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):  # or beartype's subclass, in its place
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self._builtins)
        return spec

    def top_level(self, name: str) -> str | None:
        """Return the full name of the own module that ``name`` alone means; None if the directory has none."""
        tops = (top for _, top in self._candidates([name]) if top != self.package)
        return None if self._is_elsewhere(name) else next(tops, None)

    def _run_init(self) -> None:
        """Create the package. Its ``__init__.py`` may raise ImportError: it often imports the client, whose
        dependencies a server does not need."""
        search = [str(place) for place in self._search]
        known = sys.modules.get(self.package)
        if known is not None:
            known.__path__ = search
            return
        init = self.root / "__init__.py"
        spec = ModuleSpec(self.package, None, is_package=True)
        if init.is_file():
            spec = ModuleSpec(
                self.package, _Loader(self.package, str(init), self._builtins), origin=str(init), is_package=True
            )
            spec.has_location = True
        spec.submodule_search_locations = search
        made = sys.modules[self.package] = importlib.util.module_from_spec(spec)
        try:
            if isinstance(spec.loader, _Loader):
                spec.loader.exec_module(made)
        except ImportError as error:
            self.init_error = error
        except BaseException:
            del sys.modules[self.package]
            raise

    # -- import statements ------------------------------------------------------------------------------------------

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Import as ``builtins.__import__`` does, for the statements in modules of the directory."""
        importer = str((globals or {}).get("__name__"))
        # Code that such a module runs with globals of its own, for example an agent's, is not redirected.
        own = None
        if level == 0 and f"{importer}.".startswith(f"{self.package}."):
            own = self._own(name.split("."), importer, fromlist or ())
        if own is None:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        full, top = own
        imported = importlib.import_module(full)
        return builtins.__import__(full, globals, locals, fromlist) if fromlist else sys.modules.get(top, imported)

    def _own(self, parts: list[str], importer: str, fromlist: Sequence[str]) -> tuple[str, str] | None:
        """Return the module of the directory that an absolute import means; None if it means another module.

        Args:
            parts: Parts of the name.
            importer: Name of the module with the statement.
            fromlist: Names that are imported from the module.

        Returns:
            Its full name, and the full name of what ``parts[0]`` means.
        """
        for way, top in self._candidates(parts):
            full = ".".join((self.package, *way))
            if full != importer and (not self._is_elsewhere(parts[0]) or self._is_meant(full, way, fromlist)):
                return full, top
        return None

    def _candidates(self, parts: list[str]) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the modules of the directory that a name can mean, as paths below the package, and what its first part
        means then."""
        added = filter(self._holds, map(_resolved, sys.path))  # folders that the modules themselves have added
        for place in (*added, *self._search) if parts[0] not in sys.stdlib_module_names else ():
            if _exists(place.joinpath(*parts)):
                below = () if place in self._search else place.relative_to(self.root).parts
                yield (*below, *parts), ".".join((self.package, *below, parts[0]))
        if parts[0] in self._names and any(_exists(place.joinpath(*parts[1:])) for place in self._search):
            yield tuple(parts[1:]), self.package

    def _is_meant(self, full: str, way: tuple[str, ...], fromlist: Sequence[str]) -> bool:
        """Return whether an import whose top-level name is installed too means the module of the directory.

        It does not if that module lacks what is imported from it, or is no more than a folder, such as one of data.
        """
        if not fromlist or fromlist[0] == "*":
            return len(way) > 1 or (len(way) == 1 and not self._is_folder(way))
        module = importlib.import_module(full)
        return all(hasattr(module, name) or any(True for _ in self._candidates([*way, name])) for name in fromlist)

    def _is_folder(self, way: tuple[str, ...]) -> bool:
        return not any(
            place.joinpath(*way).with_suffix(end).is_file() or place.joinpath(*way, f"__init__{end}").is_file()
            for place in self._search
            for end in _SUFFIXES
        )

    def _is_elsewhere(self, top: str) -> bool:
        if top not in self._elsewhere:
            self._elsewhere[top] = any(not self._holds(place) for place in _places_of(top, folders=False))
        return self._elsewhere[top]

    def _holds(self, path: Path) -> bool:
        """Return whether a path is in the directory, and not among the packages of a Python environment in it."""
        if not path.is_relative_to(self.root):
            return False
        return not _SITES & set(path.relative_to(self.root).parts)


@functools.cache
def _resolved(entry: str) -> Path:
    return Path(entry).resolve()


def _exists(path: Path) -> bool:
    """Return whether a module can be imported from ``path``, which has no suffix."""
    return path.is_dir() or any(path.with_name(path.name + end).is_file() for end in _SUFFIXES)


def _is_free(name: str, root: Path) -> bool:
    """Return whether no other module than the directory ``root`` is called ``name``."""
    if name in sys.stdlib_module_names or (name in _directories and _directories[name].root != root):
        return False
    known = sys.modules.get(name)
    places = _places_of(name) if known is None else _directories_of(known)
    return (known is None or bool(places)) and places <= {root}


def _places_of(name: str, *, folders: bool = True) -> set[Path]:
    """Return where a top-level module that is not ours would be imported from: directories of a package, or the file.

    Args:
        name: Name of the module.
        folders: Whether folders without ``__init__.py`` count.
    """
    for finder in sys.meta_path:
        if finder is not _FINDER and hasattr(finder, "find_spec"):
            spec = finder.find_spec(name, None)
            if spec is not None:
                found = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
                return {Path(place).resolve() for place in found} if folders or spec.origin is not None else set()
    return set()


def _directories_of(module: ModuleType) -> set[Path]:
    places = getattr(module, "__path__", None)
    return {Path(place).resolve() for place in places} if isinstance(places, Iterable) else set()


# -- finders and loaders ----------------------------------------------------------------------------------------------


class _Loader(SourceFileLoader):
    """Loads a module whose import statements go to `Directory`.

    Args:
        name: Full name of the module.
        path: File of the module.
        names: Builtin names of the module.
    """

    def __init__(self, name: str, path: str, names: dict[str, Any]) -> None:
        super().__init__(name, path)
        self._names = names

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self._names
        super().exec_module(module)


class _Finder:
    """Finds the modules of directories' packages, also by the names that their own modules use.

    The latter is for imports that are no statements of these modules, such as ``importlib.import_module("server.app")``
    and those of pickles, where nothing else has the name.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top, _, rest = name.partition(".")
        if not rest:
            meant = [full for directory in _directories.values() if (full := directory.top_level(name)) is not None]
            return ModuleSpec(name, _Known(meant[0])) if len(meant) == 1 else None
        if top in _directories:
            return _directories[top].find(name, path)
        known = getattr(sys.modules.get(top), "__name__", None)
        if isinstance(known, str) and known != top and known.partition(".")[0] in _directories:
            return ModuleSpec(name, _Known(f"{known}.{rest}"))
        return None


class _Known(importlib.abc.Loader):
    """Loads a module that is called otherwise: both names are then names of the same module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


_FINDER = _Finder()
