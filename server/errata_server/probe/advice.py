"""Generates ``snapshot()`` and ``restore()`` for an environment class from the attributes of an instance."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

from ..targets.load import Servable

_OF_OPENENV = ("transform", "rubric")
"""Attributes that `openenv`'s base class sets and that do not change in an episode."""


def snapshot_lines(servable: Servable) -> list[str]:
    """Return the lines of code to add to the environment's class; they pickle the attributes of a fresh instance.

    A comment names the attributes that cannot be pickled, which ``restore`` has to create again. If no instance can be
    created, the code saves ``_state`` only.
    """
    attributes, cls = _instance(servable)
    kept = [name for name, value in attributes.items() if name not in _OF_OPENENV and _pickles(value)]
    others = [name for name in attributes if name not in _OF_OPENENV and name not in kept]
    names = ", ".join(f'"{name}"' for name in kept) + ("," if len(kept) == 1 else "")
    lines = [
        "import pickle",
        "from errata_protocol import Snapshot",
        "",
        f"    # in {cls}",
        "    def snapshot(self) -> Snapshot:  # after each reset and step; at most 64 KiB",
        f"        return Snapshot(pickle.dumps({{name: getattr(self, name) for name in ({names})}}))",
        "    def restore(self, snapshot: Snapshot) -> None:  # on a fresh instance, instead of reset",
        "        vars(self).update(pickle.loads(snapshot.state))",
    ]
    if others:
        lines.append(f"        # and create again what cannot be pickled: {', '.join(others)}")
    return lines


def _instance(servable: Servable) -> tuple[dict[str, Any], str]:
    try:
        made = servable.factory()
    except Exception:
        return {"_state": None}, f"the class of {servable.name}"
    cls = type(made)
    found = dict(vars(made))
    try:
        made.close()
        where = f" ({inspect.getsourcefile(cls)})"
    except Exception:
        where = ""
    return found, f"class {cls.__name__}{where}"


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
