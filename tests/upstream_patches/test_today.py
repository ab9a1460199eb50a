"""What proposal B of rfcs/proposals says that stock OpenEnv 0.10.0 does: a test for each sentence, by its name.

A sentence about today is followed by ``<!-- today: NAME -->``. ``tests/test_proposals.py`` looks for the function
``test_today_NAME`` here, in ``test_today_replies.py`` (the page, A and C) and in
``tests/upstream_envs/test_today_environments.py``, which has OpenEnv's environments.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from fastmcp import FastMCP
from openenv.core.client_types import StepResult
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    HTTPEnvServer,
    ListToolsAction,
    MCPEnvironment,
    Observation,
    State,
    ToolError,
    ToolErrorType,
)
from openenv.core.harness.environment import HarnessAction, HarnessEnvironment
from openenv.core.harness.events import HarnessResponse
from openenv.core.harness.rollout import StepEnvSessionAdapter, _serialize_for_message
from openenv.core.mcp_client import MCPToolClient
from pydantic import ValidationError

pytestmark = pytest.mark.upstream_patches


class WordAction(Action):
    """Say a word; ``no`` is refused."""

    word: str


class WordObservation(Observation):
    """How many words were said."""

    said: int = 0


class WordEnvironment(Environment[WordAction, WordObservation, State]):
    """Counts words."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> WordObservation:
        self._state = State(episode_id=episode_id)
        return WordObservation()

    def step(self, action: WordAction, timeout_s: float | None = None, **kwargs: Any) -> WordObservation:
        if action.word == "no":
            raise ValueError("the word is refused")
        self._state.step_count += 1
        return WordObservation(said=self._state.step_count, metadata={"word": action.word})

    @property
    def state(self) -> State:
        return self._state


