"""The members of a server that is several processes: where each is, whether it serves, and when that changes."""

from .endpoint import Endpoint
from .fleet import Fleet
from .source import Source

__all__ = ["Endpoint", "Fleet", "Source"]
