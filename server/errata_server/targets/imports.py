"""Imports ``module:attribute`` or the application of an OpenEnv package directory; failures become one-line errors.

The modules of such a directory import each other either as a package (``from ..models import``) or as a program
(``from models import``). A program's directory is put on ``sys.path``."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from errata_protocol.errors import InvalidRequest

from ..environments.discovery import Package

_programs: set[str] = set()
"""Directories on ``sys.path`` whose modules were imported as a program."""

_packages: set[str] = set()
"""Names in ``sys.modules`` under which directories were imported as packages."""

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def add_working_directory() -> None:
    """Put the current directory on ``sys.path``, as uvicorn does for its ``module:attribute``."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def attribute(target: str) -> Any:
    """Import the object that ``module:attribute`` names; the attribute may be dotted.

    Raises:
        InvalidRequest: ``target`` has another form, there is no such module or attribute, or the import failed.
    """
    if not _REFERENCE.fullmatch(target):
        raise InvalidRequest(f"{target!r} is not module:attribute, such as my_package.server.app:app")
    name, _, path = target.partition(":")
    return _member(module(name), path)


def attribute_of_package(package: Package) -> Any:
    """Import the application that an environment package names, however its modules import each other.

    The module is imported as part of its package (``from ..models import``) and, if that raises ImportError, as a
    program in its directory (``from models import``): OpenEnv's environments are written for one of these, or for both.

    Raises:
        InvalidRequest: Neither works; the message has the error of the first way. Or the second would take modules of
            another program for its own.
    """
    name, _, path = package.app.partition(":")
    parent = package.module or _as_package(package)
    try:
        with _without_program_modules():
            made = _import(f"{parent}.{name}")
        return _member(made, path)
    except ImportError as error:
        first = error
    _check_name_clashes(package, name, first)
    directory = str(package.directory)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    _programs.add(directory)
    try:
        return _member(_import(name), path)
    except ImportError:
        raise InvalidRequest(f"cannot import {package.app} of {package.directory}: {described(first)}") from first


def _check_name_clashes(package: Package, name: str, first: ImportError) -> None:
    """Raise InvalidRequest if a module of this program has the same name as another program's, or as ``name``'s module.

    Python would import the other program's module in its place.
    """
    own = {entry.stem for entry in package.directory.iterdir()}
    others = {top for known in _program_modules(but=package.directory) if (top := known.partition(".")[0]) in own}
    top = name.partition(".")[0]
    if top in sys.modules and package.directory not in _directories(sys.modules[top]):
        others.add(top)
    if others:
        raise InvalidRequest(
            f"cannot import {package.app} of {package.directory}: {described(first)}; and as a program neither, "
            f"because another module is called {sorted(others)[0]!r} in this process: serve it in a process of its own"
        ) from first


def _program_modules(but: Path | None = None) -> dict[str, ModuleType]:
    """Return the imported modules of programs, by name, except those of the directory ``but``."""
    programs = [Path(program) for program in _programs if Path(program) != but]
    if not programs:
        return {}
    return {
        name: found
        for name, found in list(sys.modules.items())
        if name.partition(".")[0] not in _packages
        and any(
            directory.is_relative_to(program)
            for directory in _directories(found, parents=False)
            for program in programs
        )
    }


@contextmanager
def _without_program_modules() -> Iterator[None]:
    """Hide the modules of programs (``models``, ``server``) and their directories from imports in the context."""
    hidden = _program_modules()
    path = list(sys.path)
    sys.path[:] = [entry for entry in path if entry not in _programs]
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)
        sys.path[:] = path


def module(name: str) -> ModuleType:
    """Import a module.

    Raises:
        InvalidRequest: There is no such module, or it raised an exception.
    """
    try:
        return _import(name)
    except ImportError as error:
        missing = getattr(error, "name", None)
        if isinstance(error, ModuleNotFoundError) and missing and (name == missing or name.startswith(missing + ".")):
            raise InvalidRequest(
                f"there is no module {missing!r} in {Path.cwd()} or among the installed packages"
            ) from error
        raise InvalidRequest(f"cannot import {name!r}: {described(error)}") from error


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a module may even exit
        raise InvalidRequest(f"cannot import {name!r}: {described(error)}") from error


def _member(owner: ModuleType, path: str) -> Any:
    found: Any = owner
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            there = ", ".join(_own_names(owner)) or "nothing of its own"
            raise InvalidRequest(f"module {owner.__name__!r} has no {path!r}; it has: {there}") from error
    return found


def _own_names(owner: ModuleType) -> list[str]:
    """Return up to 12 public names of a module, without modules and without classes and functions from elsewhere."""
    return [
        name
        for name, value in vars(owner).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and (not (inspect.isclass(value) or inspect.isfunction(value)) or value.__module__ == owner.__name__)
        and type(value).__module__ not in ("typing", "__future__")
    ][:12]


def _as_package(package: Package) -> str:
    """Import a package's directory under its own name, without its parent on ``sys.path``; return that name.

    An ImportError of its ``__init__.py`` is ignored: the package is then empty, but its submodules can be imported.

    Raises:
        InvalidRequest: Another package has that name, or ``__init__.py`` raised another exception.
    """
    name = package.directory.name.replace("-", "_")
    if not name.isidentifier():
        name = re.sub(r"\W", "_", f"env_{name}")
    known = sys.modules.get(name)
    if known is not None:
        if package.directory not in _directories(known):
            raise InvalidRequest(
                f"{package.directory} would be imported as {name!r}, but another package has that name in this process"
            )
        return name
    _packages.add(name)
    init = package.directory / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        name, init if init.is_file() else None, submodule_search_locations=[str(package.directory)]
    )
    if spec is None or not init.is_file():
        made = ModuleType(name)
        made.__path__ = [str(package.directory)]
        sys.modules[name] = made
        return name
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    assert spec.loader is not None
    try:
        spec.loader.exec_module(made)
    except ImportError:
        # It may import its client, whose dependencies need not be installed. Only its server is needed.
        made.__path__ = [str(package.directory)]
    except BaseException as error:
        del sys.modules[name]
        raise InvalidRequest(f"cannot import {name!r} from {package.directory}: {described(error)}") from error
    return name


def _directories(owner: ModuleType, *, parents: bool = True) -> set[Path]:
    """Return the directories of a module: those it searches for submodules, and that of its file.

    Args:
        owner: The module.
        parents: Add the parents of these directories.
    """
    places = getattr(owner, "__path__", None)
    if not isinstance(places, Iterable):
        places = ()  # some modules have every attribute, such as `torch.classes`
    paths = [Path(place).resolve() for place in places]
    file = getattr(owner, "__file__", None)
    if file is not None:
        paths.append(Path(file).resolve().parent)
    return {*paths, *(path.parent for path in paths if parents)}


def described(error: BaseException) -> str:
    """Describe an exception with its place in the source, and up to two exceptions that caused or preceded it."""
    lines: list[str] = []
    known: BaseException | None = error
    while known is not None and len(lines) < 3:
        text = f"{type(known).__name__}: {' '.join(str(known).split())}"
        frames = [f for f in traceback.extract_tb(known.__traceback__) if "importlib" not in f.filename]
        frames = [f for f in frames if f.filename != __file__]
        if isinstance(known, SyntaxError) and known.filename:
            text += f" ({known.filename}:{known.lineno})"
        elif frames:
            text += f" ({frames[-1].filename}:{frames[-1].lineno})"
        if text not in lines:
            lines.append(text)
        known = known.__cause__ or known.__context__
    return ", after ".join(lines)
