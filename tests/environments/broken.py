"""A module that cannot be imported because of another."""

from . import broken_inside  # noqa: F401
