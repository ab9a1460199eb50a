"""Modules of `examples/`, for tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def example(name: str) -> Any:
    """Return a module of `examples/`, also for those that import it. The folder cannot be on the path: it has one with
    the name of VeRL's package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "examples" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
