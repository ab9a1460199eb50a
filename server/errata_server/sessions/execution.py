"""Runs one request on one instance and makes its journal row, for the doors and for re-execution alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from errata_protocol.environment import Snapshot
from errata_protocol.errors import EnvironmentOutputInvalid

from ..environments.declarations import Declared
from ..environments.detection import marked_observation, marked_response
from ..environments.host import EnvHost
from ..journal.base import DeliveryRow
from ..runtime.rows import Admitted, mcp_row, observation_row
from ..runtime.runtime import Runtime
from .session import Request


class Executed(Struct, frozen=True):
    """What came of a request that ran; nothing of it is committed.

    Args:
        row: Its delivery.
        volatile_fields: What of its payload another run may give differently.
        rewards: What the environment credits the episode's deliveries with, by t, now that it is done.
    """

    row: DeliveryRow
    volatile_fields: tuple[str, ...]
    rewards: Mapping[int, float] = field(default_factory=dict)


class Execution:
    """Runs requests of one environment.

    Args:
        runtime: Whose step deadline holds.
        declared: What is declared of the environment.
    """

    def __init__(self, runtime: Runtime, declared: Declared) -> None:
        self._runtime = runtime
        self._declared = declared

    async def run(self, host: EnvHost, admitted: Admitted, request: Request) -> Executed:
        """Run ``request`` and take the snapshot that follows it.

        Raises:
            EnvironmentFailed: The environment raised.
            EnvironmentOutputInvalid: What it returned cannot be kept.
            StepTimeout: The deadline passed.
        """
        timeout_s = self.timeout_s(request)
        judged = host.credit.judged()
        if request.timeout_s is not None:
            timeout_s = min(timeout_s, request.timeout_s)
        if request.kind == "mcp":
            assert request.call is not None
            response = await host.scoped(request.call, timeout_s=timeout_s)
            host.credit.delivered(admitted.t, judged, reset=False)
            snapshot = await host.snapshot()
            response, detection = marked_response(response, admitted.request, admitted.t, self._declared.detect)
            volatile = self._declared.volatile_fields()
            return Executed(mcp_row(admitted, response, snapshot, volatile, detection), volatile)
        if request.kind == "reset":
            observation = await host.reset(request.reset, timeout_s=timeout_s)
        else:
            assert request.action is not None
            observation = await host.step(request.action, timeout_s=timeout_s)
        host.credit.delivered(admitted.t, judged, reset=request.kind == "reset")
        done = bool(getattr(observation, "done", False))
        rewards = await host.step_rewards(admitted.t, timeout_s=timeout_s) if done else {}
        snapshot = await host.snapshot()
        row = self.row(admitted, request, observation, snapshot)
        return Executed(row, self._declared.volatile_fields(observation), rewards)

    def timeout_s(self, request: Request) -> float:
        """Return the server's deadline of a request."""
        timeout_s = self._runtime.settings.step_timeout_s
        if request.action is None or not self._declared.call_timeouts_s:
            return timeout_s
        return self._declared.timeout_s(request.action, timeout_s)

    def row(self, admitted: Admitted, request: Request, observation: Any, snapshot: Snapshot | None) -> DeliveryRow:
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
