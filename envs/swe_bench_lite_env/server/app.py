"""The environment as an application of its own: ``uvicorn swe_bench_lite_env.server.app:app``."""

from __future__ import annotations

from errata_environment.application import application, serve

# By full name: openenv.yaml's ``server.app:app`` is also loaded from inside the package's directory.
from swe_bench_lite_env.models import SweState
from swe_bench_lite_env.server.environment import SweBenchLiteEnvironment
from swe_bench_lite_env.spec import SPEC

app = application(SweBenchLiteEnvironment, SPEC, SweState)


def main() -> None:
    """Serve on one port; ``errata serve swe_bench_lite`` has more options."""
    serve(app, main.__doc__)


if __name__ == "__main__":
    main()
