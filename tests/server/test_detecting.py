"""Markers of environments that know nothing of markers: `--detect`, and the results of MCP tools (PROTOCOL B2)."""

from __future__ import annotations

import asyncio
import importlib
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fastapi.testclient import TestClient
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import BaseModel, Field

from errata_protocol.error_info import KEY
from errata_protocol.errors import InvalidRequest, ServiceError
from errata_protocol.markers import NOTHING_WRONG
from errata_server.app import create_app, create_fastapi_app
from errata_server.concurrency.procedures import run
from errata_server.concurrency.slots import NO_SHARE, Share
from errata_server.environments import detecting as detecting_module
from errata_server.environments import detection
from errata_server.environments.detecting import INLINE_CHARACTERS, detecting
from errata_server.environments.detection import META_KEY, FieldMap, Marking
from errata_server.process import ServerProcess
from errata_server.serve.server import Bind, build
from errata_server.settings import Settings
from errata_server.workers import WORKERS, Budget, BudgetExceeded, WorkerFailed

from ..openenv_source import ENVIRONMENTS, needs_openenv_source
from .conftest import Socket, connect
from .environments import CountAction, CountEnvironment, CountObservation
from .repeatable import ToolEnvironment

T = TypeVar("T")


def read(marking: Marking[T]) -> T:
    """Return the result of a marking of turns that are short enough to be read at once."""
    return asyncio.run(run(detecting(marking, NO_SHARE)))


def read_here(marking: Marking[T]) -> T:
    """Return the result of a marking that waits for nothing, without an event loop that a long turn would hold up."""
    procedure = detecting(marking, NO_SHARE)
    with pytest.raises(StopIteration) as ended:
        next(procedure)
    result: T = ended.value.value
    return result


def marked_observation(*arguments: Any) -> Any:
    return read(detection.marked_observation(*arguments))


def marked_response(*arguments: Any) -> Any:
    return read(detection.marked_response(*arguments))


MAP = "stdout=out,stderr=result.err,exit_code=result.status,command=code"


class CodeAction(Action):
    code: str
    inner: dict[str, str] = Field(default_factory=dict)


class Result(BaseModel):
    err: str = ""
    status: int | None = 0


class CodeObservation(Observation):
    out: str = ""
    result: Result | None = None
    anything: Any = None


