"""`discovered`: what a trainer needs to know of an environment that no package publishes, asked from its server."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from errata_client.connections.waiting import blocking_wait
from errata_protocol.bounded_json import decode
from errata_protocol.environment import default_agent_text
from errata_protocol.errors import InvalidRequest, ServiceError
from errata_protocol.markers import ErrorMarkers
from errata_protocol.printable import printable

from .argument_schemas import MAX_NAME, WAY_OUT, arguments_of, identifier, text_of
from .tools import PlayedEnvironment, Tool, step_tool

MAX_ANSWER = 4 * 1024 * 1024
"""Largest answer of a server that is read, bytes."""
MAX_TOOLS = 128
"""Most tools of an environment."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SCHEMES = {"ws": "http", "wss": "https"}
_MARKERS = frozenset(ErrorMarkers.model_fields)
_CALL = {"type", "tool_name", "arguments", "metadata"}
"""Fields of OpenEnv's ``CallToolAction``."""
_RESULT = {"tool_name", "result", "error", "done", "reward", "metadata"}
"""Fields of OpenEnv's ``CallToolObservation``."""

log = logging.getLogger("errata.trainer")


def discovered(
    url: str, name: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 30.0
) -> PlayedEnvironment:
    """Ask a server, of Errata or OpenEnv, for the tools of an environment, and return what a trainer needs of it.

    The tools are those of MCP's ``tools/list`` where the environment's actions are calls of MCP tools; else there is
    one tool, ``step``, whose arguments are the fields of the action in ``GET /schema``.

    Args:
        url: Base URL of the environment.
        name: Name of the environment on its server.
        headers: Headers of each request, e.g. ``{"Authorization": "Bearer TOKEN"}``.
        timeout_s: Longest wait for an answer, seconds.

    Raises:
        InvalidRequest: The server has no such environment, or one whose actions no tool can make; the message names the
            field.
        ConnectionError: The server cannot be reached.
        ServiceError: The server failed, or answered something else than it should.
    """
    try:
        parts = urlsplit(url.rstrip("/"))
    except ValueError as error:
        raise InvalidRequest(f"{printable(url, 200)!r} is no URL ({error}): give http://host:port") from error
    base = parts._replace(scheme=_SCHEMES.get(parts.scheme, parts.scheme)).geturl()
    local = parts.hostname in _LOOPBACK
    asked = {**(headers or {}), "Accept-Encoding": "identity"}  # so that an answer is as large as it looks
    with httpx.Client(headers=asked, timeout=timeout_s, trust_env=not local, follow_redirects=True) as client:
        server = _Server(client, base, name, timeout_s)
        server.check_name()
        schema = server.action_schema()
        fields = schema.get("properties", {}) if isinstance(schema.get("properties", {}), dict) else {}
        calls = {"tool_name", "arguments"} <= fields.keys() <= _CALL
        listed = server.tools(needed=calls) if calls or fields.keys() <= {"metadata"} else []
        constants = {"type": "call_tool"} if "type" in fields or not calls else {}
    tools = [_mcp_tool(tool, constants) for tool in listed] or [step_tool(schema, f"the action of {name}")]
    by_name: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in by_name:
            raise InvalidRequest(f"two tools of {name} would both be {tool.name!r} in Python: {WAY_OUT}")
        by_name[tool.name] = tool
    log.info("%s has, by its server, the tools %s", name, ", ".join(by_name))
    return PlayedEnvironment(name, by_name, tool_text if listed else shown_text)


def shown_text(observation: Mapping[str, Any]) -> str:
    """Return the text for the student of an observation: its JSON without metadata and without error markers."""
    return default_agent_text(_unmarked(observation))


def tool_text(observation: Mapping[str, Any]) -> str:
    """Return the text for the student of an MCP environment's observation: the text of the result, or the error's.

    An observation with fields of its own is shown as `shown_text` shows it; one without any is empty.
    """
    said = {name: value for name, value in _unmarked(observation).items() if value is not None}
    if not said.keys() <= _RESULT:
        return shown_text(observation)
    error, result = said.get("error"), said.get("result")
    if isinstance(error, Mapping):
        return f"error: {error.get('message') or error.get('error_type') or 'the tool failed'}"
    blocks = result.get("content") if isinstance(result, Mapping) else None
    said_by = [block.get("text") for block in blocks if isinstance(block, Mapping)] if isinstance(blocks, list) else []
    texts = [text for text in said_by if isinstance(text, str)]
    if texts and len(texts) == len(said_by):
        return "\n".join(texts)
    if isinstance(result, str):
        return result
    return "" if result is None else shown_text({"result": result})


def _unmarked(observation: Mapping[str, Any]) -> dict[str, Any]:
    markers = _MARKERS if observation.keys() >= _MARKERS else ()  # an environment may have a `severity` of its own
    return {name: value for name, value in observation.items() if name not in markers}


