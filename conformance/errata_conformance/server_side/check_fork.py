"""R-015-15 to 27: fork, and fork in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..exact import encode
from ..results import Blocked, Broken, NoPlace, NotApplicable, NotSupported, NotTested, ensure
from .check_markers import SITE, sites
from .check_replay import EID, delivered, needed, probed, valid
from .registry import check
from .sockets import Message, Wire, name
from .target import Answer, Target


def forkable(target: Target) -> None:
    """Check that the server offers forks.

    Raises:
        NotSupported: It does not.
    """
    needed(target)
    target.offers("fork")


async def fork(target: Target, eid: str, t: Any, request_id: str | None = None) -> Answer:
    """Request a fork over HTTP."""
    return await target.http("POST", f"/episodes/{eid}/fork", {"t": t, "request_id": request_id or name()})


async def forked(target: Target, eid: str, t: int) -> dict[str, Any]:
    """Make a fork and return the reply.

    Raises:
        Blocked: The server made none.
    """
    answer = await fork(target, eid, t)
    if answer.status == 503 or b"CAPACITY_REACHED" in answer.body:
        raise NoPlace(f"the server has no place for another session: {answer.body[:200]!r}")
    if answer.status != 200:
        raise Blocked("R-015-17", f"POST /episodes/{eid}/fork at t={t}: {answer.status} {answer.body[:300]!r}")
    child: dict[str, Any] = answer.json()
    return child


async def parent(target: Target, wire: Wire) -> list[Message]:
    """Play a reset and up to three steps; return the deliveries."""
    await probed(wire)
    seen = [await delivered(wire, "reset", {})]
    return [*seen, *[await delivered(wire, "step", one) for one in target.steps(3)]]


def branch(target: Target) -> int:
    """Return the t of a `parent` at which to fork: a step follows it, and one comes before it where episodes allow."""
    return 1 if target.bears is None or target.bears > 1 else 0


COUNTERS = frozenset({"t", "step", "steps", "step_count", "turn", "turns"})
"""Names of an observation's fields that may count from the fork, as the state does (R-015-22)."""


def alike(target: Target, one: Message, other: Message, fork_t: int = 0) -> None:
    """Check that two deliveries have equal data, except for volatile fields and what says their t.

    Args:
        target: Server that is checked; its probe names the volatile fields.
        one: Delivery that came; a fork's, if one of the two is.
        other: Delivery that was expected.
        fork_t: The t of the parent at which the fork began.

    Raises:
        Broken: They differ.
    """
    found = next(_differences(one.data, other.data, frozenset(target.probe.volatile), fork_t, "$"), None)
    if found is not None:
        raise Broken(f"{found}; it came with {one}, and was expected as in {other}")


