"""A table of routes and what they answer."""

from .messages import Request, Response
from .route import Route, RouteInvalid
from .table import RouteTable

__all__ = ["Request", "Response", "Route", "RouteInvalid", "RouteTable"]
