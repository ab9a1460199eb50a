"""RFC 015, sections 5 to 7: fork, and fork in place."""

from __future__ import annotations

from typing import Any

from ..exact import encode
from ..results import Blocked, Broken, NotSupported, NotTested, ensure
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
        raise NotTested(f"the server has no place for another session: {answer.body[:200]!r}")
    if answer.status != 200:
        raise Blocked("R-015-17", f"POST /episodes/{eid}/fork at t={t}: {answer.status} {answer.body[:300]!r}")
    child: dict[str, Any] = answer.json()
    return child


async def parent(target: Target, wire: Wire) -> list[Message]:
    """Play a reset and three steps; return the deliveries."""
    actions = target.probe.need("step")
    await probed(wire)
    return [
        await delivered(wire, "reset", {}),
        *[await delivered(wire, "step", one) for one in (*actions, *actions)[:3]],
    ]


def same(target: Target, one: Message, other: Message) -> bool:
    """Return whether two deliveries have equal data, except for volatile fields."""
    return bool(_without(target, one.data) == _without(target, other.data))


def _without(target: Target, value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without(target, v) for k, v in value.items() if k not in target.probe.volatile}
    return [_without(target, one) for one in value] if isinstance(value, list) else value


@check("R-015-15", "fork is offered only where an environment can be restored")
async def _(target: Target) -> None:
    needed(target)
    offered = "fork" in target.extensions
    ensure(not (offered and target.recovery == "none"), "extensions names fork, and recovery is none")


@check("R-015-17", "a fork begins with the parent's delivery and goes on as the parent would")
async def _(target: Target) -> None:
    forkable(target)
    actions = target.probe.need("step")
    async with target.plain() as wire:
        seen = await parent(target, wire)
        eid = seen[0].get("eid")
        answer = await fork(target, eid, 1)
        if b"CAPACITY_REACHED" in answer.body:
            raise NotTested("the server has no place for another session")
        ensure(answer.status == 200, f"fork at t=1: {answer.status} {answer.body[:300]!r}")
        child = answer.json()
        valid(child, "http.ForkReply")
        ensure(child.get("origin") == {"eid": eid, "t": 1} and child.get("t", 0) == 0, f"{encode(child)}")
        ensure(bool(EID.fullmatch(child["eid"])) and child["eid"] != eid, f"the child's eid: {child['eid']!r}")
        async with target.plain(f"?session_id={child['session_id']}") as own:
            place = (await probed(own)).data.get("session") or {}
            ensure((place.get("eid"), place.get("t")) == (child["eid"], 0), f"the child stands at {place}")
            first = await own.ask("state", {"t": 0})
            ensure(first.payload == seen[1].payload, f"P_0 of the child: {first}, of the parent: {seen[1]}")
            step = await own.ask("step", actions[1])
            ensure(step.type == "observation", f"the child's first step: {step}")
            ensure(same(target, step, seen[2]), f"the child answers {step.data}, the parent answered {seen[2].data}")
            ensure((step.get("eid"), step.get("t")) == (child["eid"], 1), f"the child's first step: {step}")


@check("R-015-18", "child and parent do not affect each other")
async def _(target: Target) -> None:
    forkable(target)
    actions = target.probe.need("step")
    async with target.plain() as wire, target.plain() as twin:
        seen = await parent(target, wire)
        await parent(target, twin)
        child = await forked(target, seen[0].get("eid"), 2)
        async with target.plain(f"?session_id={child['session_id']}") as own:
            await probed(own)
            for action in (actions[-1], actions[0], actions[1]):
                await own.works("step", action)
            mine, alone = await delivered(wire, "step", actions[0]), await delivered(twin, "step", actions[0])
            ensure(
                same(target, mine, alone), f"the parent answers {mine.data}, an episode without a child {alone.data}"
            )
            ensure(mine.get("t") == 4, f"the parent's t is {mine.get('t')}, not 4")
            again = await own.works("state")
            for action in actions:
                await delivered(wire, "step", action)
            ensure(
                (await own.works("state")).payload == again.payload, "a step of the parent changed the child's state"
            )
        last = await forked(target, seen[0].get("eid"), 4)
        ensure(last["origin"]["t"] == 4, f"a fork of a parent that ran on: {encode(last)}")


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
        other = await fork(target, eid, 2, request_id)
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
        child = await forked(target, (await parent(target, wire))[0].get("eid"), 2)
        async with target.plain(f"?session_id={child['session_id']}") as own:
            await own.works("step", target.probe.need("step")[0])
            state = await own.works("state")
            found = (state.data.get("episode_id"), state.data.get("step_count"))
            ensure(found == (child["eid"], 1), f"episode_id {child['eid']} and step_count 1 were expected: {state}")


