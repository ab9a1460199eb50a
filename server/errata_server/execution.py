"""One request on one instance, and the row of what came of it: the same for a door and for re-execution."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from errata_protocol.errors import EnvironmentOutputInvalid

from .declared import Declared
from .delivery import Admitted, mcp_row, observation_row
from .detecting import marked_observation, marked_response
from .hosting import EnvHost
from .journal.base import DeliveryRow
from .runtime import Runtime
from .session import Request


@dataclass(frozen=True, slots=True)
class Executed:
    """The row of a request that ran, not committed, and what of its payload another run may give differently."""

    row: DeliveryRow
    volatile_fields: Collection[str]


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
        timeout_s = self._runtime.settings.step_timeout_s
        if request.kind == "mcp":
            assert request.call is not None
            response = await host.scoped(request.call, timeout_s=timeout_s)
            snapshot = await host.snapshot()
            response, detection = marked_response(response, admitted.request, admitted.t, self._declared.detect)
            volatile = self._declared.volatile_fields()
            return Executed(mcp_row(admitted, response, snapshot, volatile, detection), volatile)
        if request.kind == "reset":
            observation = await host.reset(request.reset, timeout_s=timeout_s)
        else:
            assert request.action is not None
            observation = await host.step(request.action, timeout_s=timeout_s)
        snapshot = await host.snapshot()
        try:
            if request.action is not None and self._declared.detect is not None:
                observation = marked_observation(observation, request.action, admitted.t, self._declared.detect)
            volatile = self._declared.volatile_fields(observation)
            return Executed(observation_row(admitted, observation, snapshot, volatile), volatile)
        except EnvironmentOutputInvalid:
            raise
        except Exception as error:  # what it returned is not an observation, in one of many ways
            raise EnvironmentOutputInvalid(
                f"{request.kind} returned something that is no observation: {type(error).__name__}: {error}"
            ) from error
