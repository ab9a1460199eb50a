"""Upstream's stateless HTTP calls, each on an instance of its own: no session, no delivery, nothing journaled.

Upstream calls the factory on the event loop and the rest on any thread; here an instance lives in one place, has its
`current_session`, and blocks nobody.
"""

from __future__ import annotations

from fastapi import Body, FastAPI
from fastapi.exceptions import RequestValidationError
from openenv.core.env_server.serialization import serialize_observation
from openenv.core.env_server.types import (
    Action,
    EnvironmentMetadata,
    ResetRequest,
    ResetResponse,
    State,
    StepRequest,
    StepResponse,
)
from pydantic import ValidationError

from errata_protocol.errors import InvalidRequest
from errata_protocol.mux import injected_fork

from ..concurrency.procedures import run
from ..sessions.decoding import step_request
from ..sessions.sessions import Sessions
from .upstream_routes import answer_from


def replace(app: FastAPI, sessions: Sessions, action_cls: type[Action], *, simulation: bool) -> None:
    """Answer upstream's ``/metadata`` and, in simulation mode, ``/reset``, ``/step`` and ``/state``.

    Args:
        app: With upstream's routes registered.
        sessions: Lends the instances.
        action_cls: Action class that steps are validated against.
        simulation: The mode.
    """
    timeout_s = sessions.runtime.settings.step_timeout_s

    async def metadata() -> EnvironmentMetadata:
        async with sessions.borrowed() as host:
            found: EnvironmentMetadata = await host.run_in_place(host.env.get_metadata, timeout_s=timeout_s)
            return found

    answer_from(app, "/metadata", "GET", metadata)
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
            return ResetResponse(**serialize_observation(observation))

    async def step(request: StepRequest) -> StepResponse:
        try:
            action = step_request(request.action, action_cls).action
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_context=False)) from error
        assert action is not None
        async with sessions.borrowed() as host:
            given = request.model_dump(exclude_unset=True, exclude={"action"})
            observation = await run(host.step(action, given, timeout_s=timeout_s))
            return StepResponse(**serialize_observation(observation))

    async def state() -> State:
        async with sessions.borrowed() as host:
            found: State = await host.run_in_place(lambda: host.env.state, timeout_s=timeout_s)
            return found

    answer_from(app, "/reset", "POST", reset)
    answer_from(app, "/step", "POST", step)
    answer_from(app, "/state", "GET", state)
