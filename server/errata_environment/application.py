"""An environment as an application of its own, as OpenEnv's tools and ``uvicorn PACKAGE.server.app:app`` load it."""

from __future__ import annotations

import argparse
from typing import Any

from fastapi import FastAPI
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

from errata_protocol.environment import EnvironmentSpec
from errata_server.app import create_app


def application(environment: type[Environment[Any, Any, Any]], spec: EnvironmentSpec, state: type[State]) -> FastAPI:
    """Return the application that serves one environment.

    Args:
        environment: The environment's class.
        spec: Spec that the environment publishes.
        state: The environment's class of states.
    """
    return create_app(
        environment,
        spec.action_cls,
        spec.observation_cls,
        env_name=spec.name,
        max_concurrent_envs=1000,
        state_cls=state,
        spec=spec,
    )


def serve(app: FastAPI, description: str | None) -> None:
    """Serve an application on one port, as the command line says.

    Args:
        app: The application.
        description: Text for ``--help``.
    """
    import uvicorn

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    uvicorn.run(app, host=arguments.host, port=arguments.port)