@check("R-015-16", "a re-execution that differs ends the child, and is not taken for the state")
async def _(target: Target) -> None:
    forkable(target)
    if target.recovery != "reexecute":
        raise NotTested(f"recovery is {target.recovery}, not reexecute")
    random = target.probe.need("random")
    async with target.plain() as wire:
        await probed(wire)
        eid = (await delivered(wire, "reset", {})).get("eid")
        first = await delivered(wire, "step", random)
        await delivered(wire, "reset", {})
        if same(target, first, await delivered(wire, "step", random)):
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
    actions = target.probe.need("step")
    async with target.plain() as wire, target.plain() as other:
        seen = await parent(target, wire)
        place = {"injected_state": {"episode_id": seen[0].get("eid"), "t": 1}}
        await probed(other)
        for one in (wire, other):
            reply = await one.ask("reset", place)
            ensure(reply.type == "observation" and reply.payload == seen[1].payload, f"P_1 was expected: {reply}")
            ensure(reply.get("t") == 0 and reply.get("eid") != seen[0].get("eid"), f"a new episode at t=0: {reply}")
            step = await one.ask("step", actions[1])
            ensure(step.type == "observation" and same(target, step, seen[2]), f"{step}, the parent answered {seen[2]}")


@check("R-015-26", "every other injected_state goes to the environment")
async def _(target: Target) -> None:
    forkable(target)
    async with target.plain() as wire:
        seen = await parent(target, wire)
        eid = seen[0].get("eid")
        for other in (
            {"episode_id": eid, "t": 1, "more": 0},
            {"episode_id": eid},
            {"t": 1},
            {"episode_id": eid, "t": "1"},
            "x",
        ):
            reply = await wire.ask("reset", {"injected_state": other})
            if reply.type == "observation":
                ensure(
                    reply.payload != seen[1].payload, f"injected_state {encode(other)} was taken for a fork: {reply}"
                )
            else:
                ensure(
                    reply.code == "EXECUTION_ERROR",
                    f"injected_state {encode(other)} did not go to the environment: {reply}",
                )


@check("R-015-27", "a fork in place that fails leaves the session where it was")
async def _(target: Target) -> None:
    forkable(target)
    async with target.plain() as wire:
        eid = (await parent(target, wire))[0].get("eid")
        for place, code in (
            ({"episode_id": "ep_no_such_episode", "t": 0}, "UNKNOWN_EPISODE"),
            ({"episode_id": eid, "t": 9}, "T_OUT_OF_RANGE"),
        ):
            reply = await wire.ask("reset", {"injected_state": place})
            ensure(reply.code == code, f"{code} was expected: {reply}")
            here = (await probed(wire)).data.get("session") or {}
            ensure((here.get("eid"), here.get("t")) == (eid, 3), f"after {code} the session stands at {here}")
        step = await delivered(wire, "step", target.probe.need("step")[0])
        ensure(step.get("t") == 4, f"the next step: {step}")


@check("R-014-9", "a site keeps its t at the start of a fork")
async def _(target: Target) -> None:
    forkable(target)
    marked = target.probe.need("marked")[0]
    async with target.plain() as wire:
        await probed(wire)
        eid = (await delivered(wire, "reset", {})).get("eid")
        await delivered(wire, "step", target.probe.need("step")[0])
        step = await delivered(wire, "step", marked)
        site = step.data["observation"].get("error_site")
        if not site or site.get("t") is None:
            raise NotTested("the probe's first `marked` action has no site with t")
        reply = await wire.ask("reset", {"injected_state": {"episode_id": eid, "t": 2}})
        if reply.type != "observation":
            raise Blocked("R-015-25", f"{reply}")
        t = reply.data["observation"]["error_site"]["t"]
        ensure(t == 2, f"the site of the parent's turn 2 has t={t} at the start of the fork")