class Tools(MCPEnvironment):
    """Has one tool, which fails."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tools")

        @server.tool
        def fail() -> str:
            raise ValueError("it failed")

        super().__init__(server)
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._state = State(episode_id=episode_id)
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return self._state


def app(environment: Any = WordEnvironment, action: Any = WordAction, observation: Any = WordObservation) -> FastAPI:
    """Return a stock application."""
    application = FastAPI()
    HTTPEnvServer(environment, action, observation, max_concurrent_envs=4).register_routes(application)
    return application


def asked(application: FastAPI, *messages: dict[str, Any]) -> list[Any]:
    """Return the replies to messages on one socket."""
    with TestClient(application).websocket_connect("/ws") as socket:
        replies = []
        for message in messages:
            socket.send_json(message)
            replies.append(socket.receive_json())
        return replies


def step(word: str) -> dict[str, Any]:
    return {"type": "step", "data": {"word": word}}


def test_this_is_stock_openenv() -> None:
    assert importlib.metadata.version("openenv") == "0.10.0"


def test_today_metadata_is_delivered_twice() -> None:
    (reply,) = asked(app(), step("one"))
    assert reply["data"]["metadata"] == reply["data"]["observation"]["metadata"] == {"word": "one"}


def test_today_an_exception_is_an_error_frame() -> None:
    first, refused, last = asked(app(), step("one"), step("no"), step("two"))
    assert refused == {"type": "error", "data": {"message": "the word is refused", "code": "EXECUTION_ERROR"}}
    assert last["data"]["observation"]["said"] == first["data"]["observation"]["said"] + 1


def test_today_undeclared_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="extra_forbidden"):
        WordObservation(error_info={})


def test_today_tool_errors_have_five_types_and_a_message() -> None:
    assert {one.value for one in ToolErrorType} == {
        "execution_error",
        "invalid_args",
        "transport_error",
        "tool_not_found",
        "timeout",
    }
    assert set(ToolError.model_fields) == {"error_type", "message"}
    assert "error" in CallToolObservation.model_fields
    assert "error" not in Observation.model_fields


def test_today_a_tool_error_may_be_the_machinerys() -> None:
    tools = Tools()

    async def late(name: str, arguments: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    tools._async_call_tool = late  # type: ignore[method-assign]
    slow = tools.step(CallToolAction(tool_name="fail", arguments={}), timeout_s=0)
    assert isinstance(slow, CallToolObservation) and slow.error is not None
    assert slow.error.error_type is ToolErrorType.TIMEOUT


def test_today_a_tool_that_raises_is_a_tool_error() -> None:
    tools = Tools()

    @tools.tool(mode="production")
    def divide() -> float:
        return 1 / 0

    raised = [tools.step(CallToolAction(tool_name="fail", arguments={}))]
    tools._mode = "production"
    raised.append(tools.step(CallToolAction(tool_name="divide", arguments={})))
    assert "NOT for errors returned\n    by the tool itself" in str(ToolError.__doc__)
    for one, message in zip(raised, ("Error calling tool 'fail': it failed", "division by zero"), strict=True):
        assert isinstance(one, CallToolObservation) and one.error is not None
        assert (one.error.error_type, one.error.message) == (ToolErrorType.EXECUTION_ERROR, message)


@pytest.mark.parametrize("error", [{"error_type": "syntax_error"}, {"error_type": "timeout", "site": 3}])
def test_today_clients_refuse_another_tool_error(error: dict[str, Any]) -> None:
    client = MCPToolClient(base_url="http://127.0.0.1:1")
    payload = {"observation": {"tool_name": "f", "error": {"message": "m", **error}}, "reward": None, "done": False}
    with pytest.raises(ValidationError):
        client._parse_result(payload)


def test_today_core_writes_errors_into_metadata() -> None:
    tools = Tools()
    assert tools.execute_code("x = = 1").metadata["error"].startswith("Syntax error: ")
    assert tools.execute_code("1 / 0").metadata == {"error": "division by zero"}

    async def down() -> list[Any]:
        raise ValueError("no tools")

    tools._async_list_tools = down  # type: ignore[method-assign]
    listed = tools.step(ListToolsAction()).metadata
    assert listed == {"error": "no tools", "error_type": "list_tools_failed"}

    harness = HarnessEnvironment.__new__(HarnessEnvironment)
    harness._trajectory, harness.transform = [], None  # type: ignore[assignment]

    async def nothing() -> None: ...

    harness._cleanup_episode = nothing  # type: ignore[method-assign]
    metadata = asyncio.run(harness._terminal_error_observation("it died", "harness_error")).metadata
    assert (metadata["error"], metadata["error_type"]) == ("it died", "harness_error")


def test_today_metadata_may_be_all_that_the_agent_is_shown() -> None:
    said = Tools().execute_code("result = 6 * 7")
    assert type(said) is Observation
    assert said.metadata == {"result": 42}

    async def alive() -> bool:
        return True

    async def send(message: str) -> HarnessResponse:
        return HarnessResponse(response=message.upper())

    harness = HarnessEnvironment.__new__(HarnessEnvironment)
    harness._trajectory, harness._episode_active, harness._state = [], True, State()
    harness.transform = harness.rubric = None  # type: ignore[assignment]
    harness.adapter = SimpleNamespace(is_alive=alive, send_message=send)  # type: ignore[assignment]
    turn = asyncio.run(harness.step_async(HarnessAction(message="yes"), timeout_s=5))
    assert type(turn) is Observation
    assert turn.metadata["response"] == "YES"


def test_today_the_web_interface_shows_an_error_of_metadata_alone() -> None:
    from openenv.core.env_server.gradio_ui import _result_html  # with gradio, whose import takes seconds

    shown = {"stdout": "one", "metadata": {"error": {"message": "it failed"}}}
    assert "it failed" in _result_html({"observation": shown}, 1)
    assert "stdout" not in _result_html({"observation": shown}, 1)
    assert "stdout" in _result_html({"observation": shown | {"metadata": {"error_info": {"kind": "k"}}}}, 1)


def test_today_an_mcp_result_has_no_observation() -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "fail", "arguments": {}}}
    (reply,) = asked(app(Tools, Action, Observation), {"type": "mcp", "data": call})
    text = json.dumps(reply)
    assert "it failed" in text
    assert "metadata" not in text
    assert "observation" not in text


def test_today_the_harness_adapter_shows_metadata_to_the_model() -> None:
    observation = WordObservation(metadata={"safety_violation": "import os"})
    client = SimpleNamespace(
        reset=lambda **kwargs: StepResult(observation), step=lambda action: StepResult(observation, reward=-1.0)
    )
    adapter = StepEnvSessionAdapter(
        client,
        tool_specs=[SimpleNamespace(name="say")],  # type: ignore[list-item]
        action_builder=lambda name, arguments: arguments,
        initial_messages_builder=lambda result, task: [],
    )
    message = _serialize_for_message(adapter.call_tool("say", {}).data)
    assert "safety_violation" in message
    assert '"reward": -1.0' in message
