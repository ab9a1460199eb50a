"""Teachers and delayed rewards as Monarch actors, beside any trainer; Monarch 0.7 runs on a CPU.

docs/monarch.md has the whole way. `errata_trainer.recipes.monarch.distillation` has the teacher of channel 2; it needs
torch, and what is here does not. TorchForge, which was made on Monarch, is paused and cannot be installed: nothing here
was run with it.
"""

from .replay import ActorTeacher, ReplayTeachers, TeacherGone, TeacherReplayActor
from .rewards import DelayedRewards, LateScore

__all__ = [
    "ActorTeacher",
    "DelayedRewards",
    "LateScore",
    "ReplayTeachers",
    "TeacherGone",
    "TeacherReplayActor",
]
