"""Runs checks against a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from websockets.exceptions import InvalidHandshake, WebSocketException

from ..report import level
from ..results import (
    Blocked,
    Broken,
    KnownDefect,
    NotApplicable,
    NotFollowed,
    NotSupported,
    NotTested,
    Outcome,
    Result,
)
from ..statements import statements
from . import (
    check_base,
    check_faults,
    check_fork,
    check_lost,
    check_markers,
    check_mux,
    check_numbers,
    check_replay,
    check_rewards,
    check_shards,
)
from .probe import KNOWN, TALLY, Probe, guess
from .registry import CHECKS, Check
from .rehearsal import rehearsed
from .sockets import Wire
from .stalls import ATTEMPTS
from .target import PROBE_PATH, WIRES, WRONGS, Target

__all__ = ["CHECK_MODULES", "prepared", "run", "selected"]

CHECK_MODULES = (
    check_base,
    check_markers,
    check_replay,
    check_fork,
    check_mux,
    check_numbers,
    check_lost,
    check_rewards,
    check_shards,
    check_faults,
)
"""The modules of the checks, in the order in which they are reported."""

CHECK_S = 90.0
"""How long one check may take, in seconds, beside what the environment takes for its resets and steps."""

ONE_EPISODE = "R-015-1"
"""The statement that an eid is one episode's."""

PLACE_S = 0.5
"""How long a server is given to free the place of a session that has ended, in seconds."""


async def prepared(target: Target, probe: str | None = None) -> str:
    """Ask the server what it offers, choose a probe, play its actions once, and return the probe's name.

    Args:
        target: Its `probe` is replaced if it has no actions.
        probe: A name of `KNOWN`, or None for the probe that the server offers, or else one guessed from
            ``GET /schema``.

    Raises:
        OSError: The server cannot be reached, or its address is that of several environments.
    """
    await target.learn()
    try:
        name, guessed = _chosen(target, probe)
    except NotTested as error:
        return f"none ({error})"
    found = await rehearsed(target, guessed, repeatable=target.probe is TALLY)
    target.reply_s = max(target.reply_s, 4 * (target.reset_s + 5 * target.step_s))
    name += f"; {found}" if found else ""
    if target.probe.slow is not None and not await _is_slow(target):
        target.probe = replace(target.probe, slow=None)
        name += ", without `slow`: it takes less than half of slow_s here"
    return name


def _chosen(target: Target, probe: str | None) -> tuple[str, bool]:
    """Choose the probe of a target; return its name, and whether its actions are guessed.

    Raises:
        NotTested: There are no actions.
    """
    if target.probe.step:
        return "given", False
    if probe is not None:
        target.probe = KNOWN[probe]
        return probe, False
    refused, given = "", target.probe
    if target.offered is not None:
        try:
            target.probe = Probe.of(target.offered)
        except ValueError as error:
            refused = f" (GET {PROBE_PATH} has none: {error})"
        else:
            return f"of GET {PROBE_PATH}", False
    name, target.probe = guess(target.schema.get("action"))
    guessed = target.probe is not TALLY
    target.probe = replace(target.probe, reset=given.reset) if given.reset else target.probe
    return name + refused, guessed


async def _is_slow(target: Target) -> bool:
    try:
        if target.speaks_mux:
            async with target.session() as session:
                await session.works("reset")
                started = time.monotonic()
                await session.request("step", target.probe.slow)
        else:
            async with target.plain() as wire:
                await wire.works("reset", {})
                started = time.monotonic()
                await wire.ask("step", target.probe.slow)
    except (Broken, Blocked, NotTested, NotSupported, WebSocketException, OSError):
        return True  # the checks say what is wrong
    return time.monotonic() - started > target.probe.slow_s / 2


def selected(rfcs: Collection[str], profile: str | None, only: Collection[str] = ()) -> list[Check]:
    """Return the checks of groups of statements and of a profile of the released protocol, in the report's order.

    Args:
        rfcs: Numbers of the groups, three digits: ``014`` has R-014-1 and so on.
        profile: ``0.3``, ``0.5`` or ``0.10``, or None for none.
        only: Ids of statements; empty for all.
    """
    order = {module.__name__: i for i, module in enumerate(CHECK_MODULES)}
    chosen = [
        one
        for one in CHECKS
        if (profile in one.profiles if one.profiles else one.statement.split("-")[1] in rfcs)
        and (not only or one.statement in only)
    ]
    return sorted(chosen, key=lambda one: order[one.body.__module__])