def _mcp_tool(listed: Any, constants: Mapping[str, Any]) -> Tool:
    named = listed.get("name") if isinstance(listed, Mapping) else None
    where = f"the MCP tool {printable(named, MAX_NAME)!r}"
    name = identifier(named, where)
    if name.startswith("_"):
        name = f"tool{name}"
    if name in ("reset", "get_reward"):  # methods of the environment that the trainer makes
        name = f"{name}_"
    arguments = arguments_of(listed.get("inputSchema") or listed.get("input_schema") or {}, where)
    description = text_of(listed.get("description"), where) or f"Call {named}."
    fixed = {**constants, "tool_name": named, "arguments": arguments.constants}
    return Tool(name, description, arguments.parameters, fixed, arguments.fields, "arguments")


class _Server:
    """Asks one server about one environment."""

    def __init__(self, client: httpx.Client, base: str, name: str, timeout_s: float) -> None:
        self._client, self._base, self._name, self._timeout_s = client, base, name, timeout_s

    def check_name(self) -> None:
        """Check that the environment at the URL has the name.

        Raises:
            InvalidRequest: It has another one.
        """
        found = self._ask("GET", "/capabilities")
        named = found.get("environment") if isinstance(found, dict) else None
        if isinstance(named, str) and named != self._name:
            raise InvalidRequest(
                f"no package that is installed here publishes {self._name!r}, and the server has the environment "
                f"{printable(named, 200)!r} at {self._base}: give env={printable(named, 200)!r}, or another URL, e.g. "
                f"http://host:port/{self._name}"
            )

    def action_schema(self) -> dict[str, Any]:
        """Return the JSON schema of the environment's actions."""
        found = self._ask("GET", "/schema")
        if found is None:
            others = self._ask("GET", "/list_environments")
            known = (
                f"the server has {printable(', '.join(map(str, others)), 500)}; " if isinstance(others, list) else ""
            )
            raise InvalidRequest(
                f"there is no environment at {self._base} (no GET /schema): {known}give the URL of the environment, "
                f"e.g. http://host:port/{self._name}"
            )
        action = found.get("action") if isinstance(found, dict) else None
        if not isinstance(action, dict):
            raise ServiceError(f"GET {self._base}/schema has no schema of an action: is it an OpenEnv server?")
        return action

    def tools(self, *, needed: bool) -> list[Any]:
        """Return what ``tools/list`` lists; nothing where that is not ``needed`` and there are no tools."""
        found = self._ask("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})
        match found:
            case {"result": {"tools": [_, *_] as listed}}:
                tools: list[Any] = listed
                if len(tools) > MAX_TOOLS:
                    raise InvalidRequest(f"{self._name} has {len(tools)} tools, more than {MAX_TOOLS}: {WAY_OUT}")
                return tools
            case _ if not needed:
                return []
            case {"error": {"message": str(message)}}:
                raise ServiceError(f"{self._name} could not list its MCP tools: {printable(message, 500)}")
        raise InvalidRequest(
            f"the actions of {self._name} are calls of MCP tools, and tools/list at {self._base}/mcp names none: "
            f"{WAY_OUT}"
        )

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the decoded JSON of an answer; None where the server has no such route.

        Raises:
            ConnectionError: There is no answer.
            ServiceError: It is an error, no JSON, or too large; or it takes too long.
        """
        place = f"{method} {self._base}{path}"
        until = time.monotonic() + self._timeout_s
        content = bytearray()
        try:
            with (
                blocking_wait(self._base, "the environment's tools", self._timeout_s),
                self._client.stream(method, self._base + path, json=body) as answer,
            ):
                for piece in answer.iter_raw():
                    content += piece
                    if len(content) > MAX_ANSWER:
                        raise ServiceError(f"{place} answers more than {MAX_ANSWER:,} bytes: is it an OpenEnv server?")
                    if time.monotonic() > until:
                        raise ServiceError(f"{place} was not answered completely within {self._timeout_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConnectionError(
                f"no package that is installed here publishes {self._name!r}, and the server cannot be asked for its "
                f"tools: {place}: {error or type(error).__name__}; start the server first, or correct the URL"
            ) from error
        if answer.status_code in (404, 405):
            return None
        if answer.status_code == 401:
            raise InvalidRequest(f'{place}: give the server\'s token as headers={{"Authorization": "Bearer TOKEN"}}')
        if not answer.is_success:
            said = printable(content.decode(errors="replace"), 300)
            raise ServiceError(f"{place} was answered with status {answer.status_code}: {said}")
        try:
            return decode(bytes(content))
        except ValueError as error:
            raise ServiceError(f"{place} was answered with no JSON ({error}): is it an OpenEnv server?") from error
