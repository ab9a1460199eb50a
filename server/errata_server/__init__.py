"""Errata's OpenEnv server: a drop-in for ``openenv.core.env_server`` with markers, state(t), fork and recovery."""

from .context import SessionContext, current_session

__all__ = ["SessionContext", "current_session"]
