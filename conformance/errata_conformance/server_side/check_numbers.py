"""R-016-15 to 20, 29 to 33: request ids and repeats, deadlines and cancelling, limits."""

from __future__ import annotations

import json
from typing import Any

from ..exact import encode
from ..results import Broken, NotApplicable, NotFollowed, NotSupported, NotTested, ensure
from .check_fork import alike
from .check_markers import rpc
from .check_mux import spoken, unsupported
from .registry import check
from .sockets import Session, name
from .target import Target

CHUNK = 256 * 1024


@check("R-016-15", "ids count from 1 over all episodes; q is any number")
async def _(target: Target) -> None:
    action = target.probe.need("step")[0]
    async with target.session() as session:
        await session.wire.send(session.envelope("reset", id=1))
        first = await session.reply(1)
        ensure(first.type == "observation" and first.get("t") == 0, f"the first id is 1: {first}")
        session.id = 1
        for kind, data, t in (("step", action, 1), ("reset", None, 0), ("step", action, 1)):
            reply = await session.request(kind, data)
            ensure(reply.type == "observation" and reply.get("t") == t, f"id {session.id}, {kind}: {reply}")
        for q in (9007199254740991, 3, 3, 1):
            await session.wire.send(session.envelope("state", q=q))
            reply = await session.wire.take(session.mine(lambda m, q=q: m.get("q") == q), f"the reply to q {q}")  # type: ignore[misc]
            ensure(reply.type == "state", f"{reply}")


@check("R-016-15", "a tools/call has an id, and its reply is a delivery")
async def _(target: Target) -> None:
    async with target.session() as session:
        reset = await session.works("reset")
        if target.probe.tool is None:
            listed = (await session.read("mcp", rpc("tools/list", {}))).data
            if not isinstance(listed, dict) or "result" not in listed:
                raise NotApplicable("the environment has no MCP tools")
        called = await session.request("mcp", rpc("tools/call", target.probe.need("tool")))
        unsupported(called)
        ensure(called.type == "mcp", f"{called}")
        place = (called.get("eid"), called.get("t"))
        ensure(place == (reset.get("eid"), 1), f"a tools/call counts: {called}")
        if "state_at" in target.extensions:
            read = await session.read("state", {"t": 1})
            ensure((read.payload, read.get("kind")) == (called.payload, "mcp"), f"{read}")
        step = await session.works("step", target.probe.need("step")[0])
        ensure(step.get("t") == 2, f"the step after a tools/call at t=1: {step}")


@check("R-016-16", "a request whose id was used does not run again")
async def _(target: Target) -> None:
    action, (kind, data) = target.probe.need("step")[0], target.turn(1)
    different = target.probe.another(action) or {**action, "metadata": {"conformance": 1}}
    async with target.session() as session:
        wire = session.wire
        await session.request("reset", {"seed": 1})  # which the environment may refuse: so is the same again
        await wire.send(session.envelope("reset", {"seed": True}, id=1))
        reply = await session.reply(1)
        ensure(reply.code == "CONFLICT", f"`true` under the id of a request with `1`: {reply}")
        await session.works("reset")
        first = await session.works("step", action)
        for text in (encode(action), json.dumps(action, indent=1)):
            await wire.send(f'{{"sid":"{session.sid}","id":3,"type":"step","data":{text}}}')
            reply = await session.reply(3)
            ensure(
                reply.type == "observation" and reply.payload == first.payload,
                f"the same again: {reply}, first {first}",
            )
            ensure(reply.get("t") == 1 and reply.get("eid") == first.get("eid"), f"{reply}")
        for other in (session.envelope("step", different, id=3), session.envelope("reset", id=3)):
            await wire.send(other)
            reply = await session.reply(3)
            ensure(reply.code == "CONFLICT" and reply.data.get("next_id") == 4, f"another request under id 3: {reply}")
        second = await session.works(kind, data)
        ensure(second.get("t") == target.turn_t(1), f"nothing ran twice: t={second.get('t')}, not {target.turn_t(1)}")
        if target.probe.slow is not None:
            slow = session.numbered("step", target.probe.slow)
            await wire.send(slow, slow)
            reply = await session.reply()
            ensure(reply.type == "observation" and reply.get("t") == second.get("t") + 1, f"{reply}")
            extra = [m for m in await wire.quiet() if m.get("id") == session.id]
            ensure(not extra, f"a request that was running has one reply: {extra}")
        await wire.send(session.envelope("ack", {"last": 3}))
        await wire.send(session.envelope("step", action, id=3))
        reply = await session.reply(3)
        deleted = reply.code == "REPLY_EXPIRED" or (reply.type == "observation" and reply.payload == first.payload)
        ensure(deleted, f"after ack, REPLY_EXPIRED or the recorded reply: {reply}")
        steps = 2 if target.probe.slow is None else 3
        t = (await session.works(*target.turn(steps))).get("t")
        ensure(t == target.turn_t(steps), f"nothing ran twice: t={t}, not {target.turn_t(steps)}")


