"""Runs one request on one instance and makes its journal row, for the doors and for re-execution alike."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from errata_protocol.environment import Snapshot
from errata_protocol.errors import EnvironmentOutputInvalid

from ..concurrency.procedures import Procedure
from ..environments.declarations import Declared
from ..environments.detection import marked_observation, marked_response
from ..environments.host import EnvHost
from ..journal.base import DeliveryRow
from ..runtime.rows import Admitted, mcp_row, observation_row
from ..runtime.runtime import Runtime
from .session import Request

_NO_REWARDS: Mapping[int, float] = MappingProxyType({})


class Executed(Struct, frozen=True, gc=False):
    """The outcome of a request that ran; nothing of it is committed.

    Args:
        row: Its delivery. ``row.volatile`` names the fields that another run may give differently.
        rewards: What the environment credits the episode's deliveries with, by t, now that it is done.
    """

    row: DeliveryRow
    rewards: Mapping[int, float] = _NO_REWARDS


class Execution:
    """Runs requests of one environment.

    Args:
        runtime: Its step deadline applies.
        declared: What is declared of the environment.
    """

    def __init__(self, runtime: Runtime, declared: Declared) -> None:
        self._runtime = runtime
        self._declared = declared

    def run(self, host: EnvHost, admitted: Admitted, request: Request) -> Procedure[Executed]:
        """Run ``request`` and take the snapshot that follows it.

        Raises:
            EnvironmentFailed: The environment raised.
            EnvironmentOutputInvalid: What it returned cannot be kept.
            StepTimeout: The deadline passed.
        """
        timeout_s = self._timeout_s(request)
        judged = host.credit.judged() if host.rates_steps else None
        if request.action is not None:
            outcome = yield from host.step(request.action, timeout_s=timeout_s)
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
            return Executed(self._mcp_row(admitted, outcome, snapshot))
        return Executed(self._observation_row(admitted, request, outcome, snapshot), rewards)

    def _timeout_s(self, request: Request) -> float:
        """Return the deadline of a request: the server's, or the request's own where that is shorter."""
        timeout_s = self._runtime.settings.step_timeout_s
        if request.action is not None and self._declared.call_timeouts_s:
            timeout_s = self._declared.timeout_s(request.action, timeout_s)
        if request.timeout_s is not None and request.timeout_s < timeout_s:
            return request.timeout_s
        return timeout_s

    def _mcp_row(self, admitted: Admitted, response: dict[str, Any], snapshot: Snapshot | None) -> DeliveryRow:
        response, detection = marked_response(response, admitted.request, admitted.t, self._declared.detect)
        return mcp_row(admitted, response, snapshot, self._declared.volatile_fields(), detection)

    def _observation_row(
        self, admitted: Admitted, request: Request, observation: Any, snapshot: Snapshot | None
    ) -> DeliveryRow:
        """Return the row of what a reset or step returned.

        Raises:
            EnvironmentOutputInvalid: It cannot be kept.
        """
        try:
            if request.action is not None and self._declared.detect is not None:
                observation = marked_observation(observation, request.action, admitted.t, self._declared.detect)
            return observation_row(admitted, observation, snapshot, self._declared.volatile_fields(observation))
        except EnvironmentOutputInvalid:
            raise
        except Exception as error:  # what it returned is not an observation, in one of many ways
            raise EnvironmentOutputInvalid(
                f"{request.kind} returned something that is no observation: {type(error).__name__}: {error}"
            ) from error
