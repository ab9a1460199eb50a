"""Adds error markers to observations and to failed tools/calls of environments that set none (PROTOCOL B2, B3).

The operator names the fields that hold a command's output, ``stdout=FIELD,stderr=FIELD,exit_code=FIELD``, and the
action's field that holds the command. The detectors then read each step, and add markers to ``observation.metadata``,
because undeclared fields would break typed clients. A tools/call has its markers in ``result._meta``. Commands run on
the server's machine, often in its process, so error sites and markers never name files or paths of the server.
"""

from __future__ import annotations

import builtins
import functools
import json
import logging
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin

from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation
from pydantic import BaseModel

from errata_protocol.detect.agent_files import AgentFiles
from errata_protocol.error_info import KEY, ErrorInfo
from errata_protocol.errors import InvalidRequest
from errata_protocol.markers import NOTHING_WRONG, Detection, ErrorKind, ErrorMarkers, ErrorSite, error_info

from .detecting import TurnText
from .host_files import is_host_file

T = TypeVar("T")

log = logging.getLogger("errata.environment")

Marking: TypeAlias = Generator[TurnText, Detection, T]
"""Yields turns, receives what the detectors find in them (`detecting.detecting`), and returns a ``T``."""

META_KEY = "openenv/error_markers"
"""Key of the markers in an MCP result's ``_meta``, and in the ``data`` of a JSON-RPC error."""

MAX_TEXT_RESULT = 1024**2
"""Longest MCP text, in characters, that is parsed as JSON to find the mapped fields."""

Path = tuple[str, ...]

_USAGE = (
    "detect takes stdout=FIELD,stderr=FIELD,exit_code=FIELD[,command=ACTIONFIELD], or for exit_code a boolean as "
    "success=FIELD, or what is set only by a failure as error=FIELD"
)
_KEYS = ("stdout", "stderr", "exit_code", "success", "error", "command")
_STATUSES = ("exit_code", "success", "error")
_STATUS_TYPES: dict[str, tuple[type, ...]] = {"exit_code": (int, float, str), "success": (bool,)}
"""Types whose values a field can say a status with; of a field of another type alone, nothing would ever be marked."""