@check("R-016-17", "an id beyond the next is OUT_OF_ORDER")
async def _(target: Target) -> None:
    async with target.session() as session:
        await session.works("reset")
        for id in (3, 7, 9007199254740991):
            await session.wire.send(session.envelope("step", target.probe.need("step")[0], id=id))
            reply = await session.reply(id)
            ensure(reply.code == "OUT_OF_ORDER" and reply.data.get("next_id") == 2, f"id {id} with next_id 2: {reply}")
        await session.works("step", target.probe.need("step")[0])


@check("R-016-18", "a refusal gives its id back, and later requests are refused too")
async def _(target: Target) -> None:
    actions = target.probe.need("step")
    async with target.session() as session:
        wire = session.wire
        await session.works("reset")
        await wire.send(session.envelope("no_such_type", actions[0], id=2))
        refused = await session.reply(2)
        ensure(refused.code == "UNKNOWN_TYPE", f"{refused}")
        await wire.send(*[session.envelope("step", actions[0], id=id) for id in (3, 4)])
        for id in (3, 4):
            reply = await session.reply(id)
            ensure(reply.code == "OUT_OF_ORDER" and reply.data.get("next_id") == 2, f"behind a refused id 2: {reply}")
        await wire.send(*[session.envelope(*target.turn(id - 2), id=id) for id in (2, 3, 4)])
        for id in (2, 3, 4):
            reply = await session.reply(id)
            ensure(
                reply.type == "observation" and reply.get("t") == target.turn_t(id - 2),
                f"id {id}, given back and sent again: {reply}",
            )


@check("R-016-19", "replies leave in the order of their ids, refusals at once")
async def _(target: Target) -> None:
    slow, actions = target.probe.need("slow"), target.probe.need("step")
    async with target.session() as session:
        wire = session.wire
        await session.works("reset")
        await wire.send(session.numbered("step", slow))
        await wire.send(session.numbered("step", actions[0], deadline_ms=0))
        await wire.send(session.numbered("step", actions[0]))
        await wire.send(session.envelope("step", actions[0], id=99))
        order = [(await wire.take(session.mine(), "a reply")).get("id") for _ in range(4)]
        ensure([id for id in order if id != 99] == [2, 3, 4], f"replies came for ids {order}")
        ensure(order[0] == 99, f"the refusal of id 99 waited for a step: {order}")


@check("R-016-19", "replies of every kind leave in the order of their ids")
async def _(target: Target) -> None:
    actions = target.probe.need("step")
    async with target.session() as session:
        requests = [session.numbered("reset"), session.numbered("step", actions[0]), session.numbered("step", [])]
        if target.probe.tool is not None:
            requests.append(session.numbered("mcp", rpc("tools/call", target.probe.tool)))
        if "fork" in target.extensions:
            requests.append(session.numbered("fork", {"t": 0, "child": {"sid": name(), "key": name()}}))
        requests += [session.numbered("step", actions[0]), session.numbered("close")]
        await session.wire.send(requests)
        came = [await session.wire.take(session.mine(), "a reply") for _ in requests]
        if any(one.code == "UNKNOWN_TYPE" for one in came):
            raise NotSupported(f"the server does not know a message: {came}")
        ids = [one.get("id") for one in came]
        ensure(ids == [one["id"] for one in requests], f"replies came for ids {ids}: {came}")


