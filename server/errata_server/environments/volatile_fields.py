"""Parses the operator's ``--volatile``: names and paths of fields that may differ when requests are run again.

A bare name, ``took_s``, excludes a field of the observation and of its metadata from comparisons. A path excludes the
field at that path. It is relative to the observation (``result.took_s``, ``items[*].at``, ``metadata.host.pid``) or
absolute, as messages print it (``$.observation.result.took_s``). ``~test_durations`` excludes no field: it names a
normaliser of texts (`errata_protocol.normalisers`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from openenv.core.env_server.types import Observation
from pydantic import BaseModel

from errata_protocol import json_path, normalisers
from errata_protocol.errors import InvalidRequest
from errata_protocol.json_path import Path

_TOP = ("observation", "metadata", "reward", "result", "error")
"""Keys of a payload that can be volatile: the first three of an observation, the last two of an MCP response."""


def field_names(given: Sequence[str] | str) -> tuple[str, ...]:
    """Return a checked tuple of the names, paths and normalisers that ``--volatile`` takes.

    Args:
        given: A list, or one text with commas between the names. Surrounding spaces and empty names are dropped.

    Raises:
        InvalidRequest: ``given`` is neither text nor a list of texts, or a name is not a valid path or normaliser.
    """
    names = tuple(_split(given)) if isinstance(given, str) else given
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise InvalidRequest(
            f"volatile takes names of fields, ['timestamp', 'elapsed'] or 'timestamp,elapsed', not {given!r}"
        )
    found = tuple(name.strip() for name in names if name.strip())
    for name in found:
        try:
            normalisers.check(name) if name.startswith(normalisers.PREFIX) else json_path.parse(name)
        except ValueError as error:
            raise InvalidRequest(f"volatile: {error}") from error
    return found


def resolved(
    names: Sequence[str], classes: Sequence[type[BaseModel]], *, mcp: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Check volatile fields against the observation classes, and make their paths absolute.

    Args:
        names: As returned by `field_names`.
        classes: Observation classes of reset and step.
        mcp: Whether the environment supports tools/call, whose results have no class.

    Returns:
        Bare names and paths that begin with ``$``; and those bare names that no class has, which are assumed to be
        metadata keys.

    Raises:
        InvalidRequest: No class has such a field (the message lists its fields), or nothing would be compared.
    """
    found: list[str] = []
    unknown: list[str] = []
    for name in names:
        if name.startswith(normalisers.PREFIX):
            found.append(name)
            continue
        path = json_path.parse(name)
        if not name.startswith("$") and len(path) == 1:
            if name in ("done", "observation"):
                _refuse_all(name)
            if name == "reward":
                found.append("$.reward")
                continue
            if (
                not mcp
                and name != "metadata"
                and not any(cls is Observation or name in cls.model_fields for cls in classes)
            ):
                unknown.append(name)
            found.append(name)
            continue
        found.append(json_path.written(_checked(name, _absolute(name, path, classes), classes, mcp)))
    return tuple(found), tuple(unknown)


def written_by_class(names: Collection[str]) -> tuple[str, ...]:
    """Return a class's own ``VOLATILE_FIELDS`` with paths made absolute."""
    for name in names:
        if name.startswith(normalisers.PREFIX):
            normalisers.check(name)
    return tuple(
        name
        if name.startswith(("$", normalisers.PREFIX)) or len(path := json_path.parse(name)) == 1
        else json_path.written(_placed(path))
        for name in names
    )


def _split(text: str) -> Iterator[str]:
    """Split at commas, except those inside a quoted key."""
    quoted, begin = False, 0
    for at, char in enumerate(text):
        if char == '"' and text[at - 1] != "\\":
            quoted = not quoted
        elif char == "," and not quoted:
            yield text[begin:at]
            begin = at + 1
    yield text[begin:]


