"""Layered configuration with dotted keys."""

from .config import Config
from .errors import ConfigError, MissingKey, WrongType
from .layers import merged

__all__ = ["Config", "ConfigError", "MissingKey", "WrongType", "merged"]
