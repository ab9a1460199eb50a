"""What a teacher reads before a failing turn."""

from .hint import FailedTurn, Hint, Hinter
from .leaks import leaks, secrets_of
from .neutral import approximate_tokens, neutral
from .pack import HintPack, TemplateHinter, key_of
from .rendering import ChatTokenizer, HintRenderer
from .slots import SLOTS, slots_of

__all__ = [
    "SLOTS",
    "ChatTokenizer",
    "FailedTurn",
    "Hint",
    "HintPack",
    "HintRenderer",
    "Hinter",
    "TemplateHinter",
    "approximate_tokens",
    "key_of",
    "leaks",
    "neutral",
    "secrets_of",
    "slots_of",
]
