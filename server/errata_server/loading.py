"""From what an operator writes, ``terminal`` or ``package.module:attribute``, to something that can be served."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_args, get_origin, get_type_hints

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from errata_protocol.environment import EnvironmentSpec
from errata_protocol.errors import InvalidRequest

GROUP = "errata.environments"


def installed() -> dict[str, EntryPoint]:
    """Return the installed environments by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def load_spec(target: str) -> EnvironmentSpec:
    """Return the spec of an installed environment by name, or of ``module:attribute``.

    Args:
        target: A name under the entry point group ``errata.environments``; or ``module:attribute`` of an
            `EnvironmentSpec` or of an OpenEnv environment class whose type arguments name its action and observation.

    Raises:
        InvalidRequest: There is nothing by that name; the message lists what is there.
    """
    if ":" not in target:
        points = installed()
        if target not in points:
            known = ", ".join(sorted(points)) or "none"
            raise InvalidRequest(
                f"no environment named {target!r} is installed (installed: {known}); give a name or module:attribute"
            )
        found = points[target].load()
    else:
        found = _attribute(target)
    if isinstance(found, EnvironmentSpec):
        return found
    if inspect.isclass(found) and issubclass(found, Environment):
        return _spec_of(found, target)
    raise InvalidRequest(f"{target} is a {type(found).__name__}: expected an EnvironmentSpec or an Environment class")


def load_factory(spec: EnvironmentSpec) -> Any:
    """Return the callable that makes one environment instance."""
    return _attribute(spec.factory)


def load_state_cls(spec: EnvironmentSpec) -> type[State]:
    """Return the environment's state class, OpenEnv's own by default."""
    return _attribute(spec.state_cls) if spec.state_cls else State  # type: ignore[no-any-return]


def _attribute(target: str) -> Any:
    module, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except ImportError as error:
        raise InvalidRequest(f"cannot import {module!r}: {error}") from error
    except AttributeError as error:
        raise InvalidRequest(f"{target}: {error}") from error
    return found


def _spec_of(cls: type[Environment[Any, Any, Any]], target: str) -> EnvironmentSpec:
    action, observation = _type_arguments(cls)
    if action is None or observation is None:
        raise InvalidRequest(
            f"{target} does not say which action and observation classes it uses: subclass "
            "Environment[MyAction, MyObservation, MyState], or publish an EnvironmentSpec"
        )
    return EnvironmentSpec(name=cls.__name__, factory=target, action_cls=action, observation_cls=observation)


def _type_arguments(cls: type) -> tuple[type | None, type | None]:
    for base in getattr(cls, "__orig_bases__", ()):
        origin = get_origin(base)
        if inspect.isclass(origin) and issubclass(origin, Environment):
            found = [a for a in get_args(base) if inspect.isclass(a)]
            if len(found) >= 2 and issubclass(found[0], Action) and issubclass(found[1], Observation):
                return found[0], found[1]
    hints = get_type_hints(cls.step)  # type: ignore[attr-defined]
    action = next((h for h in hints.values() if inspect.isclass(h) and issubclass(h, Action)), None)
    observation = hints.get("return")
    if inspect.isclass(observation) and issubclass(observation, Observation):
        return action, observation
    return action, None