@dataclass(frozen=True, slots=True)
class FieldMap:
    """Paths of the fields of observations and actions that the detectors read.

    Args:
        exit_code: Observation's field with the exit status; None with `success`. Nothing is marked without a number.
        success: Observation's boolean field, false if the command failed; used where there is no exit status.
        stdout: Observation's field with the standard output; None if there is none.
        stderr: Observation's field with the standard error; None if there is none.
        command: Action's field with the command; without it error sites have no span.
        error: Observation's field that is empty unless the turn failed: a tool's error, as of MCP environments, or a
            text. A `result` beside it that says ``isError`` is a failure, too.
    """

    exit_code: Path | None = None
    stdout: Path | None = None
    stderr: Path | None = None
    command: Path | None = None
    success: Path | None = None
    error: Path | None = None

    @classmethod
    def parse(cls, text: str, action_cls: type[Action], observation_cls: type[Observation]) -> FieldMap:
        """Parse ``stdout=FIELD,stderr=FIELD,exit_code=FIELD[,command=ACTIONFIELD]``; fields may be dotted paths.

        ``success=FIELD`` replaces ``exit_code`` for observations with only a boolean, ``error=FIELD`` for those with
        only an error.

        Raises:
            InvalidRequest: The text has another form, or it would mark nothing: it names a field that the classes lack
                (the message lists those that they have) or one of a type without a status, or the observations have
                markers of their own.
        """
        if not isinstance(text, str):  # most likely a mapping
            raise InvalidRequest(f"{_USAGE} as one text, not {text!r}")
        paths: dict[str, Path] = {}
        for entry in text.split(","):
            name, separator, path = (part.strip() for part in entry.partition("="))
            if not separator or not path or name not in _KEYS:
                raise InvalidRequest(f"{_USAGE}, and {entry.strip()!r} is none of these")
            if name in paths:
                raise InvalidRequest(f"{_USAGE}, and {name} stands there twice")
            paths[name] = tuple(path.split("."))
            of: type[BaseModel] = action_cls if name == "command" else observation_cls
            # MCP environments declare no more than the base classes, which have no field of their own to map
            _check(paths[name], {Action: CallToolAction, Observation: CallToolObservation}.get(of, of), name)
        given = [name for name in _STATUSES if name in paths]
        if len(given) > 1:
            raise InvalidRequest(f"{_USAGE}, and not both {given[0]} and {given[1]}")
        if not given:
            raise InvalidRequest(f"{_USAGE}; exit_code is missing: without it nobody knows which turn failed")
        if issubclass(observation_cls, ErrorMarkers):
            raise InvalidRequest(
                f"detect: {observation_cls.__name__} has markers of its own and would get no others: leave it out"
            )
        return cls(**paths)

    def status(self, observation: object) -> int | None:
        """Return the exit status in an observation, or 0 or 1 for a `success` or `error` field; None if unknown."""
        if self.error is not None:
            return 1 if _value(observation, self.error) or _is_error(_value(observation, ("result",))) else None
        if self.success is not None:
            succeeded = _value(observation, self.success)
            return int(not succeeded) if isinstance(succeeded, bool) else None
        return _exit_code(_value(observation, self.exit_code)) if self.exit_code is not None else None

    def detection(self, observation: object, action: object) -> Marking[Detection]:
        """Return the error that the detectors find in one turn."""
        exit_code = self.status(observation)
        if exit_code is None:
            self._note_absent(observation)
            return NOTHING_WRONG
        if self.error is not None:
            return (yield from self._tool_error(observation, action))
        found = yield TurnText(
            _text(_value(action, self.command)) if self.command else "",
            exit_code,
            _text(_value(observation, self.stdout)) if self.stdout else "",
            _text(_value(observation, self.stderr)) if self.stderr else "",
            on_host=True,
        )
        field = ".".join(self.command) if self.command else None
        return _with_sites(found, [_in_field(site, field) for site in found.error_sites])

    def _tool_error(self, observation: object, action: object) -> Marking[Detection]:
        """Return the error that the `error` field, or the result beside it, describes."""
        assert self.error is not None
        error = _value(observation, self.error)
        if isinstance(error, BaseModel):
            error = error.model_dump(mode="json")
        name = _value(action, ("tool_name",)) or _value(action, ("name",))
        asked = {"name": name, "arguments": _value(action, ("arguments",))}
        if isinstance(error, Mapping) and "error_type" in error:
            found = yield from _described(error, asked)
        elif error and error is not True:
            message = error.get("message") if isinstance(error, Mapping) else None
            found = yield from _failure_text(_text(message or error), asked)
        else:
            text = _texts(_value(observation, ("result",))) if error is not True else ""
            outputs = (_text(_value(observation, path)) for path in (self.stderr, self.stdout) if path is not None)
            found = yield from _failure_text(text or "\n".join(outputs), asked)
        of_step = "tool_name" if _value(action, ("tool_name",)) else "name"
        return _with_sites(
            found,
            [
                site.model_copy(update={"action_field": of_step}) if site.action_field == "name" else site
                for site in found.error_sites
            ],
        )

    def _note_absent(self, observation: object) -> None:
        """Warn of a field that the observation could have, for its class takes any, and does not have."""
        path = self.exit_code or self.success or self.error or ("",)
        if (
            isinstance(observation, BaseModel)
            and observation.model_extra is not None
            and not _has(observation, path[0])
        ):
            _warn_once(type(observation).__name__, ".".join(path))


def marked_observation(observation: Observation, action: Action, t: int, fields: FieldMap) -> Marking[Observation]:
    """Return the observation, with markers added to its metadata if the detectors find an error.

    An observation whose class declares markers, or whose metadata has an ``error_kind`` or error information of the
    environment's own, is returned unchanged. Existing metadata keys are never overwritten.

    Args:
        observation: The observation that a step returned.
        action: The agent's action.
        t: Delivery index of the turn.
        fields: Fields that the detectors read.
    """
    metadata = observation.metadata
    if isinstance(observation, ErrorMarkers) or not isinstance(metadata, dict) or "error_kind" in metadata:
        return observation
    if KEY in metadata and ErrorInfo.read(metadata) is not None:
        return observation
    found = yield from fields.detection(observation, action)
    if found.error_kind is None:
        return observation
    markers = _markers(found, t)
    if (info := error_info(found.error_kind, found.severity, found.error_sites)) is not None:
        markers[KEY] = info
    return observation.model_copy(update={"metadata": {**metadata, **_new(markers, metadata)}})