def _differences(one: Any, other: Any, volatile: frozenset[str], fork_t: int, path: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        site = set(one) >= SITE  # a site names the turn of its own episode (R-014-9)
        for name in dict.fromkeys((*one, *other)):
            if name in volatile or (site and name == "t"):
                continue
            if name not in one or name not in other:
                yield f"{path}.{name} is {'missing' if name in other else 'too many'}"
            elif not (name in COUNTERS and _counts_from(one[name], other[name], fork_t)):
                yield from _differences(one[name], other[name], volatile, fork_t, f"{path}.{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for n, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _differences(a, b, volatile, fork_t, f"{path}[{n}]")
    elif one != other:
        yield f"{path} is {encode(one)[:200]}, not {encode(other)[:200]}"


def _counts_from(one: Any, other: Any, fork_t: int) -> bool:
    return type(one) is int and type(other) is int and one + fork_t == other


@check("R-015-15", "fork is offered only where an environment can be restored")
async def _(target: Target) -> None:
    needed(target)
    offered = "fork" in target.extensions
    ensure(not (offered and target.recovery == "none"), "extensions names fork, and recovery is none")


@check("R-015-17", "a fork begins with the parent's delivery and goes on as the parent would")
async def _(target: Target) -> None:
    forkable(target)
    t, action = branch(target), target.steps(2)[-1]
    async with target.plain() as wire:
        seen = await parent(target, wire)
        eid = seen[0].get("eid")
        answer = await fork(target, eid, t)
        if b"CAPACITY_REACHED" in answer.body:
            raise NoPlace("the server has no place for another session")
        ensure(answer.status == 200, f"fork at t={t}: {answer.status} {answer.body[:300]!r}")
        child = answer.json()
        valid(child, "http.ForkReply")
        ensure(child.get("origin") == {"eid": eid, "t": t} and child.get("t", 0) == 0, f"{encode(child)}")
        ensure(bool(EID.fullmatch(child["eid"])) and child["eid"] != eid, f"the child's eid: {child['eid']!r}")
        async with target.plain(f"?session_id={child['session_id']}") as own:
            place = (await probed(own)).data.get("session") or {}
            ensure((place.get("eid"), place.get("t")) == (child["eid"], 0), f"the child stands at {place}")
            first = await own.ask("state", {"t": 0})
            ensure(first.payload == seen[t].payload, f"P_0 of the child: {first}, of the parent: {seen[t]}")
            step = await own.ask("step", action)
            ensure(step.type == "observation", f"the child's first step: {step}")
            alike(target, step, seen[t + 1], t)
            ensure((step.get("eid"), step.get("t")) == (child["eid"], 1), f"the child's first step: {step}")


@check("R-015-18", "child and parent do not affect each other")
async def _(target: Target) -> None:
    forkable(target)
    t = branch(target)
    action = target.steps(t + 1)[-1]
    async with target.plain() as wire:
        await probed(wire)
        eid = (await delivered(wire, "reset", {})).get("eid")
        for one in target.steps(t):
            await delivered(wire, "step", one)
        child, twin = await forked(target, eid, t), await forked(target, eid, t)
        async with target.plain(f"?session_id={child['session_id']}") as own:
            await probed(own)
            for one in target.steps(3)[::-1][: (target.bears or 4) - t]:
                await own.works("step", one)
            mine = await delivered(wire, "step", action)
            async with target.plain(f"?session_id={twin['session_id']}") as other:
                await probed(other)
                alone = await other.works("step", action)
            alike(target, alone, mine, t)
            ensure(mine.get("t") == t + 1, f"the parent's t is {mine.get('t')}, not {t + 1}")
            again = await own.works("state")
            for kind, data in (target.turn(t + 1), target.turn(t + 2), ("reset", {})):
                await delivered(wire, kind, data)
            ensure(
                (await own.works("state")).payload == again.payload, "a request of the parent changed the child's state"
            )
        last = await forked(target, eid, t + 1)
        ensure(last["origin"]["t"] == t + 1, f"a fork of a parent that ran on: {encode(last)}")


@check("R-015-19", "a repeated request_id makes no second child")
async def _(target: Target) -> None:
    forkable(target)
    async with target.plain() as wire:
        eid = (await parent(target, wire))[0].get("eid")
        request_id = name()
        first, again = await fork(target, eid, 1, request_id), await fork(target, eid, 1, request_id)
        if first.status != 200:
            raise Blocked("R-015-17", f"fork at t=1: {first.status} {first.body[:300]!r}")
        ensure(first.json() == again.json(), f"{first.body[:300]!r}, then {again.body[:300]!r}")
        other = await fork(target, eid, 0, request_id)
        ensure(
            (other.status, other.json().get("code")) == (409, "CONFLICT"),
            f"at another t: {other.status} {other.body[:300]!r}",
        )


@check("R-015-20", "errors of a fork have their code and status")
async def _(target: Target) -> None:
    needed(target)
    async with target.plain() as wire:
        eid = (await parent(target, wire))[0].get("eid")
        if "fork" not in target.extensions:
            answer = await fork(target, eid, 1)
            wrong = f"recovery is {target.recovery}: {answer.status} {answer.body[:200]!r}"
            if answer.status in (404, 405) and b'"code"' not in answer.body:
                raise NotSupported("the server has no route for forks")
            ensure((answer.status, answer.json().get("code")) == (501, "NOT_SUPPORTED"), wrong)
            reply = await wire.ask("reset", {"injected_state": {"episode_id": eid, "t": 1}})
            if reply.code != "NOT_SUPPORTED":
                raise Broken(f"a fork in place where recovery is {target.recovery}: {reply}")
            return
        for where, body, status, code in (
            ("ep_no_such_episode", {"t": 0, "request_id": name()}, 404, "UNKNOWN_EPISODE"),
            (eid, {"t": 9, "request_id": name()}, 404, "T_OUT_OF_RANGE"),
            (eid, {"t": -1, "request_id": name()}, 422, "VALIDATION_ERROR"),
            (eid, {"t": 0}, 422, "VALIDATION_ERROR"),
            (eid, {"t": 0, "request_id": ""}, 422, "VALIDATION_ERROR"),
            (eid, {"t": 0, "request_id": name(), "more": 1}, 422, "VALIDATION_ERROR"),
        ):
            answer = await target.http("POST", f"/episodes/{where}/fork", body)
            found = answer.json()
            said = found.get("code") if isinstance(found, dict) else None
            ensure((answer.status, said) == (status, code), f"{encode(body)}: {answer.status} {answer.body[:200]!r}")
            ensure("session_id" not in found, f"an error with a child: {answer.body[:200]!r}")


@check("R-015-22", "state of a child counts from the fork")
async def _(target: Target) -> None:
    forkable(target)
    async with target.plain() as wire:
        await probed(wire)
        eid = (await delivered(wire, "reset", {})).get("eid")
        begun = (await wire.works("state")).data
        counts, parents = [begun.get("step_count")], begun.get("episode_id")
        await delivered(wire, "step", target.steps(1)[0])
        counts.append((await wire.works("state")).data.get("step_count"))
        child = await forked(target, eid, branch(target))
        async with target.plain(f"?session_id={child['session_id']}") as own:
            for steps, count in enumerate(counts):
                if steps:
                    await own.works("step", target.steps(2)[-1])
                state = await own.works("state")
                ensure(state.data.get("step_count") == count, f"step_count {count} was expected: {state}")
                own_id = state.data.get("episode_id")
                ensure(own_id is None or own_id not in (eid, parents), f"episode_id is the parent's: {state}")


@check("R-015-16", "a re-execution that differs ends the child, and is not taken for the state")
async def _(target: Target) -> None:
    forkable(target)
    if target.recovery != "reexecute":
        raise NotApplicable(f"recovery is {target.recovery}, not reexecute")
    random = target.probe.need("random")
    async with target.plain() as wire:
        await probed(wire)
        eid = (await delivered(wire, "reset", {})).get("eid")
        first = await delivered(wire, "step", random)
        await delivered(wire, "reset", {})
        try:
            alike(target, first, await delivered(wire, "step", random))
        except Broken:
            pass
        else:
            raise NotTested("the probe's `random` has the same observation twice")
        child = await forked(target, eid, 1)
        async with target.plain(f"?session_id={child['session_id']}") as own:
            reply = await own.ask("step", target.probe.need("step")[0])
            ensure(reply.code == "SESSION_LOST", f"SESSION_LOST was expected: {reply}")
            try:
                again = await own.ask("step", target.probe.need("step")[0])
            except Broken:
                ensure(own.closed is not None, "after SESSION_LOST a step has no answer, and the socket stays open")
            else:
                ensure(again.code == "SESSION_LOST", f"after SESSION_LOST the session goes on: {again}")
        async with target.plain(f"?session_id={child['session_id']}") as later:
            try:
                again = await later.ask("step", target.probe.need("step")[0])
            except Broken:
                return
            ensure(again.code in ("SESSION_LOST", "SESSION_ERROR"), f"a lost session is attached again: {again}")


@check("R-015-25", "injected_state of an episode and t begins an episode there")
async def _(target: Target) -> None:
    forkable(target)
    t, action = branch(target), target.steps(2)[-1]
    async with target.plain() as wire, target.plain() as other:
        seen = await parent(target, wire)
        place = {"injected_state": {"episode_id": seen[0].get("eid"), "t": t}}
        await probed(other)
        for one in (wire, other):
            reply = await one.ask("reset", place)
            ensure(reply.type == "observation" and reply.payload == seen[t].payload, f"P_{t} was expected: {reply}")
            ensure(reply.get("t") == 0 and reply.get("eid") != seen[0].get("eid"), f"a new episode at t=0: {reply}")
            step = await one.ask("step", action)
            ensure(step.type == "observation", f"the first step of the fork: {step}")
            alike(target, step, seen[t + 1], t)


@check("R-015-26", "every other injected_state goes to the environment")
async def _(target: Target) -> None:
    forkable(target)
    async with target.plain() as wire:
        seen = await parent(target, wire)
        eid = seen[0].get("eid")
        differing = [t for t, one in enumerate(seen) if one.payload != seen[0].payload]
        if not differing:
            raise NotTested("every step is answered with the same as the reset")
        t = differing[0]
        # An environment may refuse the argument itself; then it refuses one that nobody could take for a fork, too.
        own = await wire.ask("reset", {"injected_state": {"conformance": 1}})
        strict = own.type == "error" and (await wire.ask("reset", {"conformance": 1})).code == own.code
        unclear = None
        for other in (
            {"episode_id": eid, "t": t, "more": 0},
            {"episode_id": eid},
            {"t": t},
            {"episode_id": eid, "t": str(t)},
            {"episode_id": eid, "t": -1},
            {"episode_id": eid, "t": 2**53},
            "x",
        ):
            reply = await wire.ask("reset", {"injected_state": other})
            if reply.type == "observation":
                ensure(
                    reply.payload != seen[t].payload, f"injected_state {encode(other)} was taken for a fork: {reply}"
                )
            elif reply.code != "EXECUTION_ERROR":
                refused = f"injected_state {encode(other)} did not go to the environment: {reply}"
                ensure(not target.probe.any_injected_state, refused)
                ensure(reply.code in (own.code, "VALIDATION_ERROR"), refused)
                ensure(own.type != "observation" or not isinstance(other, dict), refused)
                unclear = unclear or (None if strict else reply)
        if unclear is not None:
            raise NotTested(
                "the server or the environment refuses injected_state, and the probe does not say that the "
                f"environment takes any (`any_injected_state`): {unclear}"
            )


@check("R-015-27", "a fork in place that fails leaves the session where it was")
async def _(target: Target) -> None:
    forkable(target)
    async with target.plain() as wire:
        seen = await parent(target, wire)
        eid, t = seen[0].get("eid"), len(seen) - 1
        for place, code in (
            ({"episode_id": "ep_no_such_episode", "t": 0}, "UNKNOWN_EPISODE"),
            ({"episode_id": eid, "t": 9}, "T_OUT_OF_RANGE"),
        ):
            reply = await wire.ask("reset", {"injected_state": place})
            ensure(reply.code == code, f"{code} was expected: {reply}")
            here = (await probed(wire)).data.get("session") or {}
            ensure((here.get("eid"), here.get("t")) == (eid, t), f"after {code} the session stands at {here}")
        if target.bears is None or t < target.bears:
            step = await delivered(wire, "step", target.probe.need("step")[0])
            ensure(step.get("t") == t + 1, f"the next step: {step}")


async def failed(target: Target, wire: Wire) -> tuple[str, Message, int]:
    """Play an episode whose last step has a marker; return its eid, that step's frame, and its t.

    Raises:
        NotTested: The marker has no site with t.
    """
    marked = target.probe.need("marked")[0]
    await probed(wire)
    eid = (await delivered(wire, "reset", {})).get("eid")
    for action in target.steps(branch(target)):
        await delivered(wire, "step", action)
    step = await delivered(wire, "step", marked)
    site = step.data["observation"].get("error_site")
    if not site or site.get("t") is None:
        raise NotTested("the probe's first `marked` action has no site with t")
    return eid, step, branch(target) + 1


async def placed(wire: Wire, eid: str, t: int) -> Message:
    """Fork in place; return the reply.

    Raises:
        Blocked: The server makes no fork.
    """
    reply = await wire.ask("reset", {"injected_state": {"episode_id": eid, "t": t}})
    if reply.type != "observation":
        raise Blocked("R-015-25", f"{reply}")
    return reply


@check("R-014-9", "a site keeps its t at the start of a fork, and later ones count from there")
async def _(target: Target) -> None:
    forkable(target)
    async with target.plain() as wire:
        eid, _step, t = await failed(target, wire)
        first = (await placed(wire, eid, t)).data["observation"]["error_site"]["t"]
        ensure(first == t, f"the site of the parent's turn {t} has t={first} at the start of the fork")
        await placed(wire, eid, t - 1)
        again = await wire.works("step", target.probe.need("marked")[0])
        for site in sites(again.data["observation"]):
            ensure(site.get("t") in (None, 1), f"the fork's first step has a site with t={site.get('t')}: {again}")


@check("R-015-17", "the first step of a fork fails as the parent's did, with the fork's own t")
async def _(target: Target) -> None:
    forkable(target)
    async with target.plain() as wire:
        eid, step, t = await failed(target, wire)
        await placed(wire, eid, t - 1)
        again = await wire.works("step", target.probe.need("marked")[0])
        alike(target, again, step, t - 1)
