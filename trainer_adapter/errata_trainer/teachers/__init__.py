"""Other models that are asked what they would have done at a state, and the votes they make."""

from .actions import Action, ActionKeys, KeyedAction, ToolCall, Unusable
from .shell import canonical_shell
from .votes import Pair, Vote, vote

__all__ = [
    "Action",
    "ActionKeys",
    "KeyedAction",
    "Pair",
    "ToolCall",
    "Unusable",
    "Vote",
    "canonical_shell",
    "vote",
]
