"""Finds installed environments: those with an entry point for Errata, and OpenEnv's environment packages.

OpenEnv's packages are distributions named ``openenv-<name>``. The package inside holds an ``openenv.yaml`` whose
``app`` names the application, ``server.app:app`` by default. OpenEnv's own discovery is not used, because it writes a
cache file and finds clients only.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, distributions, entry_points
from pathlib import Path
from typing import Any

import yaml

from errata_os.input_files import FileRefused, read_file
from errata_protocol.errors import InvalidRequest
from errata_protocol.printable import printable

log = logging.getLogger("errata.server")

GROUP = "errata.environments"
MANIFEST = "openenv.yaml"
CONVENTION = "server.app:app"
_MAX_BYTES = 64 * 1024
_MAX_DEPTH = 32
_NO_ENVIRONMENTS = frozenset({"openenv-core", "openenv-errata"})


@dataclass(frozen=True, slots=True)
class Package:
    """An OpenEnv environment package.

    Args:
        name: Name of the environment, from its manifest or its directory.
        directory: Directory of the package.
        app: ``module:attribute`` of its application; the module is imported within the package or on its own.
        module: Name of the import package; empty if it is not installed.
    """

    name: str
    directory: Path
    app: str
    module: str = ""


def published() -> dict[str, EntryPoint]:
    """Return the entry points of installed environments, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def packages() -> dict[str, Package]:
    """Return the installed OpenEnv environment packages, by the name of their import package."""
    found = {}
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name.startswith("openenv-") and name not in _NO_ENVIRONMENTS:
            module = name.removeprefix("openenv-").replace("-", "_")
            try:
                package = importable(module)
            except InvalidRequest as error:  # one bad package hides no other
                log.warning("environment package %s: %s", name, printable(error.message))
                continue
            if package is not None:
                found[module] = package
    return found


def importable(module: str) -> Package | None:
    """Return the environment package of an importable module, without importing it; None if there is none."""
    if not module.isidentifier():
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        package = package_at(Path(place))
        if package is not None:
            return replace(package, module=module)
    return None


def named(name: str) -> Package | None:
    """Return the package that OpenEnv's ``AutoEnv`` finds for a name (``echo``, ``echo-env``, ...); None if none."""
    module = name.replace("-", "_")
    for candidate in dict.fromkeys((module, module.removesuffix("_env") + "_env")):
        package = importable(candidate)
        if package is not None:
            return package
    return None


def package_at(directory: Path) -> Package | None:
    """Return the environment package in a directory; None if it has no manifest and no ``server/app.py``.

    Raises:
        InvalidRequest: The manifest cannot be read or is not valid.
    """
    manifest = directory / MANIFEST
    if manifest.is_file():
        stated = _read(manifest)
        name, app = stated.get("name") or directory.resolve().name, stated.get("app") or CONVENTION
        if not isinstance(name, str) or not isinstance(app, str) or ":" not in app:
            raise InvalidRequest(
                f"{manifest}: name has to be a string and app module:attribute, not {name!r} and {app!r}"
            )
        return Package(name, directory.resolve(), app)
    if (directory / "server" / "app.py").is_file():
        return Package(directory.resolve().name, directory.resolve(), CONVENTION)
    return None


def _read(manifest: Path) -> dict[str, Any]:
    try:
        text = read_file(manifest, _MAX_BYTES).decode()
        _check_structure(text)
        stated = yaml.safe_load(text)
    except (FileRefused, OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidRequest(f"cannot read {manifest}: {' '.join(str(error).split())}") from error
    if not isinstance(stated, dict):
        raise InvalidRequest(f"{manifest} is not a mapping of names to values")
    return stated


def _check_structure(text: str) -> None:
    """Check a manifest before it is made into values, which can be exponentially larger than its text.

    Raises:
        yaml.YAMLError: It is nested too deeply, or has an alias.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise yaml.YAMLError(f"nested deeper than {_MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("an alias (*name): write the value out")
