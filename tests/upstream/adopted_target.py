"""Target of OpenEnv's own server tests: applications that OpenEnv builds, each adopted before it serves.

`suite_target` puts these names in place of OpenEnv's, so its own are captured first and put back while it builds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI
from openenv.core.env_server import http_server

from errata_server import adopt

_OWN = {name: getattr(http_server, name) for name in ("HTTPEnvServer", "create_app", "create_fastapi_app")}


@contextmanager
def _untouched() -> Iterator[None]:
    replaced = {name: getattr(http_server, name) for name in _OWN}
    vars(http_server).update(_OWN)
    try:
        yield
    finally:
        vars(http_server).update(replaced)


def _adopting(create: Callable[..., FastAPI]) -> Callable[..., FastAPI]:
    def created(*args: Any, **kwargs: Any) -> FastAPI:
        with _untouched():
            app = create(*args, **kwargs)
        return adopt(app)

    return created


create_app = _adopting(_OWN["create_app"])
create_fastapi_app = _adopting(_OWN["create_fastapi_app"])


class HTTPEnvServer(_OWN["HTTPEnvServer"]):  # type: ignore[misc,name-defined]
    """OpenEnv's server class, whose application is adopted when its routes are there."""

    def register_routes(self, app: FastAPI, mode: Any = http_server.ServerMode.SIMULATION) -> None:
        """Register OpenEnv's routes, then exchange those that hold sessions."""
        super().register_routes(app, mode)
        adopt(app)
