"""Decides how an environment's sessions come back after a crash: snapshot, re-execution or not (PROTOCOL E1, E2).

Environments of others have had methods called ``snapshot`` and ``restore`` for themselves, and go on as without: where
they take other parameters, where ``snapshot`` is annotated with another result, or, where nothing is annotated, from
the first call that returned one.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any, get_args

from openenv.core.env_server.interfaces import Environment

from errata_protocol.environment import Snapshot

from ..recovery import NONE, REEXECUTE, SNAPSHOT, RecoveryClass
from .signatures import hints_of, needed_parameters

_ARE_OURS: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
"""By environment class, because it is asked for each instance and looking into signatures is dear."""


def recovery_of(factory: Any, *, deterministic: bool = False, snapshots: bool = True) -> RecoveryClass:
    """Return the recovery class of an environment class or instance.

    Args:
        factory: The class, the instance, or a function, which tells no more than the class that it says it returns.
        deterministic: It is declared so elsewhere than by ``DETERMINISTIC = True`` in its class.
        snapshots: Its snapshots may be taken after each step.
    """
    while isinstance(factory, functools.partial):
        factory = factory.func
    if inspect.isfunction(factory):
        promised = hints_of(factory).get("return")
        factory = promised if inspect.isclass(promised) and issubclass(promised, Environment) else factory
    if snapshots and _has_our_snapshots(factory):
        return SNAPSHOT
    declared = deterministic or getattr(factory, "DETERMINISTIC", False) is True
    return REEXECUTE if declared else NONE


def found_others(env: object) -> bool:
    """Learn that ``snapshot()`` returned something else than a `Snapshot`; return whether it may, being another's.

    One that is annotated as ours may not: that is a defect of the environment.
    """
    if _annotated(env.snapshot):  # type: ignore[attr-defined]
        return False
    _ARE_OURS[type(env)] = False
    return True


def _has_our_snapshots(of: object) -> bool:
    cls = of if isinstance(of, type) else type(of)
    if cls in _ARE_OURS:
        return _ARE_OURS[cls]
    snapshot, restore = getattr(of, "snapshot", None), getattr(of, "restore", None)
    if not callable(snapshot) or not callable(restore):
        return False
    instance = 1 if isinstance(of, type) else 0  # a parameter too, where a method is looked up on the class
    fits = len(needed_parameters(snapshot)) <= instance and len(needed_parameters(restore)) <= instance + 1
    ours = fits and _annotated(snapshot) is not False
    if all(hasattr(cls, name) for name in ("snapshot", "restore")):  # an instance may have what its class has not
        _ARE_OURS[cls] = ours
    return ours


def _annotated(snapshot: Any) -> bool | None:
    """Return whether the result is annotated as a `Snapshot`; None where nothing is, or nothing that can be read."""
    hints = hints_of(snapshot)
    if hints.get("return", Any) in (Any, object):
        return None
    return any(isinstance(part, type) and issubclass(part, Snapshot) for part in _parts(hints["return"]))


def _parts(hint: Any) -> list[Any]:
    return [hint, *(inner for argument in get_args(hint) for inner in _parts(argument))]
