"""`errata ablate`: trains several arms (settings of the loss, and controls) on the same tasks and seeds with equally
many rollouts, and compares them. `errata demo learning` is its smallest run.

Two families of tasks: `boxes` and, with tasks held out for evaluation, `projects`. `plan`, `records`, `statistics`,
`report` and `held_out` need no tensors; `training`, `experiment` and the subjects need TRL.
"""

from .plan import ARMS, TRL_SDPO, Arm, Plan, read_plan
from .records import Batch, Run
from .report import Against, ArmReport, reports
from .statistics import Interval, interval, seeds_needed

__all__ = [
    "ARMS",
    "TRL_SDPO",
    "Against",
    "Arm",
    "ArmReport",
    "Batch",
    "Interval",
    "Plan",
    "Run",
    "interval",
    "read_plan",
    "reports",
    "seeds_needed",
]
