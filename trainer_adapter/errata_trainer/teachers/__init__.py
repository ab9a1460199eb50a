"""Teachers: other models that are asked for an action at a state of an episode, and vote.

`errata_trainer.teachers.endpoint` has the teacher that is asked over HTTP; it needs the extra ``teachers``.
"""

from .actions import Action, ActionKeys, KeyedAction, ToolCall, Unusable
from .ballot import Ask, Ballot, Preference, message_of, preferences, reward_post
from .budget import Budget, Reservation
from .cache import AnswerCache, cache_key
from .fake import FakeTeacher, says
from .pool import Batch, TeacherPool
from .prompts import NotReadable, Prompter
from .shell import canonical_shell
from .states import Site, ask_of, choose, surprisal
from .teacher import (
    Answer,
    AnswerInvalid,
    BudgetSpent,
    KeyMissing,
    Prompt,
    RawCall,
    Spend,
    Teacher,
    TeacherBroken,
    TeacherBusy,
    TeacherFailed,
    TeacherHungUp,
    TeacherRefused,
    TeacherTimeout,
    TeacherUnreachable,
)
from .votes import Pair, Vote, vote

__all__ = [
    "Action",
    "ActionKeys",
    "Answer",
    "AnswerCache",
    "AnswerInvalid",
    "Ask",
    "Ballot",
    "Batch",
    "Budget",
    "BudgetSpent",
    "FakeTeacher",
    "KeyMissing",
    "KeyedAction",
    "NotReadable",
    "Pair",
    "Preference",
    "Prompt",
    "Prompter",
    "RawCall",
    "Reservation",
    "Site",
    "Spend",
    "Teacher",
    "TeacherBroken",
    "TeacherBusy",
    "TeacherFailed",
    "TeacherHungUp",
    "TeacherPool",
    "TeacherRefused",
    "TeacherTimeout",
    "TeacherUnreachable",
    "ToolCall",
    "Unusable",
    "Vote",
    "ask_of",
    "cache_key",
    "canonical_shell",
    "choose",
    "message_of",
    "preferences",
    "reward_post",
    "says",
    "surprisal",
    "vote",
]