def _absolute(name: str, path: Path, classes: Sequence[type[BaseModel]]) -> Path:
    if name.startswith("$"):
        if path[:1] and path[0] not in (*_TOP, "done"):
            raise InvalidRequest(
                f"volatile: no payload has {name}: paths begin with $.observation, $.metadata, $.reward, or, of an MCP "
                "result, with $.result"
            )
        return path
    if path[0] == "observation" and not any("observation" in cls.model_fields for cls in classes):
        return path
    return _placed(path)


def _placed(path: Path) -> Path:
    return path if path[0] == "metadata" else ("observation", *path)


def _checked(name: str, path: Path, classes: Sequence[type[BaseModel]], mcp: bool) -> Path:
    if len(path) < 2 and path[:1] != ("metadata",) and path[:1] != ("reward",):
        _refuse_all(name)
    if path[0] == "observation":
        problems = [problem for cls in classes if (problem := _problem(path[1:], cls)) is not None]
        if len(problems) == len(classes):
            raise InvalidRequest(f"volatile: {name} is nowhere: {problems[0]}")
    elif path[0] in ("result", "error") and not mcp:
        raise InvalidRequest(
            f"volatile: {name} would be of an MCP result, and this environment has no tools: paths of its observations "
            "begin with $.observation"
        )
    return path


def _refuse_all(name: str) -> None:
    if name in ("done", "$.done"):
        raise InvalidRequest(
            f"volatile: {name} cannot be left out: a run in which the episode is over, or not, is another episode"
        )
    raise InvalidRequest(
        f"volatile: with {name} left out, nothing of it would be compared when requests run again: name the fields "
        "inside that differ"
    )


def _problem(path: Path, cls: type[BaseModel]) -> str | None:
    """Return why no instance of ``cls`` can have ``path``; None if it can, or if that is unknown."""
    if not path or not isinstance(path[0], str):
        return f"{cls.__name__} is no list"
    field = cls.model_fields.get(path[0])
    if field is None:
        if cls is Observation:
            return None  # the base class means that the class is unknown
        if cls.model_config.get("extra") == "allow":
            return None
        held = ", ".join(sorted(set(cls.model_fields) - {"done", "reward"})) or "none"
        return f"{cls.__name__} has no field {path[0]!r}; its fields are: {held}"
    if path[0] in ("done", "reward") and "metadata" in cls.model_fields:
        return f"{path[0]!r} stands beside the observation, at $.{path[0]}"
    return _inside(field.annotation, path[1:], f"{cls.__name__}.{path[0]}")


def _inside(annotation: Any, path: Path, name: str) -> str | None:
    if not path:
        return None
    problems = []
    for choice in _choices(annotation):
        origin, arguments = get_origin(choice) or choice, get_args(choice)
        if not isinstance(origin, type) or origin in (Any, object):
            return None  # Any or a type variable: unknown
        if issubclass(origin, BaseModel):
            problem = _problem(path, origin)
        elif issubclass(origin, Mapping):
            problem = _inside(arguments[1] if len(arguments) == 2 else Any, path[1:], f"{name}[…]")
        elif issubclass(origin, list | tuple | set | frozenset | Sequence) and not issubclass(origin, str | bytes):
            if isinstance(path[0], str):
                problem = f"{name} is a list: its items are {name.partition('.')[2]}[*]"
            else:
                item = arguments[0] if arguments else Any
                inner = [a for a in arguments if a is not Ellipsis] if issubclass(origin, tuple) else [item]
                problems = [_inside(one, path[1:], f"{name}[*]") for one in inner or [Any]]
                problem = None if None in problems else problems[0]
        elif hasattr(origin, "__dataclass_fields__"):
            return None
        else:
            problem = f"{name} is a {origin.__name__}, which has no fields"
        if problem is None:
            return None
        if origin is not type(None):
            problems.append(problem)
    return problems[0] if problems else f"{name} is always null"


def _choices(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _choices(get_args(annotation)[0])
    elif origin is Union or getattr(origin, "__name__", "") == "UnionType":
        for one in get_args(annotation):
            yield from _choices(one)
    else:
        yield annotation
