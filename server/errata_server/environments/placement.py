"""Chooses where an environment's calls run: event loop, its own thread, one thread for its class, or any thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from openenv.core.env_server._utils import overrides_method
from openenv.core.env_server.interfaces import Environment

from ..concurrency.places import Place
from ..concurrency.threads import Threads

EnvironmentFactory = Callable[[], Environment[Any, Any, Any]]


def overrides(env: object, method: str) -> bool:
    """Return whether an environment overrides ``method`` of the base class; cached by class."""
    cls = type(env)
    if method in getattr(env, "__dict__", ()):
        return bool(overrides_method(getattr(env, method), getattr(Environment, method)))
    known = _OVERRIDES.get(cls)
    if known is None:
        known = _OVERRIDES[cls] = {}
    if method not in known:
        known[method] = bool(overrides_method(getattr(env, method), getattr(Environment, method)))
    return known[method]


_OVERRIDES: weakref.WeakKeyDictionary[type, dict[str, bool]] = weakref.WeakKeyDictionary()


def place_for(factory: EnvironmentFactory, threads: Threads, owner: object) -> Place:
    """Return the place for the calls of an instance, chosen before ``factory`` creates it.

    Args:
        factory: An environment class, a partial of one, or a function. A function is taken to need a thread of its own,
            unless it has ``ANY_THREAD`` or ``REQUIRES_SINGLE_THREAD_EXECUTOR`` set.
        threads: Threads of the server.
        owner: Key of the shared thread, for a class with ``REQUIRES_SINGLE_THREAD_EXECUTOR``.

    Raises:
        CapacityReached: All threads that could be shared hang.
    """
    cls = getattr(factory, "func", factory)  # a functools.partial of the class
    if getattr(cls, "REQUIRES_SINGLE_THREAD_EXECUTOR", False):
        return threads.single(owner)
    on_loop = isinstance(cls, type) and issubclass(cls, Environment) and _async_class(cls)
    return threads.free() if on_loop or getattr(cls, "ANY_THREAD", False) else threads.pinned()


def _async_class(cls: type[Environment[Any, Any, Any]]) -> bool:
    return all(getattr(cls, name) is not getattr(Environment, name) for name in ("reset_async", "step_async"))
