"""Spans of time as text."""

from .parse import SpanInvalid, parse
from .show import show
from .units import SECONDS

__all__ = ["SECONDS", "SpanInvalid", "parse", "show"]
