"""Errata's OpenEnv server, in place of ``openenv.core.env_server``, with markers, state(t), fork and recovery."""

from .environments.context import SessionContext, current_session
from .settings import Settings

__all__ = [
    "HTTPEnvServer",
    "SessionContext",
    "Settings",
    "adopt",
    "create_app",
    "create_fastapi_app",
    "current_session",
]


def __getattr__(name: str) -> object:
    """Import the server at first use: an environment that only needs `current_session` does not load FastAPI."""
    if name in ("HTTPEnvServer", "create_app", "create_fastapi_app"):
        from . import app

        return getattr(app, name)
    if name == "adopt":
        from .app.adoption import adopt

        return adopt
    raise AttributeError(f"module 'errata_server' has no attribute {name!r}")
