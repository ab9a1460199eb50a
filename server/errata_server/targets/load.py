"""Resolves a target to a `Servable`: spec, factory, and the existing application if there is one.

A target is the name of an installed environment (``terminal``, ``echo_env``), a directory with an ``openenv.yaml``, or
``module:attribute`` of an environment class, an `EnvironmentSpec`, an application, upstream's server object, or a
function or ``functools.partial`` that makes an environment or an application.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from openenv.core.env_server.exceptions import ConcurrencyConfigurationError
from openenv.core.env_server.http_server import HTTPEnvServer as _UpstreamServer
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, ConcurrencyConfig, Observation, State
from starlette.applications import Starlette

from errata_protocol.environment import EnvironmentSpec
from errata_protocol.errors import InvalidRequest

from ..app.adoption import adopt, is_ours, server_of
from ..app.factory import create_app
from ..app.server import HTTPEnvServer
from ..environments import discovery
from ..environments.signatures import hints_of, needed_parameters, supports_concurrency, types_of
from ..runtime.runtime import Runtime
from . import imports

MAX_SESSIONS = 10_000
"""Limit of environment instances where neither the operator nor the application sets one."""

ADVISED_SESSIONS = 64
"""Limit that is advised where an application's own is lower: `openenv init` writes 1, with which nothing can fork."""

_POSSIBLE = (
    "expected an Environment class, an EnvironmentSpec, an OpenEnv application, or a function or functools.partial "
    "without arguments that makes an environment or an application"
)


@dataclass(frozen=True, slots=True)
class LimitAdvice:
    """What an operator should know about a low limit of sessions.

    Args:
        text: The limit, where it comes from, and what to do about it.
        options: Options of ``errata serve`` without which a fork cannot act while its parent is open.
        beside_parent: Whether it can then.
    """

    text: str
    options: tuple[str, ...] = ()
    beside_parent: bool = False


@dataclass(frozen=True, slots=True)
class Servable:
    """One environment that was found and can be served.

    Args:
        target: The target as the operator wrote it.
        spec: Name, action and observation classes, and the rest of what the environment publishes.
        factory: Creates one instance.
        state_cls: State class.
        reset_observation_cls: Class that reset returns, if it is not the observation class.
        concurrency: Limits that its application sets; None if it sets none.
        concurrent: Whether the environment declares that several instances may exist at a time.
        app: The existing application that serves it; None if one is to be created.
    """

    target: str
    spec: EnvironmentSpec
    factory: Callable[[], Environment[Any, Any, Any]]
    state_cls: type[State] = State
    reset_observation_cls: type[Observation] | None = None
    concurrency: ConcurrencyConfig | None = None
    concurrent: bool = False
    app: FastAPI | None = None

    @property
    def runtime(self) -> Runtime | None:
        """The runtime of its application, if Errata's ``create_app`` created that; else None."""
        return self.app.state.errata.runtime if self.app is not None and is_ours(self.app) else None

    @property
    def name(self) -> str:
        """Mount path and Task API name."""
        return self.spec.name

    def application(
        self,
        runtime: Runtime,
        *,
        mode: str | None = None,
        max_sessions: int | None = None,
        insecure: bool = False,
        deterministic: bool = False,
        volatile: Sequence[str] | str = (),
        detect: str | None = None,
    ) -> FastAPI:
        """Adopt the existing application, or create one.

        Args:
            runtime: Journal and sandboxes.
            mode: ``simulation`` or ``production``; ``OPENENV_MODE`` by default.
            max_sessions: Upper bound of instances. The default is the application's own, else `MAX_SESSIONS`, or 1 if
                the environment does not support concurrent instances.
            insecure: Allow requests from other machines without a token.
            deterministic: As in `create_fastapi_app`.
            volatile: As in `create_fastapi_app`.
            detect: As in `create_fastapi_app`.

        Raises:
            InvalidRequest: The existing application cannot be adopted, ``detect`` or ``volatile`` is not valid, or the
                environment supports fewer instances than ``max_sessions``.
        """
        try:
            if self.app is not None:
                app = adopt(
                    self.app,
                    runtime=runtime,
                    spec=self.spec,
                    mode=mode,
                    max_concurrent_envs=max_sessions,
                    insecure=insecure,
                    deterministic=deterministic,
                    volatile=volatile,
                    detect=detect,
                )
            else:
                app = create_app(
                    self.factory,
                    self.spec.action_cls,
                    self.spec.observation_cls,
                    concurrency_config=self._limits(max_sessions),
                    env_name=self.name,
                    state_cls=self.state_cls,
                    mode=mode,
                    reset_observation_cls=self.reset_observation_cls,
                    runtime=runtime,
                    spec=self.spec,
                    insecure=insecure,
                    deterministic=deterministic,
                    volatile=volatile,
                    detect=detect,
                )
        except ConcurrencyConfigurationError as error:
            raise InvalidRequest(
                f"--max-sessions {max_sessions} is more than {self.name} allows: its class does not set "
                "SUPPORTS_CONCURRENT_SESSIONS = True, so it has one instance at a time; leave out the option, or set "
                "it in the class if its instances do not interfere with each other"
            ) from error
        app.state.spec = self.spec
        return app

    def limit_advice(self) -> LimitAdvice | None:
        """Return what to know before a fork or several sessions at a time; None where the limit is out of the way."""
        limits = self._limits(None)
        if limits.max_concurrent_envs >= ADVISED_SESSIONS:
            return None
        if not self.concurrent:
            return LimitAdvice(
                "one session at a time, forks included, because its class does not set SUPPORTS_CONCURRENT_SESSIONS = "
                "True: a fork has to wait until its parent is closed"
            )
        options = ("--max-sessions", str(ADVISED_SESSIONS))
        sessions = f"{limits.max_concurrent_envs} session{'s' if limits.max_concurrent_envs > 1 else ''}"
        return LimitAdvice(
            f"its application allows {sessions} at a time, forks included (max_concurrent_envs): for more, serve it "
            f"with {' '.join(options)}",
            options if limits.max_concurrent_envs == 1 else (),
            beside_parent=True,
        )

    def _limits(self, max_sessions: int | None) -> ConcurrencyConfig:
        stated = self.concurrency
        if stated is not None and max_sessions is None:
            return stated
        return ConcurrencyConfig(
            max_concurrent_envs=max_sessions or (MAX_SESSIONS if self.concurrent else 1),
            session_timeout=stated.session_timeout if stated is not None else None,
        )


