"""FastAPI applications, and the composition root: here doors, sessions and runtime are put together.

`create_app` and `create_fastapi_app` replace those of ``openenv.core.env_server``; `adoption` takes over an existing
application.
"""

from .factory import create_app, create_fastapi_app
from .server import HTTPEnvServer

__all__ = ["HTTPEnvServer", "create_app", "create_fastapi_app"]