def marked_response(
    response: dict[str, Any], request: bytes, t: int, fields: FieldMap | None
) -> Marking[tuple[dict[str, Any], Detection]]:
    """Return the JSON-RPC response of a tools/call with markers added, and the detected error.

    Markers are added to ``result._meta`` if the result is an object, and to ``error.data`` if upstream returned a
    JSON-RPC error. A response that already has our key is returned unchanged.

    Args:
        response: The response of upstream's handler.
        request: The JSON-RPC request.
        t: Delivery index of the call.
        fields: Fields that the detectors read in structured results; None marks only results that are errors.
    """
    asked = json.loads(request).get("params") or {}
    result, error = response.get("result"), response.get("error")
    if isinstance(error, dict):
        found = _stamped((yield from _rpc_error(error, asked)), t)
        data = error.get("data")
        if found.error_kind is None or not (data is None or (isinstance(data, dict) and META_KEY not in data)):
            return response, found
        return {**response, "error": {**error, "data": {**(data or {}), META_KEY: _markers(found, t)}}}, found
    if not isinstance(result, dict):
        return response, NOTHING_WRONG
    meta = result.get("_meta")
    if not (meta is None or (isinstance(meta, dict) and META_KEY not in meta)):
        return response, NOTHING_WRONG
    found = yield from _result(result, asked, fields)
    if found.error_kind is None:
        return response, found
    return {**response, "result": {**result, "_meta": {**(meta or {}), META_KEY: _markers(found, t)}}}, found


# -- MCP results ------------------------------------------------------------------------------------------------------

_ARGUMENTS_READ = 64 * 1024
"""Characters of the arguments of a call in which names of the agent's files are looked for."""
_TOOL_UNKNOWN = re.compile(r"(?i)\b(unknown tool|tool not found|no such tool)\b")
_ARGUMENTS_INVALID = re.compile(
    r"(?i)\d+ validation errors? for |missing \d+ required (positional|keyword-only) argument"
    r"|unexpected keyword argument"
)
_NO_TOOL_RAN = ("Environment does not support MCP", "MCP server not available", "MCP-style tools/call")
"""Beginnings of upstream's errors where no tool was run: not the agent's error, so they are not marked."""

_KIND_OF_TOOL_ERROR = {kind.value: kind for kind in ErrorKind} | {"invalid_args": ErrorKind.INVALID_ARGUMENTS}
"""Kinds of an ``error_type``: the protocol's own names, and those of upstream's `ToolErrorType` that say a kind. Its
``execution_error`` says that the tool failed, as the lack of a type does: the message is read."""
_KIND_OF_EXCEPTION: tuple[tuple[type[Exception], ErrorKind], ...] = (
    (FileNotFoundError, ErrorKind.PATH_NOT_FOUND),
    (PermissionError, ErrorKind.PERMISSION_DENIED),
    (TimeoutError, ErrorKind.TIMEOUT),
    (ImportError, ErrorKind.IMPORT_ERROR),
    (SyntaxError, ErrorKind.SYNTAX_ERROR),
    (MemoryError, ErrorKind.RESOURCE_LIMIT),
)
"""Kinds of an ``error_type`` that names an exception, where the message alone says none."""
_OF_MACHINE = "transport_error"
"""The other `ToolErrorType`: an infrastructure failure, which is not marked."""


def _result(result: dict[str, Any], asked: Mapping[str, Any], fields: FieldMap | None) -> Marking[Detection]:
    if fields is not None:
        arguments = asked.get("arguments") or {}
        action = {"name": asked.get("name"), "tool_name": asked.get("name"), **arguments, "arguments": arguments}
        for content in _structured(result):
            if fields.status(content) is not None:
                return (yield from fields.detection(content, action))
    error = result.get("error")
    if isinstance(error, dict) and "error_type" in error:
        return (yield from _described(error, asked))
    if _is_error(result):
        return (yield from _failure_text(_texts(result), asked))
    return NOTHING_WRONG