@dataclass(frozen=True, slots=True)
class Stated:
    """Classes that the operator names for an environment that does not declare them, as ``module:attribute``."""

    action: str | None = None
    observation: str | None = None

    def __bool__(self) -> bool:
        return self.action is not None or self.observation is not None


def load(target: str, *, mode: str | None = None, stated: Stated | None = None) -> Servable:
    """Import the object that a target names, and describe the environment that it serves.

    Args:
        target: A name, directory or ``module:attribute``; see the module's docstring.
        mode: Set as ``OPENENV_MODE`` in this process before the import, as importing a module may create an
            application.
        stated: Action and observation classes that the operator names for an environment without type arguments or
            hints; None if there are none.

    Raises:
        InvalidRequest: The target names nothing that can be served; the message says what was found and expected.
    """
    stated = stated or Stated()
    if mode is not None:
        os.environ["OPENENV_MODE"] = mode
    found, spec = _find(target)
    if spec is not None:
        if stated:
            raise InvalidRequest(
                f"{target} publishes its action and observation classes: leave out --action and --observation"
            )
        factory = imports.attribute(spec.factory)
        state_cls = imports.attribute(spec.state_cls) if spec.state_cls else State
        return Servable(target, spec, factory, state_cls, concurrent=supports_concurrency(factory))
    made = _made(found, target)
    if isinstance(made, Starlette):
        if stated:
            raise InvalidRequest(f"{target} is an application with its own action and observation classes")
        return _of_server(target, server_of(made), made)
    if isinstance(made, _UpstreamServer):
        return _of_server(target, made, None)
    return _of_environment(target, found, made, stated)


def load_all(targets: Sequence[str], *, mode: str | None = None, stated: Stated | None = None) -> list[Servable]:
    """Load the targets of one server, each with `load`.

    Args:
        targets: As for `load`.
        mode: As for `load`.
        stated: Action and observation classes that the operator names (``--action``, ``--observation``) for an
            environment that does not declare them; allowed with one target only.

    Returns:
        What was loaded, in the order of ``targets``. All names differ.

    Raises:
        InvalidRequest: A target cannot be loaded, two have the same name, or ``stated`` is given for several targets.
    """
    if stated and len(targets) > 1:
        raise InvalidRequest("--action and --observation apply to one environment: serve it alone, or publish a spec")
    loaded = [load(target, mode=mode, stated=stated) for target in targets]
    for name, count in Counter(servable.name for servable in loaded).items():
        if count > 1:
            both = " and ".join(servable.target for servable in loaded if servable.name == name)
            raise InvalidRequest(f"{both} are both called {name!r}: one server serves each name once")
    return loaded


def _find(target: str) -> tuple[Any, EnvironmentSpec | None]:
    """Import the object that a target names; return it, and again as the second item if it is an `EnvironmentSpec`."""
    points = discovery.published()
    if target in points:
        found = imports.attribute(f"{points[target].module}:{points[target].attr}")
    elif ":" in target:
        imports.add_working_directory()
        found = imports.attribute(target)
    elif os.sep in target or target in (".", "..") or (Path(target) / discovery.MANIFEST).is_file():
        package = discovery.package_at(Path(target)) if Path(target).is_dir() else None
        if package is None:
            raise InvalidRequest(
                f"{target} is not a directory of an environment: it has no {discovery.MANIFEST} and no server/app.py"
            )
        found = imports.attribute_of_package(package)
    else:
        package = discovery.named(target)
        if package is None:
            raise InvalidRequest(_unknown_message(target))
        found = imports.attribute_of_package(package)
    return found, found if isinstance(found, EnvironmentSpec) else None


