"""`errata ablate`: the four arms of the channels' weights, with the same tasks, rollouts and seeds, compared.

`plan`, `records`, `statistics` and `report` need no tensors; the rest needs TRL.
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