async def run(
    target: Target, checks: list[Check], jobs: int = 1, report: Callable[[Result], None] = lambda _: None
) -> list[Result]:
    """Run checks; return their results in the order of the checks.

    Args:
        target: The server, after `prepared`.
        checks: The checks, as returned by `selected`.
        jobs: How many checks run concurrently. Those that flood the server run alone, after the others.
        report: Called with each result as soon as there is one.
    """
    places = asyncio.Semaphore(jobs)
    results: dict[int, Result] = {}

    async def one(i: int) -> None:
        async with places:
            results[i] = await _run(target, checks[i])
            report(results[i])

    await asyncio.gather(*(one(i) for i, check in enumerate(checks) if not check.alone))
    for i, check in enumerate(checks):
        if check.alone:
            await one(i)
    return [results[i] for i in range(len(checks))]


async def _run(target: Target, check: Check) -> Result:
    """Run a check. Whatever it says, a message that breaks a statement on the way is reported.

    A check that fails in an episode which other sessions have, too, may have seen what they did: it says nothing of its
    own statement.
    """
    wrongs: list[Blocked] = []
    WRONGS.set(wrongs)
    result = await _judged(target, check)
    shared = next((wrong for wrong in wrongs if wrong.statement == ONE_EPISODE), None)
    if shared is not None and result.outcome is Outcome.FAILED and check.statement != ONE_EPISODE:
        return replace(result, outcome=Outcome.BLOCKED, detail=str(shared), blocked_by=ONE_EPISODE)
    if not wrongs or result.outcome in (Outcome.FAILED, Outcome.BLOCKED, Outcome.FINDING):
        return result
    wrong = wrongs[0]
    if wrong.statement == check.statement:
        return replace(result, outcome=Outcome.FAILED, detail=str(wrong))
    return replace(result, outcome=Outcome.BLOCKED, detail=str(wrong), blocked_by=wrong.statement)


async def _judged(target: Target, check: Check) -> Result:
    result, wires = await _once(target, check)
    wrong = result.outcome in (Outcome.FAILED, Outcome.NOT_FOLLOWED, Outcome.BLOCKED)
    if wrong and any(wire.overplayed for wire in wires):
        why = "the environment refused a step after the end of its episode: the check needs longer ones"
        return replace(result, outcome=Outcome.NOT_TESTED, detail=why, blocked_by=None)
    if wrong and target.refuses_reset and any(wire.refused_reset for wire in wires):
        return replace(result, outcome=Outcome.NOT_TESTED, detail=target.refuses_reset, blocked_by=None)
    if (wrong or result.outcome is Outcome.NOT_TESTED) and any(wire.full for wire in wires):
        await asyncio.sleep(PLACE_S)  # the session of an earlier check may be closing
        result, wires = await _once(target, check)
        if result.outcome is not Outcome.PASSED and any(wire.full for wire in wires):
            why = "the server has no place for so many sessions (CAPACITY_REACHED)"
            return replace(result, outcome=Outcome.NOT_TESTED, detail=why, blocked_by=None)
    return result


async def _once(target: Target, check: Check) -> tuple[Result, list[Wire]]:
    wires: list[Wire] = []
    WIRES.set(wires)
    return await _outcome(target, check), wires


async def _outcome(target: Target, check: Check) -> Result:
    started = time.monotonic()
    check_s = CHECK_S + 60 * (target.reset_s + target.step_s) + ATTEMPTS * target.probe.slow_s

    def result(outcome: Outcome, detail: object = "", blocked_by: str | None = None) -> Result:
        if outcome is Outcome.FAILED and level(check.statement) == "SHOULD":
            outcome = Outcome.NOT_FOLLOWED
        return Result(check.statement, check.name, outcome, str(detail), blocked_by, time.monotonic() - started)

    try:
        async with asyncio.timeout(check_s):
            await check.body(target)
    except Broken as error:
        return result(Outcome.FAILED, error)
    except NotFollowed as error:
        return result(Outcome.NOT_FOLLOWED, error)
    except Blocked as error:
        if error.statement == check.statement:
            return result(Outcome.FAILED, error)
        return result(Outcome.BLOCKED, error, error.statement)
    except KnownDefect as error:
        return result(Outcome.FINDING, error)
    except NotSupported as error:
        return result(Outcome.NOT_SUPPORTED, error)
    except NotApplicable as error:
        return result(Outcome.NOT_APPLICABLE, error)
    except NotTested as error:
        return result(Outcome.NOT_TESTED, error)
    except TimeoutError:
        return result(Outcome.FAILED, f"the check did not end within {check_s:.0f} s")
    except (InvalidHandshake, WebSocketException, OSError) as error:
        return result(Outcome.BLOCKED, f"{type(error).__name__}: {error}", "base.connect")
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError) as error:
        # The server's message has another form than the check reads.
        return result(Outcome.FAILED, f"a message of another form came: {type(error).__name__}: {error}")
    return result(Outcome.PASSED)


def unchecked() -> list[str]:
    """Return the statements that bind a server, can be seen from outside, and have no check."""
    checked = {check.statement for check in CHECKS}
    return [
        one.id
        for one in statements().values()
        if one.side == "server" and one.tag != "inspection" and one.id not in checked
    ]