def _described(error: Mapping[str, Any], asked: Mapping[str, Any]) -> Marking[Detection]:
    """Return the error that upstream's `ToolError` describes, by its type, or by its message if the type is unknown."""
    type_, message = str(getattr(error["error_type"], "value", error["error_type"])), _text(error.get("message"))
    if type_ == _OF_MACHINE:
        return NOTHING_WRONG
    kind = _KIND_OF_TOOL_ERROR.get(type_)
    if kind is not None:
        return _tool_failure(kind, message, asked)
    found = yield from _failure_text(message, asked)
    raised = _kind_of_exception(type_)
    return found if raised is None or found.error_kind is not ErrorKind.RUNTIME_ERROR else _with_kind(found, raised)


def _kind_of_exception(name: str) -> ErrorKind | None:
    """Return the kind of an exception of Python, by its name; None if there is none of this name or kind."""
    cls = getattr(builtins, name, None)
    if not isinstance(cls, type) or not issubclass(cls, Exception):
        return None
    return next((kind for base, kind in _KIND_OF_EXCEPTION if issubclass(cls, base)), None)


def _with_kind(found: Detection, kind: ErrorKind) -> Detection:
    return Detection.of(kind, *found.error_sites, severity=found.severity)


def _is_error(result: object) -> bool:
    """Return whether an MCP result says that the tool failed."""
    return _value(result, ("isError",)) is True or _value(result, ("is_error",)) is True


def _structured(result: dict[str, Any]) -> Iterator[Any]:
    """Yield the parts of a result that can hold mapped fields: structured content first, JSON texts last."""
    for key in ("structuredContent", "structured_content", "data"):
        if isinstance(result.get(key), dict):
            yield result[key]
            yield {"result": result[key]}  # so that paths for upstream's CallToolObservation fit
    yield result
    text = _texts(result)
    if text.lstrip().startswith("{") and len(text) <= MAX_TEXT_RESULT:
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            return
        yield content
        yield {"result": content}


def _texts(result: object) -> str:
    blocks = _value(result, ("content",))
    if not isinstance(blocks, list):
        return ""
    texts = (b.get("text") if isinstance(b, dict) else getattr(b, "text", None) for b in blocks)
    return "\n".join(t for t in texts if isinstance(t, str))


def _rpc_error(error: dict[str, Any], asked: Mapping[str, Any]) -> Marking[Detection]:
    message = str(error.get("message") or "")
    return NOTHING_WRONG if message.startswith(_NO_TOOL_RAN) else (yield from _failure_text(message, asked))


def _failure_text(text: str, asked: Mapping[str, Any]) -> Marking[Detection]:
    """Detect the error in the message of a failed tool, which did fail: an unrecognised one is a runtime error."""
    if _TOOL_UNKNOWN.search(text):
        return _tool_failure(ErrorKind.TOOL_NOT_FOUND, text, asked)
    if _ARGUMENTS_INVALID.search(text):
        return _tool_failure(ErrorKind.INVALID_ARGUMENTS, text, asked)
    found = yield TurnText("", 1, "", text, on_host=True)
    if found.error_kind not in (None, ErrorKind.NONZERO_EXIT):
        return _with_sites(found, [_in_field(site, None) for site in found.error_sites])
    site = ErrorSite(source="message", message=_line(text, asked)) if text.strip() else None
    return Detection.of(ErrorKind.RUNTIME_ERROR, *([site] if site else []))


def _tool_failure(kind: ErrorKind, message: str, asked: Mapping[str, Any]) -> Detection:
    name = asked.get("name")
    of_name = kind is ErrorKind.TOOL_NOT_FOUND and isinstance(name, str) and name
    site = ErrorSite(
        action_field="name" if of_name else None,
        action_span=(0, len(str(name))) if of_name else None,
        source="action" if of_name else "message",
        message=_line(message, asked),
    )
    return Detection.of(kind, site)


def _line(text: str, asked: Mapping[str, Any]) -> str | None:
    """Return the first line of a message, with paths of the server redacted; None if it is empty."""
    lines = text.strip().splitlines()
    if not lines:
        return None
    arguments = json.dumps(asked.get("arguments") or {}, ensure_ascii=False)[:_ARGUMENTS_READ]
    return AgentFiles(arguments, lines[:1], is_host_file).redacted(lines[0])[:300]


# -- values -----------------------------------------------------------------------------------------------------------


