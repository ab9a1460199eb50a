"""The environment classes for TRL's ``environment_factory``: public methods are tools, beside ``reset`` and
``get_reward``."""

from __future__ import annotations

import inspect
import keyword
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Optional

from errata_client import ErrataClient
from errata_protocol.errors import InvalidRequest

from ...playing import EpisodeRunner
from ...tools import PlayedEnvironment, Tool, published

_HINTS: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}
_TAKEN = ("reset", "get_reward")

TRLS_COLUMNS = frozenset({"prompt", "completion", "completion_ids", "images", "image", "environment"})
"""Columns of a row that are TRL's own, not the task's."""


class EpisodeEnvironment:
    """Base of the classes that `environment_factory` makes; TRL makes an instance for each rollout of a batch.

    What is public of an instance is a tool of the student's, so everything else has an underscore.
    """

    _environment: PlayedEnvironment
    _connect: Callable[[], Any]
    _columns: frozenset[str] | None
    _probed = False

    def __init__(self) -> None:
        cls = type(self)
        self._runner = EpisodeRunner(cls._environment, cls._connect)
        self._begun: tuple[dict[str, Any], str] | None = None
        if not cls._probed:  # fail now, not after a model was loaded and a batch generated
            session = cls._connect()
            try:
                _check(session, cls._environment)
            finally:
                session.close()
            cls._probed = True

    def reset(self, **row: Any) -> str:
        """Start an episode of the row's task and return the text that the student reads."""
        task = self._task(row)
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] == task:
            return begun[1]
        return self._start(task)

    def get_reward(self) -> float | None:
        """Finish the episode and return its reward; None if it was lost."""
        return self._runner.finish()

    def _begin(self, row: Mapping[str, Any]) -> None:
        """Start the episode of the row's task now, so that several environments can start theirs at once.

        TRL calls `reset` on one environment after the other. If it calls it for the same task, `reset` returns the
        text from here; otherwise it starts another episode.
        """
        task = self._task(row)
        self._begun = (task, self._start(task))

    def _start(self, task: dict[str, Any]) -> str:
        try:
            return self._runner.reset(task)
        except InvalidRequest as error:
            raise InvalidRequest(
                f"{self._environment.name} does not take the task {task!r}: {error.message}; name the columns that "
                "it takes in environment_factory(task_columns=[...])"
            ) from error

    def _finish(self) -> None:
        """Finish the episode before TRL asks for its reward, which it does for one environment after the other."""
        self._runner.finish()

    def _task(self, row: Mapping[str, Any]) -> dict[str, Any]:
        columns = self._columns
        return {
            name: value
            for name, value in row.items()
            if value is not None and (name in columns if columns is not None else name not in TRLS_COLUMNS)
        }


def environment_factory(
    url: str,
    env: str | PlayedEnvironment = "terminal",
    *,
    tools: Sequence[str] | None = None,
    task_columns: Sequence[str] | None = None,
    headers: Mapping[str, str] | None = None,
    message_timeout_s: float = 1000.0,
    retries: int = 2,
) -> type[EpisodeEnvironment]:
    """Return the class that TRL's ``environment_factory`` takes, for an environment on a server.

    All its instances of a process share one multiplexed connection, where the server offers one. A lost connection or a
    restarted server costs nothing but time: sessions resume, and no step acts twice. An episode that is lost all the
    same has reward None, which TRL leaves out of its group; `ThreeChannelGRPOTrainer` masks its tokens too.

    Args:
        url: Of the environment: ``http://host:8000``, or ``http://host:8000/NAME`` where the server has several.
        env: Its name, where its package is installed here, or what to know of it.
        tools: Names of those the student may call; None is all.
        task_columns: Columns of a dataset's row that ``reset`` is given; None is all that are not None or TRL's own.
        headers: Sent at each connect, e.g. ``{"Authorization": "Bearer TOKEN"}``.
        message_timeout_s: Longest wait for an answer, reconnects included.
        retries: How often a request is sent again after a failure that the server rolled back.

    Raises:
        InvalidRequest: Nobody publishes such an environment, or it has no such tool.
    """
    environment = published(env) if isinstance(env, str) else env
    chosen = list(environment.tools) if tools is None else list(tools)
    for name in chosen:
        if name not in environment.tools:
            raise InvalidRequest(f"{environment.name} has no tool {name!r}: it has {', '.join(environment.tools)}")

    def connect() -> Any:
        client: ErrataClient[Any, Any, Any] = ErrataClient(
            url,
            message_timeout_s=message_timeout_s,
            headers=dict(headers) if headers else None,
            retries=retries,
        )
        session = client.sync()
        session.connect()
        return session

    methods = {name: _method(environment.tools[name]) for name in chosen}
    return type(
        f"{''.join(part.title() for part in environment.name.split('_'))}Environment",
        (EpisodeEnvironment,),
        {
            "__doc__": f"{environment.name} on {url}.",
            "_environment": environment,
            "_connect": staticmethod(connect),
            "_columns": frozenset(task_columns) if task_columns is not None else None,
            **methods,
        },
    )


def _check(session: Any, environment: PlayedEnvironment) -> None:
    capabilities = session.capabilities()
    name = capabilities.environment if capabilities is not None else None
    if name is not None and name != environment.name:
        raise InvalidRequest(
            f"the server has the environment {name!r} there, not {environment.name!r}: give its own URL, e.g. "
            f"http://host:port/{environment.name}, or env={name!r}"
        )


def _method(tool: Tool) -> Callable[..., str]:
    """Return a method that TRL presents to the student with the tool's own description and schema."""
    if not tool.name.isidentifier() or keyword.iskeyword(tool.name) or tool.name.startswith("_") or tool.name in _TAKEN:
        raise InvalidRequest(f"a tool cannot be called {tool.name!r} in TRL: it has to be a public name of a method")

    def call(self: EpisodeEnvironment, /, **arguments: Any) -> str:
        return self._runner.call(tool.name, arguments)

    properties, required = tool.parameters.get("properties", {}), tool.parameters.get("required", [])
    hints = {name: _hint(schema, name in required) for name, schema in properties.items()}
    optional = inspect.Parameter.empty
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)] + [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[name],
            default=optional if name in required else properties[name].get("default"),
        )
        for name in sorted(properties, key=lambda name: name not in required)
    ]
    descriptions = "".join(
        f"\n    {name}: {_one_line(properties[name].get('description'), name)}" for name in properties
    )
    call.__name__ = tool.name
    call.__qualname__ = f"EpisodeEnvironment.{tool.name}"
    call.__doc__ = tool.description + (f"\n\nArgs:{descriptions}" if descriptions else "")
    call.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    call.__annotations__ = {**hints, "return": str}
    return call


def _hint(schema: Mapping[str, Any], required: bool) -> Any:
    if "enum" in schema:
        hint: Any = Literal[tuple(schema["enum"])]
    elif "anyOf" in schema:
        kinds = [_hint(kind, True) for kind in schema["anyOf"] if kind.get("type") != "null"]
        hint = typing.Union[tuple(kinds)] if kinds else Any  # noqa: UP007 # of a tuple
    else:
        kind = schema.get("type")
        hint = _HINTS.get(kind, Any) if isinstance(kind, str) else Any
    return hint if required or hint is Any else Optional[hint]  # noqa: UP045 # what transformers reads


def _one_line(text: str | None, name: str) -> str:
    return " ".join((text or name.replace("_", " ")).split())
