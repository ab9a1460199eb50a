"""The environment classes for TRL's ``environment_factory``: public methods are tools, beside ``reset`` and
``get_reward``."""

from __future__ import annotations

import copyreg
import inspect
import keyword
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias
from typing import Any, Literal, Optional

from errata_protocol.errors import InvalidRequest
from errata_protocol.labels import Labels

from ...episodes.playing import EpisodeRunner
from ...episodes.served import Connect, check_served, chosen_tools, served_environment, viewer_of
from ...episodes.tools import PlayedEnvironment, Tool

_HINTS: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
_HEADING = re.compile(r"(Args|Returns|Raises):|\(choices:", re.IGNORECASE)
"""What transformers reads in docstrings, in the middle of a line too, instead of showing it to the student."""
_SAID = {"args:": "arguments:", "returns:": "result:", "raises:": "errors:", "(choices:": "(one of:"}
_TAKEN = ("reset", "get_reward")

TRLS_COLUMNS = frozenset({"prompt", "completion", "completion_ids", "images", "image", "environment"})
"""Columns of a row that are TRL's own, not the task's."""


class _EnvironmentClass(type):
    """Class of environment classes: one that `environment_factory` made is pickled as what it was made of.

    TRL's AsyncGRPO plays in a spawned process, which has to make the class again: no module has it by name.
    """

    _made_of: tuple[Any, ...]


def _reduced(cls: _EnvironmentClass) -> str | tuple[Any, ...]:
    made_of = cls.__dict__.get("_made_of")
    return cls.__qualname__ if made_of is None else (_class_of, made_of)


copyreg.pickle(_EnvironmentClass, _reduced)


class EpisodeEnvironment(metaclass=_EnvironmentClass):
    """Base of the classes that `environment_factory` makes; TRL makes an instance for each rollout of a batch.

    What is public of an instance is a tool of the student's, so everything else has an underscore.
    """

    _environment: PlayedEnvironment
    _connect: Callable[[], Any]
    _columns: frozenset[str] | None
    _url = ""
    _viewer = ""
    _probed = False

    def __init__(self) -> None:
        cls = type(self)
        self._runner = EpisodeRunner(cls._environment, cls._connect)
        self._begun: tuple[dict[str, Any], str] | None = None
        if not cls._probed:  # fail now, not after a model was loaded and a batch generated
            session = cls._connect()
            try:
                check_served(session, cls._environment)
                cls._viewer = viewer_of(session, cls._url) if cls._url else ""
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

    def _label(self, labels: Labels) -> None:
        """Set the labels of the episodes that are begun from now on."""
        self._runner.labels = labels

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

    An environment whose package is installed here says itself what its tools are. Any other is asked for on the server,
    now: its tools are those of MCP's ``tools/list``, or one tool ``step`` whose arguments are the fields of the action
    in ``GET /schema``.

    All its instances of a process share one multiplexed connection, where the server offers one. A lost connection or a
    restarted server costs nothing but time: sessions resume, and no step acts twice. An episode that is lost all the
    same has reward None, which TRL leaves out of its group; `ThreeChannelGRPOTrainer` masks its tokens too.

    The class can be pickled, for processes that a trainer spawns, and so can its instances while no episode runs.

    Args:
        url: URL of the environment: ``http://host:8000``, or ``http://host:8000/NAME`` where the server has several.
        env: Name of the environment on its server, or a description of it.
        tools: Names of the tools that the student may call; None is all.
        task_columns: Columns of a dataset's row that ``reset`` is given; None is all that are not None or TRL's own.
        headers: Headers of each request and connect, e.g. ``{"Authorization": "Bearer TOKEN"}``.
        message_timeout_s: Longest wait for an answer in seconds, reconnects included.
        retries: Most times that a request is sent again after a failure that the server rolled back.

    Raises:
        InvalidRequest: There is no such environment, it has no such tool, or its actions cannot be made by a tool; the
            message names the field.
        ConnectionError: The environment's package is not installed here, and the server cannot be reached.
        ServiceError: The server failed, or is no OpenEnv server.
    """
    environment = served_environment(url, env, headers=headers)
    chosen = chosen_tools(environment, tools)
    connect = Connect(url, tuple((headers or {}).items()), message_timeout_s, retries)
    return _class_of(environment, chosen, connect, None if task_columns is None else frozenset(task_columns))


def _class_of(
    environment: PlayedEnvironment, tools: tuple[str, ...], connect: Connect, columns: frozenset[str] | None
) -> type[EpisodeEnvironment]:
    """Return an environment class; called again in each process that the class is handed to."""
    name = "".join(part.title() for part in re.split(r"[\W_]+", environment.name))
    made: type[EpisodeEnvironment] = _EnvironmentClass(
        f"{name}Environment",
        (EpisodeEnvironment,),
        {
            "__doc__": f"{environment.name} on {connect.url}.",
            "_environment": environment,
            "_connect": connect,
            "_url": connect.url,
            "_columns": columns,
            "_made_of": (environment, tools, connect, columns),
            **{tool: _method(environment.tools[tool]) for tool in tools},
        },
    )  # type: ignore[assignment]
    return made


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
    call.__doc__ = _plain(tool.description) + (f"\n\nArgs:{descriptions}" if descriptions else "")
    call.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    call.__annotations__ = {**hints, "return": str}
    return call


def _hint(schema: Mapping[str, Any], required: bool) -> Any:
    """Return the type that transformers turns into a schema again."""
    if "enum" in schema:
        hint: Any = Literal[tuple(schema["enum"])]
    elif "anyOf" in schema:
        kinds = [_hint(kind, True) for kind in schema["anyOf"]]
        hint = Any if Any in kinds else typing.Union[tuple(kinds)]  # noqa: UP007 # of a tuple
    elif schema.get("type") == "array" and "items" in schema:
        hint = GenericAlias(list, (_hint(schema["items"], True),))
    elif schema.get("type") == "object" and isinstance(values := schema.get("additionalProperties"), Mapping):
        hint = GenericAlias(dict, (str, _hint(values, True)))
    else:
        kind = schema.get("type")
        hint = _HINTS.get(kind, Any) if isinstance(kind, str) else Any
    return hint if required or hint is Any else Optional[hint]  # noqa: UP045 # what transformers reads


def _one_line(text: str | None, name: str) -> str:
    return _plain(" ".join((text or name.replace("_", " ")).split()))


def _plain(text: str) -> str:
    """Return a description without what transformers would take for a part of a docstring."""
    return _HEADING.sub(lambda found: _SAID[found[0].lower()], text)
