"""Chooses the recovery class of an environment: snapshot, re-execution or none (PROTOCOL E1, E2).

Some environments have methods of their own called ``snapshot`` and ``restore``. These are ignored if they need other
parameters or if ``snapshot`` is annotated with another result than `snapshot_values.VALUES`; without annotation, as
soon as a call returns what `snapshot_values.packed` refuses.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Awaitable, Coroutine
from typing import Annotated, Any, Union, get_args, get_origin

from openenv.core.env_server.interfaces import Environment

from ..recovery import NONE, REEXECUTE, SNAPSHOT, RecoveryClass
from .signatures import hints_of, needed_parameters
from .snapshot_values import VALUES

_HAVE_OUR_SNAPSHOTS: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
"""Result of `_has_our_snapshots` by class: it is needed for each instance, and reading signatures is slow."""


def recovery_of(factory: Any, *, deterministic: bool = False, snapshots: bool = True) -> RecoveryClass:
    """Return the recovery class of an environment.

    Args:
        factory: The environment class, an instance, or a function, whose return annotation is used.
        deterministic: The environment is declared deterministic other than by ``DETERMINISTIC = True`` in its class.
        snapshots: Whether a snapshot can be taken after each step.
    """
    while isinstance(factory, functools.partial):
        factory = factory.func
    if inspect.isfunction(factory):
        returned = hints_of(factory).get("return")
        factory = returned if inspect.isclass(returned) and issubclass(returned, Environment) else factory
    if snapshots and _has_our_snapshots(factory):
        return SNAPSHOT
    declared = deterministic or getattr(factory, "DETERMINISTIC", False) is True
    return REEXECUTE if declared else NONE


def is_foreign_snapshot(env: object) -> bool:
    """Handle a ``snapshot()`` that returned what cannot be journaled.

    Returns:
        True if the method is not annotated to return something that can: it is the environment's own, and from now on
        the class counts as one without snapshots. False otherwise: the result is a defect of the environment.
    """
    if _annotated(env.snapshot):  # type: ignore[attr-defined]
        return False
    _HAVE_OUR_SNAPSHOTS[type(env)] = False
    return True


def _has_our_snapshots(of: object) -> bool:
    cls = of if isinstance(of, type) else type(of)
    if cls in _HAVE_OUR_SNAPSHOTS:
        return _HAVE_OUR_SNAPSHOTS[cls]
    snapshot, restore = getattr(of, "snapshot", None), getattr(of, "restore", None)
    if not callable(snapshot) or not callable(restore):
        return False
    instance = 1 if isinstance(of, type) else 0  # ``self`` is a parameter where the method is taken from the class
    fits = len(needed_parameters(snapshot)) <= instance and len(needed_parameters(restore)) <= instance + 1
    ours = fits and _annotated(snapshot) is not False
    if all(hasattr(cls, name) for name in ("snapshot", "restore")):  # an instance may have methods that its class lacks
        _HAVE_OUR_SNAPSHOTS[cls] = ours
    return ours


def _annotated(snapshot: Any) -> bool | None:
    """Return whether the result is annotated as something that can be journaled; None without a usable annotation."""
    hints = hints_of(snapshot)
    if hints.get("return", Any) in (Any, object):
        return None
    return any(isinstance(part, type) and issubclass(part, VALUES) for part in _parts(hints["return"]))


def _parts(hint: Any) -> list[Any]:
    """Return the classes of a result: of a union, an annotated or an awaitable one those of its arguments."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType, Annotated, Awaitable, Coroutine):
        return [inner for argument in get_args(hint) for inner in _parts(argument)]
    return [origin or hint]
