"""The environment as an application of its own: ``uvicorn swe_bench_lite_env.server.app:app``."""

from __future__ import annotations

import argparse

from errata_server.app import create_app

# By full name: openenv.yaml's ``server.app:app`` is also loaded from inside the package's directory.
from swe_bench_lite_env.models import SweAction, SweObservation, SweState
from swe_bench_lite_env.server.environment import SweBenchLiteEnvironment
from swe_bench_lite_env.spec import SPEC

app = create_app(
    SweBenchLiteEnvironment,
    SweAction,
    SweObservation,
    env_name="swe_bench_lite",
    max_concurrent_envs=1000,
    state_cls=SweState,
    spec=SPEC,
)


def main() -> None:
    """Serve on one port; ``errata serve swe_bench_lite`` has more options."""
    import uvicorn

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    uvicorn.run(app, host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
