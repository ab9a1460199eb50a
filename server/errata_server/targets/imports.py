"""Imports ``module:attribute`` or the application of an OpenEnv package directory; failures become one-line errors."""

from __future__ import annotations

import importlib
import inspect
import keyword
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from errata_protocol.errors import InvalidRequest
from errata_protocol.exception_text import named_text_of

from ..environments.discovery import Package
from .directory_modules import Directory

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

    Raises:
        InvalidRequest: It cannot be imported.
    """
    name, _, path = package.app.partition(":")
    root = package.directory
    preferred = package.module or _identifier(root.name)
    directory = None
    try:
        directory = Directory.of(root, preferred, [package.name])
        return _member(directory.module(name), path)
    except (InvalidRequest, KeyboardInterrupt):
        raise
    except BaseException as error:  # a module may even exit
        said = described(error)
        if directory is not None:
            said = said.replace(f"'{directory.package}.", "'")  # a name that nobody wrote
            if isinstance(error, ImportError) and directory.init_error is not None:
                said += f"; its __init__.py raised {described(directory.init_error)}"
        raise InvalidRequest(f"cannot import {package.app} of {root}: {said}{_remedy(error, root)}") from error


def _remedy(error: BaseException, root: Path) -> str:
    """Return what to do about a module that is missing; "" for another error."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    for name, how in (("pyproject.toml", ""), ("setup.py", ""), ("requirements.txt", "-r ")):
        for file in (root / name, root / "server" / name):
            if file.is_file():
                return f"; if a package is missing: pip install {how}{file if how else root}"
    return "; if a package is missing, install it with pip install"


def _identifier(name: str) -> str:
    """Return a name under which a directory can be imported."""
    name = name.replace("-", "_")
    return name if name.isidentifier() and not keyword.iskeyword(name) else re.sub(r"\W", "_", f"env_{name}")


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


def described(error: BaseException) -> str:
    """Describe an exception with its place in the source, and up to two exceptions that caused or preceded it."""
    lines: list[str] = []
    known: BaseException | None = error
    while known is not None and len(lines) < 3:
        text = " ".join(named_text_of(known).split())
        frames = [f for f in traceback.extract_tb(known.__traceback__) if "importlib" not in f.filename]
        frames = [f for f in frames if Path(f.filename).parent != Path(__file__).parent]
        if isinstance(known, SyntaxError) and known.filename:
            text += f" ({known.filename}:{known.lineno})"
        elif frames:
            text += f" ({frames[-1].filename}:{frames[-1].lineno})"
        if text not in lines:
            lines.append(text)
        known = known.__cause__ or known.__context__
    return ", after ".join(lines)
