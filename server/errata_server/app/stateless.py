"""Upstream's stateless HTTP calls: each runs on an environment instance of its own, without a session or journal rows.

Upstream calls the factory on the event loop and other methods on any thread. Here all calls of an instance run in its
place, off the event loop where they may block, and `current_session` works in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Body, FastAPI
from fastapi.exceptions import RequestValidationError
from openenv.core.env_server.serialization import serialize_observation
from openenv.core.env_server.types import (
    Action,
    EnvironmentMetadata,
    Observation,
    ResetRequest,
    ResetResponse,
    State,
    StepRequest,
    StepResponse,
)
from pydantic import BaseModel, TypeAdapter, ValidationError

from errata_protocol.errors import EnvironmentFailed, EnvironmentOutputInvalid, ErrataError, InvalidRequest
from errata_protocol.exception_text import text_of
from errata_protocol.mux import injected_fork

from ..concurrency.containment import calling
from ..concurrency.procedures import run
from ..environments.host import EnvHost
from ..runtime.rows import encode_output
from ..sessions.decoding import step_request
from ..sessions.sessions import Sessions
from .upstream_routes import replace_endpoint

M = TypeVar("M", bound=BaseModel)


def replace(app: FastAPI, sessions: Sessions, action_cls: type[Action], *, simulation: bool) -> None:
    """Replace the endpoints of upstream's ``/metadata`` and, in simulation mode, ``/reset``, ``/step`` and ``/state``.

    Args:
        app: Application with upstream's routes registered.
        sessions: Provides an instance for each call.
        action_cls: Action class that steps are validated against.
        simulation: Whether the application runs in simulation mode.
    """
    timeout_s = sessions.runtime.settings.step_timeout_s

    async def called(host: EnvHost, function: Callable[[], Any]) -> Any:
        try:
            return await host.run_in_place(function, timeout_s=timeout_s)
        except ErrataError:
            raise
        except Exception as error:
            raise EnvironmentFailed(text_of(error)) from error

    async def metadata() -> EnvironmentMetadata:
        async with sessions.borrowed() as host:
            found = await called(host, lambda: host.env.get_metadata())
            return _carried(found, EnvironmentMetadata)

    replace_endpoint(app, "/metadata", "GET", metadata)
    if not simulation:
        return

    async def reset(request: ResetRequest = Body(default_factory=ResetRequest)) -> ResetResponse:  # noqa: B008
        if injected_fork(request.model_dump(exclude_unset=True)) is not None:
            raise InvalidRequest(
                "injected_state {episode_id, t} continues an episode, and POST /reset has no session that could: send "
                "it on /ws, or POST /episodes/{eid}/fork"
            )
        async with sessions.borrowed() as host:
            given = request.model_dump(exclude_unset=True)
            observation = await run(host.reset(given, timeout_s=timeout_s))
            return _carried(observation, ResetResponse)

    async def step(request: StepRequest) -> StepResponse:
        try:
            action = step_request(request.action, action_cls).action
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_context=False)) from error
        assert action is not None
        async with sessions.borrowed() as host:
            given = request.model_dump(exclude_unset=True, exclude={"action"})
            observation = await run(host.step(action, given, timeout_s=timeout_s))
            return _carried(observation, StepResponse)

    async def state() -> State:
        async with sessions.borrowed() as host:
            found = await called(host, lambda: host.env.state)
            return _carried(found, State)

    replace_endpoint(app, "/reset", "POST", reset)
    replace_endpoint(app, "/step", "POST", step)
    replace_endpoint(app, "/state", "GET", state)


def _carried(returned: Any, response: type[M]) -> M:
    """Return what an environment returned as a response of plain JSON values, which FastAPI can always encode.

    Raises:
        EnvironmentOutputInvalid: It has no JSON form, or is something else.
    """
    try:
        return calling(_as_response, returned, response)
    except EnvironmentOutputInvalid:
        raise
    except Exception as error:
        raise EnvironmentOutputInvalid(f"the environment returned no {response.__name__}: {text_of(error)}") from error


def _as_response(returned: Any, response: type[M]) -> M:
    if isinstance(returned, Observation):
        fields = serialize_observation(returned)
    else:  # as upstream, without the fields of a subclass
        fields = TypeAdapter(response).dump_python(response.model_validate(returned))
    return response(**json.loads(encode_output(fields)))
