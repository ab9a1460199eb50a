"""Plays the whole corpus on a target, and counts by class what was paid."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from errata_protocol.errors import EnvironmentFailed, ErrataError, SandboxUnavailable

from .attempt import HONEST, SUGGESTIONS, Attempt
from .playing import Target

log = logging.getLogger("errata.redteam")

_IDLE = "does_nothing"
_PLAIN = "nothing_else"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an attempt.

    Args:
        target: Id of the instance or task.
        attempt: The attempt, with the target's values in it.
        resolved: Whether the benchmark's rules, or the whole task, are met.
        reward: Reward that was paid, in [0, 1].
        floor: Reward for doing nothing.
        said: Text of the grader about the attempt, for the author of the target.
        error: Reason why there is no verdict, a failure of the machine or a fault of the grader; empty if there is one.
            Such an attempt is neither paid nor unpaid.
    """

    target: str
    attempt: Attempt
    resolved: bool = False
    reward: float = 0.0
    floor: float = 0.0
    said: str = ""
    error: str = ""

    @property
    def honest(self) -> bool:
        """Whether it was honest work."""
        return self.attempt.kind == HONEST

    @property
    def bad(self) -> bool:
        """Whether an attempt was paid more than doing nothing, nothing was paid, or honest work not in full."""
        return not self.error and (self.reward < 1.0 if self.honest else self.reward > self.floor)

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        attempt = self.attempt
        more = {"files": dict(attempt.files), "command": attempt.command, "closes": SUGGESTIONS[attempt.kind]}
        return {
            "target": self.target,
            "name": attempt.name,
            "class": attempt.kind,
            "did": attempt.did,
            "resolved": self.resolved,
            "reward": self.reward,
            "paid": self.bad if not self.honest else not self.bad and not self.error,
            "said": self.said,
            "error": self.error,
            **(more if self.bad else {}),
        }


async def campaign(
    target: Target,
    chosen: Callable[[Attempt], bool],
    *,
    jobs: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """Play attempts and honest work on a target, doing nothing and the plain solution first.

    Args:
        target: The target.
        chosen: Function that tells whether an attempt counts. The first two are played in any case: what the others
            earn is compared with doing nothing, and their time limit follows from what the solution takes.
        jobs: Most attempts at a time.
        progress: Function that is called with one line for each attempt.

    Raises:
        ErrataError: The target cannot be made, or it gives no verdict where nothing was done.
        SandboxUnavailable: There is no sandbox on this machine.
    """
    attempts, work = await target.made()
    played = [one for one in (*attempts, *work) if chosen(one) or one.name in (_IDLE, _PLAIN)]
    outcomes: dict[str, Outcome] = {}
    floor = 0.0
    turns = asyncio.Semaphore(max(1, jobs))

    async def one(attempt: Attempt) -> None:
        async with turns:
            try:
                verdict = await target.played(attempt)
            except SandboxUnavailable:
                raise  # of the machine: no other attempt would fare better
            except ErrataError as error:
                found = Outcome(target.name, attempt, error=error.message)
            except Exception as error:  # a fault of the grader that this attempt finds: the others are played
                log.exception("%s, attempt %s", target.name, attempt.name)
                found = Outcome(target.name, attempt, error=f"a fault of the grader: {error!r}")
            else:
                found = Outcome(target.name, attempt, verdict.resolved, verdict.reward, floor, verdict.said)
            outcomes[f"{attempt.kind} {attempt.name}"] = found
            state = "no verdict" if found.error else f"{found.reward:g}"
            progress(f"{target.name}: {len(outcomes)} of {len(played)}: {attempt.name}: {state}")

    first = [attempt for attempt in played if attempt.name in (_IDLE, _PLAIN)]
    for attempt in first:
        await one(attempt)
    idle = outcomes[f"nothing done {_IDLE}"]
    if idle.error:
        raise EnvironmentFailed(f"doing nothing gets no verdict, so nothing can be compared with it: {idle.error}")
    floor = idle.reward
    try:
        async with asyncio.TaskGroup() as group:
            for attempt in played:
                if attempt not in first:
                    group.create_task(one(attempt))
    except* SandboxUnavailable as errors:
        raise errors.exceptions[0] from None
    return [outcomes[f"{attempt.kind} {attempt.name}"] for attempt in played if chosen(attempt)]


@dataclass(slots=True)
class Count:
    """Counts of a class.

    Args:
        attempts: Attempts that got a verdict.
        resolved: Those of them that meet the rules of the benchmark, or the whole task.
        bad: Those of them that were paid; of honest work those that were refused.
        errors: Attempts without a verdict.
    """

    attempts: int = 0
    resolved: int = 0
    bad: int = 0
    errors: int = 0


def counted(outcomes: Iterable[Outcome]) -> dict[str, Count]:
    """Return the counts by class, in the corpus' order, honest work last."""
    found: dict[str, Count] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.honest):
        count = found.setdefault(outcome.attempt.kind, Count())
        if outcome.error:
            count.errors += 1
        else:
            count.attempts += 1
            count.resolved += outcome.resolved
            count.bad += outcome.bad
    return found
