"""An environment that no installed package publishes: its tools are read from its server, whatever that answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, Literal

import pytest
from openenv.core.env_server.types import Action
from pydantic import BaseModel, Field
from transformers.utils import get_json_schema

from errata_protocol.errors import ErrataError, InvalidRequest, ServiceError
from errata_protocol.markers import ErrorMarkers
from errata_server.process import ServerProcess
from errata_trainer.episodes.argument_schemas import MAX_ARGUMENTS, MAX_NODES
from errata_trainer.episodes.discovery import MAX_ANSWER, MAX_TOOLS, discovered, shown_text, tool_text
from errata_trainer.episodes.tools import PlayedEnvironment, Tool, step_tool
from errata_trainer.recipes.trl import environment_factory

pytestmark = pytest.mark.training

Answers = dict[str, Any]


@contextmanager
def answering(answers: Answers) -> Iterator[str]:
    """Yield the URL of an HTTP server that answers paths as given: (status, bytes), or JSON; 404 for all others."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = answers.get(self.path, (404, b""))
            status, body = given if isinstance(given, tuple) else (200, json.dumps(given).encode())
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:
                self.close_connection = True  # the client has read enough

        do_POST = do_GET  # noqa: N815 # the base class calls it so

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


CALL_TOOL = {"properties": {"type": {"const": "call_tool"}, "tool_name": {}, "arguments": {}, "metadata": {}}}


def listing(*tools: Any) -> Answers:
    return {"/schema": {"action": CALL_TOOL}, "/mcp": {"jsonrpc": "2.0", "id": 1, "result": {"tools": list(tools)}}}


def told(tool: Tool) -> Any:
    """What a trainer tells the student of a tool."""
    made = environment_factory("http://127.0.0.1:9", PlayedEnvironment("own", {tool.name: tool}))
    return get_json_schema(getattr(made, tool.name))["function"]


def test_the_description_that_the_documentation_shows_is_a_factory() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", page, re.S) if "PlayedEnvironment(" in b)
    names: dict[str, Any] = {"environment_factory": environment_factory}
    exec(compile(block, "docs/training.md", "exec"), names)
    function = get_json_schema(names["environment"].move)["function"]
    assert function["parameters"]["properties"]["direction"]["enum"] == ["up", "down"]
    assert names["move"].action({"direction": "up"}) == {"kind": "move", "direction": "up"}


def of_fields(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}


# -- real servers -----------------------------------------------------------------------------------------------------


def test_tools_of_an_mcp_environment_are_those_that_it_lists(tmp_path: Path) -> None:
    with ServerProcess("tests.environments.toolbox:ToolboxEnvironment", tmp_path) as server:
        made: Any = environment_factory(server.url, "ToolboxEnvironment")
        assert get_json_schema(made.add)["function"]["parameters"] == {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "a"},
                "b": {"type": "integer", "description": "b"},
            },
            "required": ["a", "b"],
        }
        one = made()
        assert one.reset() == ""
        assert [one.add(a=2, b=3), one.note(text="first"), one.note(text="second")] == ["5", "first", "first second"]
        assert one.get_reward() == 0.0 and [call.t for call in one._runner.played] == [1, 2, 3]
        one._runner.close()
        with pytest.raises(InvalidRequest, match=r"has the environment 'ToolboxEnvironment' at .*: give env="):
            environment_factory(server.url, "toolbox")
        with pytest.raises(InvalidRequest, match=r"no environment at .*/nowhere .*give the URL of the environment"):
            environment_factory(f"{server.url}/nowhere", "toolbox")


def test_tools_are_read_at_a_member_that_serves_where_the_address_lists_members(tmp_path: Path) -> None:
    listed = tmp_path / "fleet.json"
    with answering(listing({"name": "look", "inputSchema": of_fields(q={})})) as url:
        members = [
            {"shard": "k3v9x0q7m2ab", "url": "http://127.0.0.1:9", "state": "down"},
            {"shard": "k3v9x0q7m2ac", "url": url, "state": "up"},
        ]
        listed.write_text(json.dumps({"members": members}), encoding="utf-8")
        made = environment_factory(f"file://{listed}", "own")
        assert get_json_schema(made.look)["function"]["name"] == "look"
    listed.write_text(json.dumps({"members": members[:1]}), encoding="utf-8")
    with pytest.raises(ConnectionError, match=r"no member of the fleet at file://.* serves now"):
        environment_factory(f"file://{listed}", "own")