@check("R-016-20", "`if` is checked when the request's turn comes")
async def _(target: Target) -> None:
    actions = target.probe.need("step")
    async with target.session() as session:
        wire = session.wire
        eid = (await session.works("reset")).get("eid")
        await wire.send(
            session.numbered("step", actions[0], **{"if": {"t": 0}}),
            session.numbered("step", actions[1], **{"if": {"t": 1, "eid": eid}}),
        )
        for id, t in ((2, 1), (3, 2)):
            reply = await session.reply(id)
            ensure(reply.type == "observation" and reply.get("t") == t, f"a condition that holds in its turn: {reply}")
        for condition in ({"t": 0}, {"t": 3}, {"t": 2, "eid": "ep_another_episode"}):
            reply = await session.request("step", actions[0], **{"if": condition})
            ensure(reply.code == "PRECONDITION_FAILED", f"`if` {encode(condition)} at t=2: {reply}")
            place = (reply.data.get("eid"), reply.data.get("t"))
            ensure(place == (eid, 2), f"PRECONDITION_FAILED names eid and t: {reply}")
        step = await session.works("step", actions[0])
        ensure(step.get("t") == 3, f"nothing ran: t={step.get('t')}, not 3")


@check("R-016-29", "a request whose deadline passes before its turn does not run")
async def _(target: Target) -> None:
    actions = target.probe.need("step")
    async with target.session() as session:
        await session.works("reset")
        reply = await session.request("step", actions[0], deadline_ms=0)
        ensure(reply.code == "TIMEOUT", f"deadline_ms 0: {reply}")
        step = await session.works("step", actions[0])
        ensure(step.get("t") == 1, f"the timed-out step ran: t={step.get('t')}, not 1")
        if target.probe.slow is not None:
            first = session.numbered("step", target.probe.slow)
            second = session.numbered("step", actions[0], deadline_ms=max(1, int(target.probe.slow_s * 250)))
            await session.wire.send(first, second)
            await session.reply(session.id - 1)
            reply = await session.reply()
            ensure(reply.code == "TIMEOUT", f"the deadline passed in the queue: {reply}")
            step = await session.works("step", actions[0])
            ensure(step.get("t") == 3, f"the timed-out step ran: t={step.get('t')}, not 3")


@check("R-016-30", "a deadline that passes while a request runs leaves the session as it was, or ends it")
async def _(target: Target) -> None:
    slow, actions = target.probe.need("slow"), target.probe.need("step")
    async with target.session() as session:
        wire = session.wire
        twin = Session(wire)
        await twin.open()
        before = []
        for one in (session, twin):
            await one.works("reset")
            before.append(await one.works("step", actions[0]))
        try:
            alike(target, before[0], before[1])
        except Broken as error:
            raise NotTested(f"two sessions answer the same requests differently: {error}") from None
        reply = await session.request("step", slow, deadline_ms=max(1, int(target.probe.slow_s * 300)))
        if reply.code == "SESSION_LOST":
            ensure((await session.request("step", actions[1])).type == "error", "a lost session goes on")
            return
        ensure(reply.code == "TIMEOUT", f"TIMEOUT or SESSION_LOST was expected: {reply}")
        step = await session.request("step", actions[1])
        if step.code == "SESSION_LOST":
            return
        ensure(step.type == "observation" and step.get("t") == 2, f"after TIMEOUT: {step}")
        alone = await twin.works("step", actions[1])
        alike(target, step, alone)


@check("R-016-31", "cancel ends a request that has not started")
async def _(target: Target) -> None:
    slow, actions = target.probe.need("slow"), target.probe.need("step")
    async with target.session() as session:
        wire = session.wire
        await session.works("reset")
        await wire.send(session.numbered("step", slow))
        await wire.send(session.numbered("step", actions[0]))
        await wire.send(session.envelope("cancel", id=session.id))
        await wire.send(session.numbered("step", actions[1]))
        replies = [await session.reply(id) for id in (2, 3, 4)]
        for reply in replies:
            unsupported(reply)
        ensure(replies[1].code == "CANCELLED", f"a cancelled request: {replies[1]}")
        ensure(replies[0].at <= replies[1].at, "CANCELLED comes in its turn")
        ensure(replies[2].get("t") == 2, f"the cancelled step ran: t={replies[2].get('t')}, not 2")
        await wire.send(session.envelope("cancel", id=2), session.envelope("cancel", id=77))
        came = await wire.quiet()
        ensure(not came, f"cancel of another request does nothing: {came}")