class CodeEnvironment(Environment[CodeAction, CodeObservation, State]):
    """Foreign: knows commands that fail, and nothing of markers."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CodeObservation:
        return CodeObservation(result=Result(err="bash: line 1: foo: command not found", status=127))

    def step(self, action: CodeAction, timeout_s: float | None = None, **_: Any) -> CodeObservation:
        if not action.code.startswith("cat"):
            return CodeObservation(result=Result(), reward=1.0, metadata={"unit": "s"})
        name = action.code.split()[-1]
        return CodeObservation(
            result=Result(err=f"cat: {name}: No such file or directory\n", status=1), reward=0.0, metadata={"unit": "s"}
        )

    @property
    def state(self) -> State:
        return State(episode_id="code", step_count=0)


def fields(text: str = MAP) -> FieldMap:
    return FieldMap.parse(text, CodeAction, CodeObservation)


def failing(**more: Any) -> CodeObservation:
    result = Result(err="cat: nofile: No such file or directory\n", status=1)
    return CodeObservation(result=result, **more)


ACTION = CodeAction(code="cat nofile")


# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_failing_step_of_a_foreign_environment_is_marked_in_its_metadata_and_in_the_journal() -> None:
    app = create_app(CodeEnvironment, CodeAction, CodeObservation, max_concurrent_envs=2, detect=MAP)
    with TestClient(app) as client, connect(client) as socket:
        first = socket.ask("reset", {})
        assert "metadata" not in first["data"]  # a reset is no turn of an agent
        assert socket.ask("step", {"code": "ls"})["data"]["metadata"] == {"unit": "s"}
        marked = socket.ask("step", {"code": "cat -n nofile"})["data"]
        assert set(marked["observation"]) == {"out", "result", "anything", "metadata"}
        assert marked["metadata"] == marked["observation"]["metadata"]
        markers = marked["metadata"]
        assert (markers["unit"], markers["error_kind"], markers["severity"]) == ("s", "path_not_found", "error")
        assert markers["hint_template_key"] == "fs.missing"
        assert markers["error_site"] == markers["error_sites"][0]
        site = markers["error_site"]
        assert (site["t"], site["action_field"], site["action_span"]) == (2, "code", [7, 13])
        told = {"kind": "path_not_found", "sites": [{"action_field": "code", "action_span": [7, 13]}]}
        assert markers[KEY] == {**told, "message": site["message"]}
        CodeObservation(**marked["observation"])  # a typed client reads it
        detail = client.get(f"/episodes/{first['eid']}").json()
        assert detail["error_kinds"] == {"path_not_found": 1}
        assert detail["turns"][2]["hint_template_key"] == "fs.missing"
        assert client.get("/episodes?error_kind=path_not_found").json()["episodes"][0]["eid"] == first["eid"]


def test_without_a_mapping_nothing_is_marked() -> None:
    app = create_app(CodeEnvironment, CodeAction, CodeObservation, max_concurrent_envs=2)
    with TestClient(app) as client, connect(client) as socket:
        socket.ask("reset", {})
        assert socket.ask("step", {"code": "cat nofile"})["data"]["metadata"] == {"unit": "s"}


def test_an_environment_with_markers_of_its_own_is_left_alone() -> None:
    with pytest.raises(InvalidRequest, match="CountObservation has markers of its own and would get no others"):
        create_fastapi_app(CountEnvironment, CountAction, CountObservation, detect="exit_code=n,stderr=text")
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation)
    with TestClient(app) as client, connect(client) as socket:
        socket.ask("reset", {})
        assert socket.ask("step", {"n": 5})["data"]["observation"]["error_kind"] is None
        marked = socket.ask("step", {"n": 5, "do": "mark"})["data"]["observation"]
        assert marked["error_kind"] == "nonzero_exit" and marked["error_site"]["action_field"] == "do"


def test_no_key_of_metadata_is_overwritten_and_the_observation_stays_as_it_was() -> None:
    own = failing(metadata={"error_kind": "mine"})
    assert marked_observation(own, ACTION, 3, fields()) is own
    before = failing(metadata={"severity": 7})
    after = marked_observation(before, ACTION, 3, fields())
    assert before.metadata == {"severity": 7}
    assert after.metadata["severity"] == 7 and after.metadata["error_kind"] == "path_not_found"


def test_an_environment_that_tells_its_errors_itself_is_left_alone_and_what_has_another_form_is_kept() -> None:
    own = failing(metadata={KEY: {"kind": "illegal_move"}})
    assert marked_observation(own, ACTION, 3, fields()) is own
    after = marked_observation(failing(metadata={KEY: "text"}), ACTION, 3, fields())
    assert after.metadata[KEY] == "text" and after.metadata["error_kind"] == "path_not_found"


def test_without_a_command_no_site_has_a_span_and_without_a_status_nothing_is_marked() -> None:
    marked = marked_observation(failing(), ACTION, 3, fields("stderr=result.err,exit_code=result.status"))
    assert marked.metadata["error_kind"] == "path_not_found"
    assert all(s["action_field"] is None and s["action_span"] is None for s in marked.metadata["error_sites"])
    for unknown in (CodeObservation(), CodeObservation(result=Result(err="cat: x: No such file", status=None))):
        assert marked_observation(unknown, ACTION, 3, fields()).metadata == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "exit_code=nope",
            r"CodeObservation has no field 'nope'; its fields are: anything, done, metadata, out, result",
        ),
        ("exit_code=result.nope", r"Result has no field 'nope'; its fields are: err, status"),
        ("exit_code=out.x", r"field 'out' of CodeObservation has no fields"),
        ("exit_code=result.status,command=cmd", r"CodeAction has no field 'cmd'; its fields are: code"),
        ("stdout=out", r"exit_code is missing"),
        ("exit_code", r"'exit_code' is none of these"),
        ("exit=out", r"'exit=out' is none of these"),
        ("exit_code=out,exit_code=out", r"exit_code stands there twice"),
        ("exit_code=result.status,error=out", r"not both exit_code and error"),
        ("success=out", r"field 'out' of CodeObservation is no success: .* never bool, .*is error=FIELD"),
        ("success=result", r"field 'result' of CodeObservation is no success"),
        ("success=result.status", r"field 'result.status' of CodeObservation is no success"),
        (
            "exit_code=done",
            r"field 'done' of CodeObservation is no exit_code: its values are never int or float or str",
        ),
    ],
)
def test_a_mapping_that_leads_nowhere_is_refused_at_the_start_with_the_fields_that_are_there(
    text: str, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        create_app(CodeEnvironment, CodeAction, CodeObservation, detect=text)


def test_a_path_may_lead_through_what_has_no_declared_fields() -> None:
    through = fields("exit_code=anything.deep.status,stderr=metadata.err,command=inner.cmd")
    seen = CodeObservation(anything={"deep": {"status": "2"}}, metadata={"err": "cat: a: No such file or directory"})
    marked = marked_observation(seen, CodeAction(code="", inner={"cmd": "cat a"}), 1, through)
    assert marked.metadata["error_kind"] == "path_not_found"
    assert marked.metadata["error_site"]["action_field"] == "inner.cmd"


def test_the_command_line_refuses_a_wrong_mapping_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ServiceError) as caught:
        ServerProcess("tests.server.test_detecting:CodeEnvironment", tmp_path, "--detect", "exit_code=nope")
    assert "its fields are: anything, done, metadata, out, result, reward" in str(caught.value)
    assert "Traceback" not in str(caught.value)


# -- MCP tools ---------------------------------------------------------------------------------------------------------


def call(socket: Socket, name: str, **arguments: Any) -> dict[str, Any]:
    params = {"name": name, "arguments": arguments}
    return dict(socket.ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}))


def test_the_result_of_a_tool_carries_its_markers_in_meta_and_in_the_journal() -> None:
    app = create_app(
        ToolEnvironment,
        CallToolAction,
        CallToolObservation,
        detect="exit_code=result.exit_code,stderr=result.stderr,command=tool_name",
    )
    with TestClient(app) as client, connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        assert META_KEY not in json.dumps(call(socket, "note", n=12))
        marked = call(socket, "note", n=13)
        markers = marked["data"]["result"]["_meta"][META_KEY]
        assert (marked["t"], markers["error_kind"]) == (2, "command_not_found")
        assert call(socket, "note", n=-1)["data"]["error"]["data"][META_KEY]["error_kind"] == "runtime_error"
        unknown = call(socket, "nope")["data"]["error"]["data"][META_KEY]
        assert unknown["error_kind"] == "tool_not_found"
        assert (unknown["error_site"]["action_field"], unknown["error_site"]["action_span"]) == ("name", [0, 4])
        assert unknown["error_site"]["t"] == 4
        kinds = client.get(f"/episodes/{eid}").json()["error_kinds"]
        assert kinds == {"command_not_found": 1, "runtime_error": 1, "tool_not_found": 1}


def asked(name: str = "run", **arguments: Any) -> bytes:
    return json.dumps({"method": "tools/call", "params": {"name": name, "arguments": arguments}}).encode()


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        ({"isError": True, "content": [{"type": "text", "text": "bash: foo: command not found"}]}, "command_not_found"),
        ({"is_error": True, "content": [{"type": "text", "text": "it is a pity"}]}, "runtime_error"),
        ({"isError": False, "content": [{"type": "text", "text": "bash: foo: command not found"}]}, None),
        ({"tool_name": "x", "error": {"error_type": "tool_not_found", "message": "no x"}}, "tool_not_found"),
        ({"tool_name": "x", "error": {"error_type": "invalid_args", "message": "n?"}}, "invalid_arguments"),
        ({"tool_name": "x", "error": {"error_type": "timeout", "message": "60 s"}}, "timeout"),
        ({"tool_name": "x", "error": {"error_type": "transport_error", "message": "broken pipe"}}, None),
        ({"isError": True, "_meta": {META_KEY: {"error_kind": "theirs"}}}, None),
    ],
)
def test_a_result_that_is_an_error_itself_is_marked_without_a_mapping(result: dict[str, Any], kind: str | None) -> None:
    response = {"jsonrpc": "2.0", "id": 1, "result": result}
    marked, detection = marked_response(response, asked(), 4, None)
    assert detection.error_kind == kind
    if kind is None:
        assert marked == response
    else:
        assert marked["result"]["_meta"][META_KEY]["error_kind"] == kind
        assert "_meta" not in result


def test_an_environment_without_tools_is_no_mistake_of_the_agent() -> None:
    response = {"jsonrpc": "2.0", "id": 1, "error": {"code": -32603, "message": "Environment does not support MCP"}}
    assert marked_response(response, asked(), 1, None)[0] == response


def test_a_json_text_is_read_where_a_tool_has_no_structured_result() -> None:
    text = json.dumps({"stderr": "cat: nofile: No such file or directory", "exit_code": 1})
    response = {"result": {"content": [{"type": "text", "text": text}]}}
    found = FieldMap(exit_code=("exit_code",), stderr=("stderr",), command=("cmd",))
    marked, _ = marked_response(response, asked(cmd="cat nofile"), 1, found)
    site = marked["result"]["_meta"][META_KEY]["error_site"]
    assert (site["action_field"], site["action_span"]) == ("cmd", [4, 10])


NOT_FOUND = [{"type": "text", "text": "bash: a: command not found"}]
MARKERS = {"error_kind", "hint_template_key", "error_site", "severity", "error_sites"}
TOOL = CallToolAction(tool_name="clone", arguments={"url": "x"})


def tool_fields(text: str = "error=error") -> FieldMap:
    return FieldMap.parse(text, CallToolAction, CallToolObservation)


@pytest.mark.parametrize(
    ("seen", "kind", "field"),
    [
        ({"error": {"error_type": "tool_not_found", "message": "no clone"}}, "tool_not_found", "tool_name"),
        ({"error": {"error_type": "invalid_args", "message": "n?"}}, "invalid_arguments", None),
        ({"error": {"error_type": "execution_error", "message": "git: no"}}, "runtime_error", None),
        (
            {"error": {"error_type": "execution_error", "message": "[Errno 2] No such file or directory: 'a'"}},
            "path_not_found",
            None,
        ),
        ({"error": {"error_type": "timeout", "message": "60 s"}}, "timeout", None),
        ({"error": {"error_type": "transport_error", "message": "broken pipe"}}, None, None),
        ({"result": {"isError": True, "content": NOT_FOUND}}, "command_not_found", None),
        ({"result": {"is_error": True, "content": []}}, "runtime_error", None),
        ({"result": {"is_error": False, "content": NOT_FOUND}}, None, None),
        ({"result": {"error": "a field of its own"}}, None, None),
        ({"result": 42}, None, None),
    ],
)
def test_a_step_whose_tool_failed_is_marked(seen: dict[str, Any], kind: str | None, field: str | None) -> None:
    observation = CallToolObservation(tool_name="clone", **seen)
    metadata = marked_observation(observation, TOOL, 3, tool_fields()).metadata
    assert metadata.get("error_kind") == kind
    if kind is not None:
        assert set(metadata) == {*MARKERS, KEY}
        assert all(site["t"] == 3 for site in metadata["error_sites"])
    if field:
        assert (metadata["error_site"]["action_field"], metadata["error_site"]["action_span"]) == (field, [0, 5])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("cat: nofile: No such file or directory", "path_not_found"),
        ({"message": "bash: a: command not found", "code": 127}, "command_not_found"),
        ({"error_type": "of its own", "message": "bash: a: command not found"}, "command_not_found"),
        ({"error_type": "IllegalMove", "message": "the square is taken"}, "runtime_error"),
        ({"error_type": "permission_denied", "message": "not yours"}, "permission_denied"),
        ({"error_type": "FileNotFoundError", "message": "a"}, "path_not_found"),
        ({"error_type": "ConnectionRefusedError", "message": "a"}, "runtime_error"),
        ({"error_type": "print", "message": "a"}, "runtime_error"),
        (True, "path_not_found"),
        ("", None),
        (None, None),
        (False, None),
    ],
)
def test_any_field_that_a_failure_sets_can_say_the_error(error: Any, kind: str | None) -> None:
    seen = CodeObservation(anything=error, out="cat: nofile: No such file or directory")
    marked = marked_observation(seen, ACTION, 1, fields("error=anything,stdout=out,command=code"))
    assert marked.metadata.get("error_kind") == kind
    assert marked.metadata.get("severity") == ("error" if kind else None), "it failed: the field says so"


def test_steps_and_calls_of_an_mcp_environment_are_marked_alike() -> None:
    app = create_app(ToolEnvironment, CallToolAction, CallToolObservation, detect="error=error")
    with TestClient(app) as client, connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        for name, arguments in (("nope", {}), ("note", {"n": -1})):
            step = {"type": "call_tool", "tool_name": name, "arguments": arguments}
            stepped = socket.ask("step", step)["data"]["observation"]["metadata"]
            answer = call(socket, name, **arguments)["data"]
            called = (answer["error"]["data"] if "error" in answer else answer["result"]["_meta"])[META_KEY]
            fields = ("error_kind", "severity", "hint_template_key")
            assert [stepped[field] for field in fields] == [called[field] for field in fields]
            assert stepped["severity"] == "error"
        assert client.get(f"/episodes/{eid}").json()["error_kinds"] == {"tool_not_found": 2, "runtime_error": 2}


def test_a_field_that_no_observation_has_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Anything(Observation, extra="allow"):
        pass

    misspelled = FieldMap.parse("exit_code=exitcode", CodeAction, Anything)
    for _ in range(2):
        assert marked_observation(Anything(exit_code=1), ACTION, 1, misspelled).metadata == {}
    assert caplog.text.count("had no field 'exitcode', so nothing is marked") == 1


CODE, IN_PLACE = (f"tests.server.test_detecting:{name}" for name in ("CodeEnvironment", "InProcessEnvironment"))
STATUS = "stderr=result.err,exit_code=result.status"


@pytest.mark.parametrize(
    ("targets", "given", "marked"),
    [
        ([CODE], [STATUS], {"CodeEnvironment"}),
        ([CODE], [f"CodeEnvironment:{STATUS}"], {"CodeEnvironment"}),
        ([CODE, IN_PLACE], ["InProcessEnvironment:error=stderr"], {"InProcessEnvironment"}),
        (
            [CODE, IN_PLACE],
            ["InProcessEnvironment:success=ok", f"CodeEnvironment:{STATUS}"],
            {"CodeEnvironment", "InProcessEnvironment"},
        ),
    ],
)
def test_each_target_has_a_mapping_of_its_own(
    targets: list[str], given: list[str], marked: set[str], tmp_path: Path
) -> None:
    served = build(targets, Settings(data_dir=tmp_path), bind=Bind(), mode=None, detect=given)
    found = set()
    with TestClient(served.app) as client:
        for spec in served.specs:
            with connect(client, f"ws://localhost/{spec.name}/ws") as socket:
                socket.ask("reset", {})
                if "error_kind" in socket.ask("step", {"code": "cat nofile"})["data"].get("metadata", {}):
                    found.add(spec.name)
    asyncio.run(served.runtime.close())
    assert found == marked


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["exit_code=balance"],
            "say for which environment, NAME:FIELD=...; they are called CodeEnvironment, InPr",
        ),
        (["Ledger:exit_code=balance"], "they are called CodeEnvironment, InProcessEnvironment"),
        (["CodeEnvironment:error=out", "CodeEnvironment:stdout=out"], "twice for CodeEnvironment"),
    ],
)
def test_a_mapping_says_for_which_of_several_targets_it_is(given: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=message):
        build([CODE, IN_PLACE], Settings(data_dir=tmp_path), bind=Bind(), mode=None, detect=given)


def test_the_start_says_that_tools_of_steps_are_not_marked(tmp_path: Path) -> None:
    for given, said in ((None, True), ("error=error", False)):
        target = "tests.environments.toolbox:ToolboxEnvironment"
        served = build([target], Settings(data_dir=tmp_path), bind=Bind(), mode=None, detect=given)
        assert ("marked only with --detect error=error" in "\n".join(served.announcement("http://x"))) is said
        asyncio.run(served.runtime.close())


# -- commands that run in this process ---------------------------------------------------------------------------------


class InProcessObservation(Observation):
    stdout: str = ""
    stderr: str = ""
    ok: bool = True


class InProcessEnvironment(Environment[CodeAction, InProcessObservation, State]):
    """Foreign: executes the action's Python in the server, as coding_env and repl_env do."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> InProcessObservation:
        self._names: dict[str, Any] = {}
        return InProcessObservation()

    def step(self, action: CodeAction, timeout_s: float | None = None, **_: Any) -> InProcessObservation:
        try:
            if "import" in action.code:
                raise RuntimeError("Import of os is not allowed")
            exec(action.code, self._names)
        except Exception:
            return InProcessObservation(stderr=traceback.format_exc(), ok=False)
        return InProcessObservation()

    @property
    def state(self) -> State:
        return State(episode_id="in-process", step_count=0)


