"""Reads an environment's signatures: action and observation classes, type hints, parameters without a default."""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar, get_args, get_origin

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


def types_of(
    cls: type[Environment[Any, Any, Any]],
) -> tuple[type[Action] | None, type[Observation] | None, type[State]]:
    """Return the action, observation and state class of an environment class; None for a class that is not declared.

    The type arguments of ``Environment`` are used first, also through generic bases in between, and then the
    annotations of ``step`` and ``state``. An ``MCPEnvironment`` without them uses OpenEnv's tool actions.
    """
    arguments = (*_arguments(cls), None, None, None)
    hints = _hints(cls)
    action = _class(arguments[0], Action) or hints[0]
    observation = _class(arguments[1], Observation) or hints[1]
    state = _class(arguments[2], State) or hints[2] or State
    if issubclass(cls, MCPEnvironment) and (action is None or action is Action):
        return CallToolAction, CallToolObservation, state
    if action is Action:  # the base class has no fields, so it declares nothing
        action = None
    return action, observation, state


def _arguments(cls: type) -> tuple[Any, ...]:
    """Return the type arguments that a class gives to ``Environment``, with type variables resolved."""
    for base in getattr(cls, "__orig_bases__", cls.__bases__):
        origin = get_origin(base) or base
        if origin is Environment:
            return get_args(base)
        if inspect.isclass(origin) and issubclass(origin, Environment):
            given = dict(zip(getattr(origin, "__parameters__", ()), get_args(base), strict=False))
            return tuple(given.get(a, a) if isinstance(a, TypeVar) else a for a in _arguments(origin))
    return ()


def _hints(cls: type[Environment[Any, Any, Any]]) -> tuple[Any, Any, Any]:
    action = observation = None
    for method in (cls.step, cls.step_async):
        hints = hints_of(method)
        returned = hints.pop("return", None)
        action = action or next((found for hint in hints.values() if (found := _class(hint, Action))), None)
        observation = observation or _class(returned, Observation)
    state = inspect.getattr_static(cls, "state", None)
    hint = hints_of(state.fget).get("return") if isinstance(state, property) else None
    return action, observation, _class(hint, State)


def hints_of(function: Any) -> dict[str, Any]:
    """Return a function's annotations, without those that cannot be evaluated, as with imports for type checkers only.

    `typing.get_type_hints` raises an exception if one of them cannot be evaluated.
    """
    function = inspect.unwrap(function)
    found = {}
    for name, hint in getattr(function, "__annotations__", {}).items():
        try:
            found[name] = eval(hint, getattr(function, "__globals__", {})) if isinstance(hint, str) else hint
        except Exception:
            continue
    return found


def needed_parameters(function: Any) -> list[str]:
    """Return the names of parameters without a default; empty if the function has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variadic]


def _class(found: Any, of: type) -> Any:
    return found if inspect.isclass(found) and issubclass(found, of) else None


def supports_concurrency(environment: Any) -> bool:
    """Return whether an environment, its class or a partial of it sets ``SUPPORTS_CONCURRENT_SESSIONS``."""
    while isinstance(environment, functools.partial):
        environment = environment.func
    return bool(getattr(environment, "SUPPORTS_CONCURRENT_SESSIONS", False))