def test_a_url_that_is_none_is_told() -> None:
    with pytest.raises(InvalidRequest, match="is no URL"):
        discovered("http://[", "own")
    with pytest.raises(ConnectionError, match="correct the URL"):
        discovered("127.0.0.1:9", "own")


def test_a_server_that_is_not_there_is_told_before_anything_is_made() -> None:
    with pytest.raises(ConnectionError, match=r"publishes 'my_env'.*http://127.0.0.1:9/.*start the server first"):
        environment_factory("http://127.0.0.1:9", "my_env")


# -- what a schema becomes --------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    """A place."""

    x: int = Field(ge=0, description="Column")
    y: int = 0


class Paint(Action):
    """Paint the board."""

    kind: Literal["paint"] = "paint"
    colour: Colour = Field(description="Which colour")
    shade: Literal[1, 2, "dark"] = 1
    at: Point = Field(description="Where")
    path: list[Point] = Field(default_factory=list, description="Which way")
    note: str | None = Field(None, description="A remark", max_length=9)
    remark: str | None = Field(None, description="Another")
    size: int | float = 1
    options: dict[str, int] = Field(default_factory=dict)
    grid: list[list[int]] = Field(description="Rows", min_length=1)
    pair: tuple[int, str] = (0, "")
    levels: list[Annotated[int, Field(ge=3)]] = Field(default_factory=list)


def test_fields_of_an_action_are_told_with_their_types_and_descriptions() -> None:
    tool = step_tool(Paint.model_json_schema())
    schema = told(tool)
    assert (schema["name"], schema["description"]) == ("step", "Paint the board.")
    assert schema["parameters"]["required"] == ["colour", "at", "grid"]
    fields = schema["parameters"]["properties"]
    assert fields["colour"] == {"type": "string", "enum": ["red", "blue"], "description": "Which colour"}
    assert fields["shade"]["enum"] == [1, 2, "dark"] and "default 1" in fields["shade"]["description"]
    assert fields["at"]["type"] == "object"
    assert fields["at"]["description"].startswith("Where (JSON schema ") and '"x"' in fields["at"]["description"]
    assert fields["path"]["items"]["type"] == "object" and '"x"' in fields["path"]["description"]
    assert (fields["note"]["type"], fields["note"]["nullable"]) == ("string", True)
    assert fields["note"]["description"].startswith("A remark (JSON schema ")
    assert '"maxLength": 9' in fields["note"]["description"]
    assert fields["remark"] == {"type": "string", "nullable": True, "description": "Another"}
    assert fields["size"]["type"] == ["integer", "number"] and fields["options"]["type"] == "object"
    assert fields["options"]["additionalProperties"] == {"type": "integer"}
    assert '"prefixItems": [{"type": "integer"}, {"type": "string"}]' in fields["pair"]["description"]
    assert fields["levels"]["items"] == {"type": "integer"} and '"minimum": 3' in fields["levels"]["description"]
    assert "Column" in fields["at"]["description"], "what an author wrote of an inner field is read, too"
    assert fields["grid"]["items"] == {"type": "array", "items": {"type": "integer"}}
    assert fields["grid"]["description"] == "Rows (minItems 1)"
    given = {"colour": "red", "at": {"x": 1}, "grid": [[1]]}
    assert tool.action({**given, "note": None}) == {"kind": "paint", **given}
    assert Paint.model_validate(tool.action(given)).kind == "paint"