IN_PROCESS = "stdout=stdout,stderr=stderr,success=ok,command=code"


@pytest.mark.parametrize(
    ("action", "kind", "span", "file"),
    [
        ("x = 3\n1/0\n", "runtime_error", (6, 9), "<string>"),
        ("undefined", "runtime_error", (0, 9), None),
        ("import os", "import_error", (7, 9), None),
        ("x = = 1", "syntax_error", (0, 7), "<string>"),
    ],
)
def test_a_frame_of_the_server_is_no_site_and_no_marker_names_a_path_of_it(
    action: str, kind: str, span: tuple[int, int], file: str | None
) -> None:
    app = create_app(InProcessEnvironment, CodeAction, InProcessObservation, detect=IN_PROCESS)
    with TestClient(app) as client, connect(client) as socket:
        socket.ask("reset", {})
        seen = socket.ask("step", {"code": action})["data"]
        assert __file__ in seen["observation"]["stderr"]  # the environment's own text stays as it is
        markers = seen["metadata"]
        assert markers["error_kind"] == kind
        site = markers["error_site"]
        assert (site["action_field"], tuple(site["action_span"]), site["file"]) == ("code", span, file)
        assert str(Path(__file__).parent) not in json.dumps(markers)


def test_success_may_stand_for_an_exit_status_and_has_to_be_a_boolean() -> None:
    mapped = FieldMap.parse(IN_PROCESS, CodeAction, InProcessObservation)
    assert (
        read(mapped.detection(InProcessObservation(stderr="KeyError: 'k'", ok=False), ACTION)).error_kind
        == "runtime_error"
    )
    assert read(mapped.detection(InProcessObservation(stderr="KeyError: 'k'"), ACTION)).error_kind is None
    assert read(mapped.detection({"stderr": "KeyError: 'k'", "ok": "no"}, ACTION)).error_kind is None
    with pytest.raises(InvalidRequest, match="and not both"):
        FieldMap.parse("exit_code=stdout,success=ok", CodeAction, InProcessObservation)


