"""The order of steps that need each other."""

from .errors import Cycle, StepError, UnknownStep
from .graph import Graph
from .order import order
from .waves import waves

__all__ = ["Cycle", "Graph", "StepError", "UnknownStep", "order", "waves"]
