"""Drops arguments that an environment's method does not accept."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any


def accepted(method: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arguments ``given`` that a bound method accepts; upstream drops the others, too."""
    if not given:
        return {}
    parameters = parameters_of(method)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {k: v for k, v in given.items() if takes_any or k in parameters}


def parameters_of(method: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a bound method, cached by function: inspection takes longer than most resets."""
    function = getattr(method, "__func__", None)
    if function is None:
        return inspect.signature(method).parameters
    known = _PARAMETERS.get(function)
    if known is None:
        known = _PARAMETERS[function] = inspect.signature(method).parameters
    return known


_PARAMETERS: weakref.WeakKeyDictionary[Callable[..., Any], Mapping[str, inspect.Parameter]] = (
    weakref.WeakKeyDictionary()
)