def test_names_that_python_does_not_take_are_told_changed_and_sent_as_they_are() -> None:
    names = ["from", "max-depth", "2nd", "self", "Returns", "größe", "return"]
    tool = step_tool(of_fields(**{name: {"type": "integer"} for name in names}))
    shown = ["from_", "max_depth", "_2nd", "self_", "Returns_", "größe", "return_"]
    assert list(told(tool)["parameters"]["properties"]) == shown == told(tool)["parameters"]["required"]
    assert tool.action({name: n for n, name in enumerate(shown)}) == {name: n for n, name in enumerate(names)}
    with pytest.raises(TypeError, match="needs the argument 'from_'"):
        tool.action({})


@pytest.mark.parametrize(
    ("name", "shown"), [("search.web", "search_web"), ("get_reward", "get_reward_"), ("_x", "tool_x"), ("del", "del_")]
)
def test_tools_of_any_name_are_called_by_the_environments_own(name: str, shown: str) -> None:
    described = {
        "name": name,
        "description": "D.\n\nArgs:\n    q: Q.\n\nReturns:\n    It.",
        "inputSchema": of_fields(q={}),
    }
    with answering(listing(described)) as url:
        tool = discovered(url, "own").tools[shown]
    assert tool.action({"q": "x"}) == {"type": "call_tool", "tool_name": name, "arguments": {"q": "x"}}
    said = told(tool)
    assert said["description"].startswith("D.\n\narguments:") and "It." in said["description"]


@pytest.mark.parametrize(
    "description",
    ["Args:", "x (choices: [1,", "a\nReturns: b\nRaises: c", "\n\n", "a: b\n  c: d", "kwArgs: and Returns:", "\ud800"],
)
def test_no_description_can_break_a_docstring(description: str) -> None:
    field = {"type": "string", "description": description}
    tool = step_tool({**of_fields(first=field, second={"type": "string"}), "description": description})
    fields = told(tool)["parameters"]["properties"]
    assert list(fields) == ["first", "second"] and fields["second"]["description"] == "second"
    json.dumps(told(tool), ensure_ascii=False).encode()


DEEP: Any = {"type": "integer"}
for _ in range(50):
    DEEP = {"type": "array", "items": DEEP}