def _unknown_message(target: str) -> str:
    known = ", ".join(sorted({*discovery.published(), *discovery.packages()})) or "none"
    problem = f"no environment named {target!r} is installed (installed: {known})"
    if Path(target).is_dir():
        return f"{problem}; for the directory of that name give .{os.sep}{target}"
    if "." in target:
        return f"{problem}; for a module give the attribute, too: {target}:app or {target}:MyEnvironment"
    return f"{problem}; give a name, a directory with an {discovery.MANIFEST}, or module:attribute"


def _made(found: Any, target: str) -> Any:
    """Return an application, a server object or an environment class, calling ``found`` if it creates one of them.

    A function whose return annotation is an environment class is not called. An environment instance that a call
    returns is closed, and its class is returned.

    Raises:
        InvalidRequest: ``found`` is of another kind, needs arguments, or failed.
    """
    if isinstance(found, Starlette | _UpstreamServer):
        return found
    if inspect.isclass(found):
        if issubclass(found, Environment):
            return found
        raise InvalidRequest(f"{target} is the class {found.__name__}, not a subclass of Environment: {_POSSIBLE}")
    if isinstance(found, Environment):
        raise InvalidRequest(
            f"{target} is an instance of {type(found).__name__}, but each session needs its own: give the class"
        )
    if not callable(found):
        raise InvalidRequest(f"{target} is a {type(found).__name__}: {_POSSIBLE}")
    if inspect.iscoroutinefunction(found):
        raise InvalidRequest(
            f"{target} is a coroutine function: give a plain function that makes an environment or an application"
        )
    declared = _declared_class(found)
    if declared is not None and issubclass(declared, Environment) and not inspect.isabstract(declared):
        return declared
    needed = needed_parameters(found)
    if needed:
        raise InvalidRequest(
            f"{target} needs arguments ({', '.join(needed)}): give functools.partial of it, or a function without any"
        )
    try:
        made = found()
        if isinstance(made, Environment):
            made.close()
            return type(made)
    except Exception as error:
        raise InvalidRequest(f"{target}() failed: {imports.described(error)}") from error
    if isinstance(made, Starlette | _UpstreamServer):
        return made
    raise InvalidRequest(f"{target}() returned a {type(made).__name__}: {_POSSIBLE}")


def _declared_class(factory: Any) -> type | None:
    """Return the class that a factory creates, from its return annotation; None if it has none."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    if inspect.isclass(factory):
        return factory
    declared = hints_of(factory).get("return")
    return declared if inspect.isclass(declared) else None


def _of_server(target: str, server: _UpstreamServer, app: Any) -> Servable:
    spec = server._spec if isinstance(server, HTTPEnvServer) else None
    return Servable(
        target,
        spec
        or EnvironmentSpec(
            name=server.env_name, factory=target, action_cls=server.action_cls, observation_cls=server.observation_cls
        ),
        server._env_factory,
        server.state_cls,
        server.reset_observation_cls,
        server.concurrency_config,
        server.max_concurrent_envs > 1 or supports_concurrency(server._env_factory),
        app,
    )


def _of_environment(target: str, factory: Any, cls: type[Environment[Any, Any, Any]], stated: Stated) -> Servable:
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise InvalidRequest(f"{target} is abstract: {cls.__name__} does not define {missing}")
    needed = needed_parameters(factory)
    if needed:
        raise InvalidRequest(
            f"{target} needs arguments ({', '.join(needed)}): give functools.partial of it, or a function without any"
        )
    action, observation, state = types_of(cls)
    action = _subclass(stated.action, Action) or action
    observation = _subclass(stated.observation, Observation) or observation
    if action is None or observation is None:
        lacking = " and ".join(
            name for name, found in (("action", action), ("observation", observation)) if found is None
        )
        raise InvalidRequest(
            f"{target} does not say which {lacking} class it uses: give --action module:Class and --observation "
            "module:Class, or subclass Environment[MyAction, MyObservation, MyState]"
        )
    spec = EnvironmentSpec(name=cls.__name__, factory=target, action_cls=action, observation_cls=observation)
    return Servable(target, spec, factory, state, concurrent=cls.SUPPORTS_CONCURRENT_SESSIONS)


def _subclass(target: str | None, of: type) -> Any:
    if target is None:
        return None
    found = imports.attribute(target)
    if not (inspect.isclass(found) and issubclass(found, of)):
        raise InvalidRequest(f"{target} is no subclass of openenv's {of.__name__}")
    return found
