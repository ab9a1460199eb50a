"""Imports a package and delays the import of one of its modules until something uses it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection

OPENENV_WEB_INTERFACE = (
    "openenv.core.env_server",
    "web_interface",
    ("WebInterfaceManager", "create_web_interface_app"),
)
"""The arguments of `import_without` for OpenEnv's web interface, which imports gradio (decision 140)."""


def import_without(package: str, module: str, names: Collection[str]) -> None:
    """Import a package; import one of its modules only when one of the names that come from it is used.

    The package has to expect that the module cannot be imported, and to set the names to None then. Everything stays
    where it was: the names are found by PEP 562, the module by an ordinary import. Nothing is done where the package,
    or the module, has been imported already.

    Args:
        package: ``a.b``. Its parent ``a`` may take over the names, too.
        module: The module's name inside the package.
        names: What the package imports from the module.
    """
    whole = f"{package}.{module}"
    if package in sys.modules or whole in sys.modules:
        return
    sys.modules[whole] = None  # type: ignore[assignment] # importing it raises ModuleNotFoundError
    try:
        imported = importlib.import_module(package)
    finally:
        del sys.modules[whole]

    def load(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(whole), name)
        setattr(imported, name, value)
        return value

    for where in (imported, sys.modules[package.rpartition(".")[0]]):
        for name in names:
            if vars(where).get(name, ...) is None:
                delattr(where, name)
    imported.__getattr__ = load  # type: ignore[method-assign]
