"""Imports ``module:attribute`` or the application of an OpenEnv package directory; a failure is a one-line error."""

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
"""Directories of environments whose modules were imported as a program's, and are on the path for it."""

_packages: set[str] = set()
"""Names under which directories were made importable."""

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def from_here() -> None:
    """Let modules be found in the current directory, as uvicorn does for its ``module:attribute``."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def attribute(target: str) -> Any:
    """Return what ``module:attribute`` names.

    Raises:
        InvalidRequest: There is no such module or attribute, or the module failed while it was imported.
    """
    if not _REFERENCE.fullmatch(target):
        raise InvalidRequest(f"{target!r} is not module:attribute, such as my_package.server.app:app")
    name, _, path = target.partition(":")
    return _member(module(name), path)


def attribute_of_package(package: Package) -> Any:
    """Return the application that an environment package names, however its modules import each other.

    As part of its package (``from ..models import``), else as a program in its directory (``from models import``):
    OpenEnv's environments are written for one of these, or for both.

    Raises:
        InvalidRequest: Neither works; the message says why the first did not.
    """
    name, _, path = package.app.partition(":")
    parent = package.module or _as_package(package)
    try:
        with _programs_hidden():
            made = _import(f"{parent}.{name}")
        return _member(made, path)
    except ImportError as error:
        first = error
    _refuse_mixing(package, name, first)
    directory = str(package.directory)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    _programs.add(directory)
    try:
        return _member(_import(name), path)
    except ImportError:
        raise InvalidRequest(f"cannot import {package.app} of {package.directory}: {described(first)}") from first


def _refuse_mixing(package: Package, name: str, first: ImportError) -> None:
    """Refuse a second program whose modules have the names of another's: Python would take one for the other."""
    own = {entry.stem for entry in package.directory.iterdir()}
    others = {top for known in _of_programs(but=package.directory) if (top := known.partition(".")[0]) in own}
    top = name.partition(".")[0]
    if top in sys.modules and package.directory not in _places(sys.modules[top]):
        others.add(top)
    if others:
        raise InvalidRequest(
            f"cannot import {package.app} of {package.directory}: {described(first)}; and as a program neither, "
            f"because another module is called {sorted(others)[0]!r} in this process: serve it in a process of its own"
        ) from first


def _of_programs(but: Path | None = None) -> dict[str, ModuleType]:
    """Return the imported modules of environments that run as programs, except those of one directory."""
    programs = [Path(program) for program in _programs if Path(program) != but]
    if not programs:
        return {}
    return {
        name: found
        for name, found in list(sys.modules.items())
        if name.partition(".")[0] not in _packages
        and any(place.is_relative_to(program) for place in _places(found, above=False) for program in programs)
    }


@contextmanager
def _programs_hidden() -> Iterator[None]:
    """Keep the modules of environments that run as programs (``models``, ``server``) from being taken for another's."""
    hidden = _of_programs()
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
        InvalidRequest: It is not there, or failed.
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
    """Public names a module defined, classes and functions of its own and other objects but modules."""
    return [
        name
        for name, value in vars(owner).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and (not (inspect.isclass(value) or inspect.isfunction(value)) or value.__module__ == owner.__name__)
        and type(value).__module__ not in ("typing", "__future__")
    ][:12]


def _as_package(package: Package) -> str:
    """Make a package's directory importable under its own name, without its parent on the path."""
    name = package.directory.name.replace("-", "_")
    if not name.isidentifier():
        name = re.sub(r"\W", "_", f"env_{name}")
    known = sys.modules.get(name)
    if known is not None:
        if package.directory not in _places(known):
            raise InvalidRequest(
                f"{package.directory} would be imported as {name!r}, which is another package in this process already"
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
        # Its client may need what only clients have installed; the server's modules are what is wanted.
        made.__path__ = [str(package.directory)]
    except BaseException as error:
        del sys.modules[name]
        raise InvalidRequest(f"cannot import {name!r} from {package.directory}: {described(error)}") from error
    return name


def _places(owner: ModuleType, *, above: bool = True) -> set[Path]:
    """Return the directories a module's own modules come from; of a single file, its directory.

    Args:
        owner: The module.
        above: With the directories above these, in which the module itself lies.
    """
    places = getattr(owner, "__path__", None)
    if not isinstance(places, Iterable):
        places = ()  # some modules answer every name with something, as `torch.classes` does
    paths = [Path(place).resolve() for place in places]
    file = getattr(owner, "__file__", None)
    if file is not None:
        paths.append(Path(file).resolve().parent)
    return {*paths, *(path.parent for path in paths if above)}


def described(error: BaseException) -> str:
    """Return what failed and where, and the earlier failures that it was caused by or followed."""
    lines = []
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
