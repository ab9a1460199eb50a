"""The part of an environment's state that a snapshot keeps beside the sandbox's layer: the episode and its budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from errata_environment.episodes import SavedEpisode


@dataclass(slots=True)
class Episode(SavedEpisode):
    """One episode of a session.

    Args:
        episode_id: Id given at reset, otherwise a random one.
        instance_id: Id of the instance.
        split: Split of the instance.
        prepared: Digest of the start that the episode began on (`Prepared.digest`).
        seed: Seed of the reset.
        max_turns: Most calls of the episode; None for no bound.
        max_seconds: Limit of the wall time of all its calls together, in seconds; None for no bound.
        max_output_bytes: Limit of outputs and files in its observations together, UTF-8 bytes; None for no bound.
        step_count: Number of calls since the reset.
        seconds: Wall time of these calls together, in seconds, ``submit`` left out.
        output_bytes: UTF-8 bytes of outputs and files in their observations.
        submitted: ``submit`` was called.
        done: The episode is over.
        budget_spent: Name of the budget that ended the episode; None if none did.
        cwd: The shell's current directory after the last call.
        profile: Profile of hardening that the episode began under.
        blocked: Paths inside the sandbox of the programs that the profile blocks.
    """

    ADDED_LATER: ClassVar[frozenset[str]] = frozenset(
        [
            "seed",
            "max_turns",
            "max_seconds",
            "max_output_bytes",
            "step_count",
            "seconds",
            "output_bytes",
            "submitted",
            "done",
            "budget_spent",
            "cwd",
            "profile",
            "blocked",
        ]
    )

    episode_id: str
    instance_id: str
    split: str
    prepared: str
    seed: int | None = None
    max_turns: int | None = None
    max_seconds: float | None = None
    max_output_bytes: int | None = None
    step_count: int = 0
    seconds: float = 0.0
    output_bytes: int = 0
    submitted: bool = False
    done: bool = False
    budget_spent: str | None = None
    cwd: str = ""
    profile: str = "default"
    blocked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.blocked = tuple(self.blocked)  # JSON makes a list of it

    @property
    def turns_left(self) -> int | None:
        """Calls that the budget still allows; None without a budget."""
        return None if self.max_turns is None else max(0, self.max_turns - self.step_count)

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the budget still allows, rounded to milliseconds; None without a budget."""
        return None if self.max_seconds is None else max(0.0, round(self.max_seconds - self.seconds, 3))

    @property
    def output_bytes_left(self) -> int | None:
        """Bytes that the budget still allows; None without a budget."""
        return None if self.max_output_bytes is None else max(0, self.max_output_bytes - self.output_bytes)

    def charge(self, seconds: float, output_bytes: int) -> None:
        """Subtract one call from the budgets; the episode is over when one is used up."""
        self.step_count += 1
        self.seconds += seconds
        self.output_bytes += output_bytes
        if self.done:
            return
        for name in ("turns", "seconds", "output_bytes"):
            left = getattr(self, f"{name}_left")
            if left is not None and left <= 0:
                self.done, self.budget_spent = True, name
                return
