"""The probe of an environment package: what the conformance kit may send to it (conformance/README.md)."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errata_os.input_files import FileRefused, read_file
from errata_protocol.printable import printable

from .discovery import MANIFEST

log = logging.getLogger("errata.server")

PLACE = Path("validation") / "conformance.json"
"""Where a package has its probe, beside OpenEnv's own ``validation`` files."""

MAX_BYTES = 1024**2
"""Largest probe that is served, bytes."""

_PARENTS = 3
"""How many directories above a module its package's manifest is looked for."""


def probe_of(made: Callable[..., Any], action_cls: type) -> bytes | None:
    """Return the JSON text of the probe of an environment's package; None if it has none.

    Args:
        made: The environment's class, or a function or ``functools.partial`` that makes it.
        action_cls: Class of its actions.
    """
    for one in (getattr(made, "func", made), action_cls):
        source = getattr(sys.modules.get(getattr(one, "__module__", "")), "__file__", None)
        for directory in Path(source).resolve().parents[:_PARENTS] if source else ():
            if (directory / MANIFEST).is_file():
                return _read(directory / PLACE)
    return None


def _read(file: Path) -> bytes | None:
    try:
        text = read_file(file, MAX_BYTES)
        if not isinstance(json.loads(text), dict):
            raise ValueError("it is no JSON object")
    except FileNotFoundError:
        return None
    except (FileRefused, OSError, ValueError, RecursionError) as error:
        log.warning("the conformance kit's probe %s is not served: %s", file, printable(" ".join(str(error).split())))
        return None
    return text
