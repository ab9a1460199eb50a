"""Sessions on bundled instances, as the tests of the environment begin them."""

from __future__ import annotations

from typing import Any

from swe_bench_lite_env import SweAction, SweObservation
from swe_bench_lite_env.dataset import Instance
from swe_bench_lite_env.server.environment import SweBenchLiteEnvironment
from swe_bench_lite_env.server.offered import bundled

NAME = "errata-examples__pagelist-1"
OTHER = "errata-examples__confkit-1"


def instance(name: str = NAME) -> Instance:
    """Return a bundled instance, with all that a client never sees."""
    found: Instance = bundled()[0].find(name)
    return found


async def begun(name: str = NAME, **more: Any) -> SweBenchLiteEnvironment:
    """Return an environment after a reset."""
    environment = SweBenchLiteEnvironment()
    await environment.reset_async(instance_id=name, **more)
    return environment


async def call(environment: SweBenchLiteEnvironment, tool: str, **arguments: Any) -> SweObservation:
    """Call a tool."""
    return await environment.step_async(SweAction(tool=tool, **arguments))
