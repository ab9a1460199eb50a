"""Runs one request on one instance: chooses its deadline, calls the environment, adds error markers, takes the
snapshot, and builds the journal row. For delivery and for re-execution."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from errata_protocol.environment import Snapshot
from errata_protocol.errors import EnvironmentOutputInvalid, ErrataError
from errata_protocol.exception_text import named_text_of

from ..concurrency.procedures import Procedure
from ..environments.declarations import Declared
from ..environments.detecting import detecting
from ..environments.detection import marked_observation, marked_response
from ..environments.host import EnvHost
from ..journal.base import DeliveryRow
from ..runtime.rows import Admitted, mcp_row, observation_row
from ..runtime.runtime import Runtime
from .session import Request

_NO_REWARDS: Mapping[int, float] = MappingProxyType({})


class Executed(Struct, frozen=True, gc=False):
    """The outcome of a request, before its commit.

    Args:
        row: The delivery. ``row.volatile`` names the fields that may differ in another run.
        rewards: If the episode is done, the step rewards that the environment computed, by t.
    """

    row: DeliveryRow
    rewards: Mapping[int, float] = _NO_REWARDS


class Execution:
    """Runs requests of one environment.

    Args:
        runtime: Source of the step deadline.
        declared: Declarations about the environment.
    """

    def __init__(self, runtime: Runtime, declared: Declared) -> None:
        self._runtime = runtime
        self._declared = declared

    def run(self, host: EnvHost, admitted: Admitted, request: Request) -> Procedure[Executed]:
        """Run ``request``, then take a snapshot if the recovery class needs one.

        Args:
            host: The instance to run it on.
            admitted: The request's ids and position, for the journal row.
            request: The request.

        Raises:
            EnvironmentFailed: The environment raised.
            EnvironmentOutputInvalid: The environment returned something that is no observation, or cannot be encoded.
            CallNotRun: No thread was free before the deadline; the request did not run.
            StepTimeout: The deadline passed; the instance may be ahead of the journal.
        """
        timeout_s = self._runtime.settings.step_timeout_s
        if request.timeout_s is not None or self._declared.call_timeouts_s:
            timeout_s = self._timeout_s(request, timeout_s)
        judged = host.credit.judged() if host.rates_steps else None
        if request.action is not None:
            step = host.step_call(request.action, timeout_s=timeout_s)
            try:
                outcome = yield step
            except Exception as error:
                raise (yield from host.step_failure(step, error, timeout_s))  # noqa: B904 - it names its cause
            if host.steps_in_thread and inspect.isawaitable(outcome):
                outcome = yield from host.awaited(outcome, timeout_s)
        elif request.call is not None:
            outcome = yield host.scoped(request.call, timeout_s=timeout_s)
        else:
            outcome = yield from host.reset(request.reset, timeout_s=timeout_s)
        rewards = _NO_REWARDS
        if host.rates_steps:
            host.credit.delivered(admitted.t, judged, reset=request.kind == "reset")
            if request.call is None and getattr(outcome, "done", False):
                rewards = yield from host.step_rewards(admitted.t, timeout_s=timeout_s)
        snapshot = (yield from host.snapshot()) if host.recovery.takes_snapshots else None
        if request.call is not None:
            return Executed((yield from self._mcp_row(host, admitted, outcome, snapshot)))
        try:
            if request.action is not None and self._declared.detect is not None:
                marking = marked_observation(outcome, request.action, admitted.t, self._declared.detect)
                outcome = yield from detecting(marking, host.share)
            row = observation_row(admitted, outcome, snapshot, self._declared.volatile_fields(outcome))
        except (ErrataError, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # the result is not an observation: using it may raise anything
            raise EnvironmentOutputInvalid(
                f"{request.kind} returned something that is no observation: {named_text_of(error)}"
            ) from error
        return Executed(row, rewards)

    def _timeout_s(self, request: Request, timeout_s: float) -> float:
        """Return the deadline of a request in seconds: the server's ``timeout_s``, or a shorter one of its own."""
        if request.action is not None and self._declared.call_timeouts_s:
            timeout_s = self._declared.timeout_s(request.action, timeout_s)
        if request.timeout_s is not None and request.timeout_s < timeout_s:
            return request.timeout_s
        return timeout_s

    def _mcp_row(
        self, host: EnvHost, admitted: Admitted, response: dict[str, Any], snapshot: Snapshot | None
    ) -> Procedure[DeliveryRow]:
        marking = marked_response(response, admitted.request, admitted.t, self._declared.detect)
        response, detection = yield from detecting(marking, host.share)
        return mcp_row(admitted, response, snapshot, self._declared.volatile_fields(), detection)