def test_the_message_of_a_failed_tool_names_no_path_of_the_server() -> None:
    text = f"[Errno 2] No such file or directory: '{Path(__file__).parent}/prices.json'"
    marked, _ = marked_response(
        {"result": {"isError": True, "content": [{"type": "text", "text": text}]}}, asked(), 1, None
    )
    result = marked["result"]
    assert result["content"][0]["text"] == text
    told = json.dumps(result["_meta"])
    assert ".../prices.json" in told and str(Path(__file__).parent) not in told


@pytest.mark.parametrize("length", [INLINE_CHARACTERS // 2, 40 * INLINE_CHARACTERS])
def test_a_long_turn_is_read_elsewhere_with_the_same_result(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also which files are the server's: a worker process has loaded others."""
    noise = "# of no interest\n" * (length // 17)
    trace = f"{noise}Traceback (most recent call last):\n  File \"{__file__}\", line 3, in step\nKeyError: 'k'\n"
    seen = CodeObservation(out=noise, result=Result(err=trace, status=1))
    marked = marked_observation(seen, CodeAction(code="python3 run.py"), 1, fields())
    calls = []
    monkeypatch.setattr(detecting_module, "INLINE_CHARACTERS", 10**9)
    monkeypatch.setattr(detecting_module, "call_in_worker", lambda *_, **__: calls.append(1))
    here = read_here(detection.marked_observation(seen, CodeAction(code="python3 run.py"), 1, fields()))
    assert marked == here and not calls
    assert marked.metadata["error_kind"] == "runtime_error" and __file__ not in json.dumps(marked.metadata)


# -- turns that are read in a worker process ---------------------------------------------------------------------------


class LongEnvironment(CodeEnvironment):
    def step(self, action: CodeAction, timeout_s: float | None = None, **_: Any) -> CodeObservation:
        return failing(out="x" * (2 * INLINE_CHARACTERS))


def played(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], sessions: int = 1) -> list[dict[str, Any]]:
    """Return the replies to a step of each session, where workers are called as `call` does it."""
    monkeypatch.setattr(WORKERS, "call", call)
    app = create_app(LongEnvironment, CodeAction, CodeObservation, max_concurrent_envs=sessions, detect=MAP)
    replies = []
    with TestClient(app) as client:
        for _ in range(sessions):
            with connect(client) as socket:
                socket.ask("reset", {})
                replies.append(json.loads(socket.raw(json.dumps({"type": "step", "data": {"code": "cat nofile"}}))))
    return replies


def test_a_machine_that_fails_while_a_turn_is_read_is_no_observation_and_no_error_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def call(*_: Any, **__: Any) -> Any:
        raise WorkerFailed("no worker process can be started")

    (reply,) = played(monkeypatch, call)
    assert (reply["type"], reply["data"]["code"]) == ("error", WorkerFailed.code)


def test_a_turn_beyond_the_detectors_budget_is_delivered_without_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(what: str, *_: Any, budget: Budget, **__: Any) -> Any:
        raise BudgetExceeded(what, "time", budget)

    (reply,) = played(monkeypatch, call)
    assert reply["type"] == "observation" and "metadata" not in reply["data"], reply


def test_turns_are_read_in_the_shares_of_their_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []

    async def call(*_: Any, share: Share, **__: Any) -> Any:
        shares.append(share)
        return NOTHING_WRONG

    played(monkeypatch, call, sessions=2)
    (principal, first), (same, second) = shares
    assert principal == same and first != second and first and second


@pytest.mark.upstream_envs  # smolagents is in the environment of that suite
@needs_openenv_source
@pytest.mark.parametrize("name", ["coding_env", "repl_env"])
def test_openenvs_own_python_environments_get_the_place_in_the_action(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    models = importlib.import_module(f"{name}.models")
    if name == "coding_env":
        environment = importlib.import_module("coding_env.server.python_codeact_env").PythonCodeActEnv
        classes, mapping = (
            (models.CodeAction, models.CodeObservation),
            "stdout=stdout,stderr=stderr,exit_code=exit_code",
        )
    else:
        environment = importlib.import_module("repl_env.server.repl_environment").REPLEnvironment
        classes = (models.REPLAction, models.REPLObservation)
        mapping = "stdout=result.stdout,stderr=result.stderr,success=result.success"
    app = create_app(environment, *classes, detect=f"{mapping},command=code")
    with TestClient(app) as client, connect(client) as socket:
        socket.ask("reset", {})
        for action, kind, failing in (
            ("x = 1\n1/0", "runtime_error", "1/0"),
            ("import os", "import_error", "import os"),
            ("undefined", "runtime_error", "undefined"),
            ("x = = 1", "syntax_error", "x = = 1"),
        ):
            seen = socket.ask("step", {"code": action})["data"]
            markers = seen.get("metadata") or seen["observation"]["metadata"]
            assert markers["error_kind"] == kind
            assert action[slice(*markers["error_site"]["action_span"])] == failing
            told = json.dumps(markers["error_sites"])
            assert (
                markers["error_site"]["file"] is None and str(ENVIRONMENTS) not in told and "site-packages" not in told
            )
        clean = socket.ask("step", {"code": "x = 2"})["data"]
        assert "error_kind" not in (clean.get("metadata") or clean["observation"].get("metadata") or {})
