"""FastAPI applications of environments: created by `create_app`, adopted from OpenEnv, or several under one root.

`server.HTTPEnvServer` connects runtime, sessions and doors. Client protocols belong to `doors`, and running a server
process to `serve`.
"""

from . import openenv_import  # noqa: F401 # before any other module imports OpenEnv
from .factory import create_app, create_fastapi_app
from .server import HTTPEnvServer

__all__ = ["HTTPEnvServer", "create_app", "create_fastapi_app"]
