"""Plans of an ablation: its arms, its seeds and the settings that all runs share."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from errata_protocol.errors import InvalidRequest

BASELINE = "grpo"


@dataclass(frozen=True, slots=True)
class Arm:
    """One setting of the weights.

    Attributes:
        name: Its name in tables and file names.
        alpha_sdpo: Weight of channel 2.
        beta_replay: Weight of channel 3.
        alpha_end: Channel 2's weight at the last step, reached on a straight line; None keeps the weight constant.
        grpo: Fields of `GRPOConfig` that only this arm has.
        channels: Keywords of the trainer and fields of `ChannelSettings` that only this arm has.
        check: Fields of `CounterfactualCheck` that only this arm has.
        hints: ``own``, or as a control ``shuffled``: hints of other failing turns.
        votes: ``teachers``, or as a control ``random``: teachers without knowledge.
        retry: Half of each batch are failing tasks of the batch before, repeated with the hint in the prompt.
        env_steps: Training ends after this number of resets, forks and steps; None is no bound.
        seeds: Its seeds, where it does not run all of the plan's.
    """

    name: str
    alpha_sdpo: float = 0.0
    beta_replay: float = 0.0
    alpha_end: float | None = None
    grpo: Mapping[str, Any] = field(default_factory=dict)
    channels: Mapping[str, Any] = field(default_factory=dict)
    check: Mapping[str, Any] = field(default_factory=dict)
    hints: str = "own"
    votes: str = "teachers"
    retry: bool = False
    env_steps: int | None = None
    seeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the controls.

        Raises:
            InvalidRequest: There is no such control.
        """
        if self.hints not in ("own", "shuffled") or self.votes not in ("teachers", "random"):
            raise InvalidRequest(f"arm {self.name}: hints are own or shuffled, votes teachers or random")


ARMS = (
    Arm(BASELINE, 0.0, 0.0),
    Arm("grpo+sdpo", 0.1, 0.0),
    Arm("grpo+dpo", 0.0, 0.05),
    Arm("all", 0.1, 0.05),
)
"""The four arms with alpha_sdpo in {0, 0.1} and beta_replay in {0, 0.05}."""

TRL_SDPO = Arm("trl-sdpo", 0.0, 0.0)
"""TRL's own `SDPOTrainer`, where it can run."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All settings of the runs of an ablation; two plans with the same `digest` have the same runs.

    Attributes:
        arms: Arms in the order of the tables; the others are compared with the first.
        seeds: Each arm runs once with each. A seed decides sampling and the order of tasks.
        subject: What is trained: ``{"family": "boxes", ...}`` or ``{"family": "projects", ...}`` for a controlled one,
            else the tables ``policy``, ``environment``, ``tasks`` and ``pairs`` of a configuration file. Empty where a
            file has none: `experiment.controlled_plan` makes it the controlled family's.
        grpo: Fields of TRL's `GRPOConfig`; the same in all arms, so all have the same budget of rollouts.
        channels: Keywords of `ThreeChannelGRPOTrainer` (``jsd_beta``, ``beta_dpo``, ``token_clip``) and fields of
            `ChannelSettings`.
        check: Fields of `CounterfactualCheck`.
        evaluation: For a family with held-out tasks: ``rollouts``, the numbers at which a policy is evaluated.
    """

    arms: tuple[Arm, ...] = ARMS
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    subject: Mapping[str, Any] = field(default_factory=dict)
    grpo: Mapping[str, Any] = field(default_factory=dict)
    channels: Mapping[str, Any] = field(default_factory=dict)
    check: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that each run has its own name.

        Raises:
            InvalidRequest: There is no arm or no seed, or one of them occurs twice.
        """
        names = [arm.name for arm in self.arms]
        if not names or not self.seeds or len({*names}) < len(names) or len({*self.seeds}) < len(self.seeds):
            raise InvalidRequest("an ablation needs at least one arm and one seed, and each only once")

    def digest(self, arm: Arm | None = None) -> str:
        """Return a hash of the settings that all runs share; arms and seeds can be added to a directory later.

        Args:
            arm: Arm whose own settings are included.
        """
        shared = {name: value for name, value in asdict(self).items() if name not in ("arms", "seeds")}
        if not self.evaluation:
            del shared["evaluation"]
        if arm is not None:
            own = {name: value for name, value in asdict(arm).items() if value != asdict(Arm(arm.name))[name]}
            shared["arm"] = {name: value for name, value in own.items() if name not in ("name", "seeds")}
        return hashlib.sha256(json.dumps(shared, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def runs(self) -> list[tuple[Arm, int]]:
        """Return every run, seed by seed."""
        return [(arm, seed) for seed in self.seeds for arm in self.arms if arm.seeds is None or seed in arm.seeds]


def arms_of(names: list[str]) -> tuple[Arm, ...]:
    """Return arms by name.

    Raises:
        InvalidRequest: There is no such arm.
    """
    known = {arm.name: arm for arm in (*ARMS, TRL_SDPO)}
    for name in names:
        if name not in known:
            raise InvalidRequest(f"no arm {name!r}: there are {', '.join(known)}")
    return tuple(known[name] for name in names)


_MAX_BYTES = 64 * 1024
_TABLES = ("policy", "environment", "tasks", "pairs")


def read_plan(path: Path) -> Plan:
    """Read a plan from TOML; docs/ablation.md has an example.

    A file without any of the tables ``policy``, ``environment``, ``tasks`` and ``pairs`` is of the controlled family:
    its plan has no subject yet.

    Raises:
        InvalidRequest: The file is not of that form; the message says where.
    """
    if path.exists() and not path.is_file():
        raise InvalidRequest(f"{path} is not a regular file")
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise InvalidRequest(f"{path} is larger than {_MAX_BYTES:,} bytes")
        read = tomllib.loads(content.decode())
    except RecursionError:
        raise InvalidRequest(f"{path}: a value is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path}: {error}") from error
    known = {*_TABLES, "experiment", "grpo", "channels", "check", "arms", "family", "evaluation"}
    for name in read:
        if name not in known:
            raise InvalidRequest(f"{path}: no table {name!r}: there are {', '.join(sorted(known))}")
    for name in ("policy", "environment", "tasks") if any(name in read for name in _TABLES) else ():
        if not isinstance(read.get(name), dict):
            raise InvalidRequest(f"{path}: the table [{name}] is missing")
    wrong = [name for name, value in read.items() if not isinstance(value, list if name == "arms" else dict)]
    if wrong:
        raise InvalidRequest(f"{path}: {wrong[0]} is no table")
    experiment = read.get("experiment", {})
    seeds = experiment.get("seeds", 5)
    try:
        arms = tuple(_arm(**arm) for arm in read["arms"]) if "arms" in read else ARMS
        given = {name: read.get(name, {}) for name in ("grpo", "channels", "check", "evaluation")}
        subject = {name: read[name] for name in _TABLES if name in read}
        if "family" in read:
            if subject:
                raise InvalidRequest(f"{path}: a plan has [family] or tables of its own, not both")
            subject = dict(read["family"])
        elif subject:
            subject["directory"] = str(path.resolve().parent)
        return Plan(arms, tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds), subject, **given)
    except TypeError as error:
        raise InvalidRequest(f"{path}: {error}; an arm has {', '.join(f.name for f in fields(Arm))}") from error


def _arm(seeds: list[int] | None = None, **given: Any) -> Arm:
    return Arm(**given, seeds=None if seeds is None else tuple(seeds))
