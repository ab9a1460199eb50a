"""Hints: text that the teacher of channel 2 reads before a failing turn.

`pack` fills the templates, TOML files in ``templates``; `feedback` shows the environment's output and sibling attempts;
`model` asks a model.
"""

from .asking import TeacherModel
from .feedback import FeedbackHinter
from .hint import Attempt, BatchHinter, FailedTurn, Hint, Hinter, write_hints
from .leaks import leaks, secrets_of
from .model import Complete, Completion, ModelHinter
from .neutral import approximate_tokens, neutral
from .pack import HintPack, TemplateHinter, key_of
from .rendering import ChatTokenizer, HintRenderer
from .slots import SLOTS, slots_of

__all__ = [
    "SLOTS",
    "Attempt",
    "BatchHinter",
    "ChatTokenizer",
    "Complete",
    "Completion",
    "FailedTurn",
    "FeedbackHinter",
    "Hint",
    "HintPack",
    "HintRenderer",
    "Hinter",
    "ModelHinter",
    "TeacherModel",
    "TemplateHinter",
    "approximate_tokens",
    "key_of",
    "leaks",
    "neutral",
    "secrets_of",
    "slots_of",
    "write_hints",
]