def _markers(found: Detection, t: int) -> dict[str, Any]:
    sites = [site.model_dump(mode="json") for site in _stamped(found, t).error_sites]
    return {
        "error_kind": found.error_kind.value if found.error_kind else None,
        "hint_template_key": found.hint_template_key,
        "error_site": sites[0] if sites else None,
        "severity": found.severity,
        "error_sites": sites,
    }


def _new(markers: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in markers.items() if k not in metadata}


def _stamped(found: Detection, t: int) -> Detection:
    return _with_sites(found, [site.model_copy(update={"t": t}) for site in found.error_sites])


def _with_sites(found: Detection, sites: list[ErrorSite]) -> Detection:
    if found.error_kind is None:
        return found
    return Detection.of(found.error_kind, *sites, severity=found.severity, hint_template_key=found.hint_template_key)


def _in_field(site: ErrorSite, field: str | None) -> ErrorSite:
    """Return the site with its span in ``field`` of the action; without a field the span is dropped."""
    if site.action_field is None:
        return site
    span = site.action_span if field is not None else None
    return site.model_copy(update={"action_field": field, "action_span": span})


def _value(holder: object, path: Path) -> Any:
    """Return the value at a path through models, mappings and plain objects; None if there is none."""
    value = holder
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


def _has(holder: object, name: str) -> bool:
    return name in holder if isinstance(holder, Mapping) else hasattr(holder, name)


@functools.cache  # once for each class, not for each turn
def _warn_once(name: str, field: str) -> None:
    log.warning("detect: a %s had no field %r, so nothing is marked: look at its name", name, field)


def _exit_code(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal():
        return int(value)
    return int(value) if isinstance(value, int) or (isinstance(value, float) and value.is_integer()) else None


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, list | tuple):
        return "\n".join(_text(v) for v in value)
    return value if isinstance(value, str) else str(value)


# -- checks at the start ----------------------------------------------------------------------------------------------


def _check(path: Path, cls: type[BaseModel], key: str) -> None:
    """Check at the start that a field can be read.

    Args:
        path: The path that the operator gave.
        cls: Class of the observations, or of the actions.
        key: What the field is for.

    Raises:
        InvalidRequest: Instances of the class cannot have the path, or its values cannot be such a status.
    """
    at: type[BaseModel] = cls
    for depth, name in enumerate(path):
        field = at.model_fields.get(name)
        if field is None:
            if at.model_config.get("extra") == "allow":
                return
            held = ", ".join(sorted(at.model_fields)) or "none"
            raise InvalidRequest(f"detect: {at.__name__} has no field {name!r}; its fields are: {held}")
        inner = list(_classes(field.annotation))
        models = [c for c in inner if isinstance(c, type) and issubclass(c, BaseModel)]
        if models:
            at = models[0]
        elif depth + 1 < len(path):
            if any(c is Any or c is object or (isinstance(c, type) and issubclass(c, Mapping)) for c in inner):
                return
            raise InvalidRequest(f"detect: field {'.'.join(path[: depth + 1])!r} of {cls.__name__} has no fields")
    possible = _STATUS_TYPES.get(key)
    if possible is not None and inner and not any(_may_be(c, possible) for c in inner):
        raise InvalidRequest(
            f"detect: field {'.'.join(path)!r} of {cls.__name__} is no {key}: its values are never "
            f"{' or '.join(one.__name__ for one in possible)}, so nothing would be marked; a field that only a failure "
            "sets is error=FIELD"
        )


def _may_be(annotated: Any, possible: tuple[type, ...]) -> bool:
    """Return whether values of an annotation may be of one of the types. A boolean is not an integer here."""
    if not isinstance(annotated, type) or annotated is object:
        return annotated is not None  # Any, a type variable, Literal: not known
    if annotated is bool or annotated is type(None):
        return bool in possible and annotated is bool
    return issubclass(annotated, possible)


def _classes(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation allows, with generics replaced by their origins."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _classes(get_args(annotation)[0])
    elif origin is None:
        yield annotation
    elif isinstance(origin, type) and origin.__name__ != "UnionType":
        yield origin
    elif origin is Union or getattr(origin, "__name__", "") == "UnionType":
        for one in get_args(annotation):
            yield from _classes(one)
