"""FastAPI applications of environments: made by `create_app`, adopted, or several behind one address.

`server.HTTPEnvServer` puts runtime, sessions and doors together. No protocol of a client belongs here (`doors`), and no
process (`serve`).
"""

from .factory import create_app, create_fastapi_app
from .server import HTTPEnvServer

__all__ = ["HTTPEnvServer", "create_app", "create_fastapi_app"]