@check("R-016-32", "requests beyond the bounds are refused with OVERLOADED")
async def _(target: Target) -> None:
    slow, actions = target.probe.need("slow"), target.probe.need("step")
    bound = target.limits.get("in_flight_session")
    if not isinstance(bound, int) or bound > 2000:
        raise NotTested(f"in_flight_session is {bound}")
    async with target.session() as session:
        wire = session.wire
        await session.works("reset")
        await wire.send(session.numbered("step", slow))
        await wire.send(*[session.numbered("step", actions[0]) for _ in range(bound)])
        over = [await session.reply(id) for id in range(2, session.id + 1)]
        refused = [reply for reply in over if reply.code == "OVERLOADED"]
        ensure(refused, f"{bound + 1} requests without an answer, and in_flight_session is {bound}: none was refused")
        after = refused[0].data.get("retry_after")
        ensure(isinstance(after, int | float) and after >= 0, f"retry_after in seconds: {refused[0]}")
        done = [reply for reply in over if reply.type == "observation"]
        ensure(len(done) == bound, f"{len(done)} of {bound} were done")
        session.id = 1 + len(done)
        await session.works("step", actions[0])


def parts(envelope: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Cut an envelope into parts."""
    text = encode(envelope)
    size = -(-len(text) // count)
    address: dict[str, Any] = {name: envelope[name] for name in ("sid", "id", "q") if name in envelope}
    texts = [text[at : at + size] for at in range(0, len(text), size)]
    return [
        {**address, "type": "part", "data": {"n": n + 1, "of": len(texts), "text": one}} for n, one in enumerate(texts)
    ]


@check("R-016-33", "an envelope can come in parts, between those of other sessions")
async def _(target: Target) -> None:
    spoken(target)
    actions = target.probe.need("step")
    async with target.session() as session:
        wire = session.wire
        other = Session(wire)
        await other.open()
        await other.works("reset")
        await session.works("reset")
        cut = parts(session.numbered("step", actions[0]), 3)
        await wire.send(cut[0], other.numbered("step", actions[0]), *cut[1:])
        reply = await session.reply()
        unsupported(reply)
        ensure(reply.type == "observation" and reply.get("t") == 1, f"a step in 3 parts: {reply}")
        ensure((await other.reply()).type == "observation", "a step between the parts of another session")
        cut = parts(session.envelope("step", actions[0], id=3), 3)
        await wire.send(cut[0], cut[2])
        reply = await session.reply(3)
        ensure(reply.code == "INVALID_ENVELOPE", f"part 3 after part 1: {reply}")
        session.id = 2
        came = await wire.quiet(0.1)
        ensure(all(m.code == "INVALID_ENVELOPE" for m in came), f"{came}")
        await session.works(*target.turn(1))
        if target.probe.big is not None:
            big = await session.works("step", target.probe.big)
            if len(big.text) > CHUNK and big.parts == 1:
                raise NotFollowed(f"an envelope of {len(big.text)} characters came in one piece")
            if "state_at" in target.extensions:
                read = await session.read("state", {"t": big.get("t")})
                ensure(read.payload == big.payload, f"t={big.get('t')}: delivered {big}, read {read}")


@check("R-016-41", "NaN in an observation is ENV_OUTPUT_INVALID")
async def _(target: Target) -> None:
    action = target.probe.need("not_finite")
    async with target.session() as session:
        await session.works("reset")
        reply = await session.request("step", action)
        if reply.type == "observation" and not any(word in reply.payload for word in ("null", "NaN", "Infinity")):
            raise NotTested("the probe's `not_finite` has a finite observation")
        ensure(reply.code == "ENV_OUTPUT_INVALID", f"ENV_OUTPUT_INVALID was expected: {reply}")
