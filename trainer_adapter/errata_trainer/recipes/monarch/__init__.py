"""Teachers and delayed rewards as Monarch actors, beside any trainer; Monarch 0.7 runs on a CPU.

docs/monarch.md has the whole way. TorchForge, which was made on Monarch, is paused and cannot be installed: nothing
here was run with it.
"""

from .distillation import SDPOTeacher, SDPOTeacherActor
from .replay import ActorTeacher, ReplayTeachers, TeacherGone, TeacherReplayActor
from .rewards import DelayedRewards, LateScore

__all__ = [
    "ActorTeacher",
    "DelayedRewards",
    "LateScore",
    "ReplayTeachers",
    "SDPOTeacher",
    "SDPOTeacherActor",
    "TeacherGone",
    "TeacherReplayActor",
]