NINE = {"type": "integer"}, *(of_fields(**{str(m): {"$ref": f"#/$defs/{n}"} for m in range(9)}) for n in range(5))
BILLION = {**of_fields(a={"$ref": "#/$defs/5"}), "$defs": {str(n): schema for n, schema in enumerate(NINE)}}
TREE = {"$defs": {"T": {"type": "array", "items": {"$ref": "#/$defs/T"}}}, **of_fields(tree={"$ref": "#/$defs/T"})}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ([], "the action cannot be a tool.*no JSON object"),
        ({"oneOf": [of_fields(a={})]}, "the action .*a choice"),
        ({"anyOf": [of_fields(a={}), of_fields(b={})]}, "the action .*a choice"),
        ({"type": "string"}, "the action .*single value"),
        ({"properties": 3}, "the action .*properties"),
        ({"required": ["a"]}, "the action.a .*required"),
        ({"required": 5}, "the action .*required"),
        (of_fields(a=5), r"the action\.a .*no JSON object"),
        (of_fields(a={"type": "tensor"}), r"the action\.a .*'tensor' is no type"),
        (of_fields(a={"type": {}}), r"the action\.a .*is no type"),
        (of_fields(a={"enum": []}), r"the action\.a .*1 to \d+ values"),
        (of_fields(a={"enum": [[]]}), r"the action\.a .*no texts or numbers"),
        (of_fields(a={"enum": list(range(10_000))}), r"the action\.a .*1 to \d+ values"),
        (of_fields(a={"anyOf": {}}), r"the action\.a .*anyOf is no list"),
        (of_fields(a={"allOf": [{"type": "string"}, {"minLength": 1}]}), r"the action\.a .*allOf"),
        (of_fields(a={"$ref": "http://elsewhere/schema"}), r"the action\.a .*not in the schema"),
        (of_fields(a={"$ref": "#/$defs/none"}), r"the action\.a .*not there"),
        (of_fields(a={"$ref": "#/properties/a"}), f"the action\\.a .*more than {MAX_NODES}"),
        (of_fields(a={"description": 5}), r"the action\.a .*description is no text"),
        (of_fields(a={"description": "x" * 10**6}), r"the action\.a .*1,000,000 characters"),
        (of_fields(a={"default": "x" * 10**6}), r"the action\.a .*characters to describe"),
        (of_fields(**{"a b": {}, "a_b": {}}), r"the action\.a_b .*'a b' would both be"),
        (of_fields(**{"!": {}}), r"the action\.! .*letter or digit"),
        (of_fields(**{"x" * 999: {}}), r"the action\.x+.* 1 to \d+ characters"),
        (of_fields(**{f"a{n}": {} for n in range(MAX_ARGUMENTS + 1)}), "fields, more than"),
        (of_fields(a=DEEP), r"the action\.a(\[\])+ .*nests"),
        (BILLION, f"the action.*more than {MAX_NODES}"),
        (TREE, r"the action\.tree(\[\])+ .*refers to itself"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_by_the_name_of_its_field(schema: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"(?:{says}).*PlayedEnvironment") as raised:
        step_tool(schema)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("answers", "error", "says"),
    [
        ({"/schema": (200, b"<html>")}, ServiceError, "no JSON.*is it an OpenEnv server"),
        ({"/schema": {"observation": {}}}, ServiceError, "no schema of an action"),
        ({"/schema": (500, b"broken")}, ServiceError, "status 500: broken"),
        ({"/schema": (401, b"")}, InvalidRequest, "Bearer TOKEN"),
        ({"/schema": (200, b"[" * (MAX_ANSWER + 1))}, ServiceError, "more than"),
        ({"/schema": (200, b"[" * 9999)}, ServiceError, "no JSON"),
        ({"/list_environments": ["left", "right"]}, InvalidRequest, "the server has left, right"),
        ({"/capabilities": {"environment": "left"}}, InvalidRequest, "give env='left'"),
        ({**listing(), "/mcp": (404, b"")}, InvalidRequest, "names none"),
        (listing(), InvalidRequest, "names none"),
        ({**listing(), "/mcp": {"error": {"message": "no room"}}}, ServiceError, "no room"),
        (listing(*[{"name": f"t{n}"} for n in range(MAX_TOOLS + 1)]), InvalidRequest, "129 tools"),
        (listing({"name": "a.b"}, {"name": "a_b"}), InvalidRequest, "would both be 'a_b'"),
        (listing({"name": 5}), InvalidRequest, "MCP tool '5' .*name"),
        (listing("x"), InvalidRequest, "MCP tool 'None' .*name"),
        (listing({"name": "t", "inputSchema": of_fields(a={"type": "x"})}), InvalidRequest, r"'t'\.a cannot"),
    ],
)
def test_odd_answers_of_a_server_are_told(answers: Answers, error: type[ErrataError], says: str) -> None:
    with answering(answers) as url, pytest.raises(error, match=says):
        discovered(url, "own")


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"metadata": {"ready": True}}, ""),
        (
            {"tool_name": "t", "result": {"content": [{"type": "text", "text": "a"}, {"text": "b"}]}, "error": None},
            "a\nb",
        ),
        ({"tool_name": "t", "result": "plain"}, "plain"),
        ({"tool_name": "t", "result": {"content": [{"type": "image"}]}}, '{"result":{"content":[{"type":"image"}]}}'),
        ({"tool_name": "t", "result": None, "error": {"error_type": "timeout", "message": "late"}}, "error: late"),
        ({"board": [1], "tool_name": "t", "metadata": {}}, '{"board":[1],"tool_name":"t"}'),
    ],
)
def test_the_student_reads_what_a_tool_said(observation: dict[str, Any], text: str) -> None:
    assert tool_text(observation) == text


@pytest.mark.parametrize("shown", [shown_text, tool_text])
def test_the_student_reads_no_marker(shown: Callable[[dict[str, Any]], str]) -> None:
    marked = {"text": "no", **ErrorMarkers(error_kind="timeout", hint_template_key="k").model_dump()}
    assert shown(marked) == '{"text":"no"}'
    assert json.loads(shown({"severity": "high", "text": "no"})) == {"severity": "high", "text": "no"}
