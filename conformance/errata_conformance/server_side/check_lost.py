"""R-016-13, R-016-21 to 28: connections that are lost or taken over, and messages that come late."""

from __future__ import annotations

import asyncio

from ..exact import digest, encode
from ..results import Blocked, ensure
from .check_markers import rpc
from .check_replay import valid
from .registry import check
from .sockets import Message, Session, Wire, name
from .target import Target


async def back(session: Session, wire: Wire, **entry: int) -> Message:
    """Resume a session on another socket.

    Raises:
        Blocked: It was not resumed.
    """
    session.wire = wire
    answer = await session.resumed(**entry)
    if answer.type != "resumed":
        raise Blocked("R-016-13", f"a session whose socket was lost is kept: {answer}")
    return answer


@check("R-016-13", "a session is kept when its socket is lost")
async def _(target: Target) -> None:
    action = target.probe.need("step")[0]
    async with target.session() as session, target.multiplexed() as wire:
        reset = await session.works("reset")
        await session.works("step", action)
        state = await session.read("state")
        await session.wire.lose()
        session.wire = wire
        answer = await session.resumed(last=2)
        ensure(answer.type == "resumed", f"{answer}")
        place = {name: answer.data.get(name) for name in ("next_id", "eid", "t")}
        ensure(place == {"next_id": 3, "eid": reset.get("eid"), "t": 1}, f"{answer}")
        again = await session.read("state")
        ensure(again.payload == state.payload, f"another environment: state was {state}, and is {again}")
        step = await session.request(*target.turn(1))
        ensure(step.type == "observation" and step.get("t") == target.turn_t(1), f"{step}")


@check("R-016-21", "replies are kept until they are acknowledged")
async def _(target: Target) -> None:
    async with target.session() as session, target.multiplexed() as wire, target.multiplexed() as third:
        seen = {1: await session.works("reset")}
        for n in range(6):
            reply = await session.works(*target.turn(n))
            seen[session.id] = reply
        await session.wire.lose()
        await back(session, wire, last=0)
        for id, was in seen.items():
            reply = await session.reply(id)
            ensure(reply.payload == was.payload, f"the reply to {id} after a lost connection: {reply}")
        await wire.lose()
        await back(session, third, last=3)
        for id in range(4, 8):
            reply = await session.reply(id)
            ensure(reply.payload == seen[id].payload, f"the reply to {id} after another: {reply}")


@check("R-016-21", "an ack deletes the replies that it names, and no others")
async def _(target: Target) -> None:
    async with target.session() as session, target.multiplexed() as wire:
        await session.works("reset")
        sent = {id: session.envelope(*target.turn(id - 2), id=id) for id in (2, 3, 4)}
        seen = {}
        for id, request in sent.items():
            await session.wire.send(request)
            seen[id] = await session.reply(id)
        await session.wire.send(session.envelope("ack", {"last": 2}))
        for data in ({"last": 1}, {"last_seq": 0}, {}):
            await session.wire.send(session.envelope("ack", data))
        for id in (3, 4):
            await session.wire.send(sent[id])
            reply = await session.reply(id)
            ensure(reply.payload == seen[id].payload, f"the reply to {id}, sent again after an ack of 2: {reply}")
        await session.wire.lose()
        await back(session, wire, last=0)
        for id in (3, 4):
            reply = await session.reply(id)
            ensure(reply.payload == seen[id].payload, f"the reply to {id}, after an ack of 2 and a resume: {reply}")
        session.id = 4
        step = await session.request(*target.turn(3))
        ensure(step.type == "observation" and step.get("t") == target.turn_t(3), f"the next request: {step}")


@check("R-016-46", "each delivery has its eid, t and digest, live and sent again")
async def _(target: Target) -> None:
    async with target.session() as session, target.multiplexed() as wire:
        seen = {1: await session.works("reset")}
        for n in range(3):
            reply = await session.works(*target.turn(n))
            seen[session.id] = reply
        await session.wire.lose()
        await back(session, wire, last=0)
        again = {id: await session.reply(id) for id in seen}
        for id, was in seen.items():
            if was.type == "mcp" and was.get("t") is None:
                continue  # a call that names no tool delivers nothing
            for reply in (was, again[id]):
                ensure(reply.get("digest") == digest(reply.payload), f"the digest of the bytes of `data`: {reply}")
            ensure(was.get("eid") and type(was.get("t")) is int, f"a delivery without eid or t: {was}")
            place = [(reply.get("eid"), reply.get("t"), reply.get("digest")) for reply in (was, again[id])]
            ensure(place[0] == place[1], f"sent again with other eid, t or digest: {was}, then {again[id]}")


@check("R-016-22", "resume is answered first, then comes what was missed, in order")
async def _(target: Target) -> None:
    async with target.session() as session, target.multiplexed() as wire:
        await session.works("reset")
        for n in range(4):
            await session.works(*target.turn(n))
        await session.wire.lose()
        other = Session(wire)
        await wire.send(
            {
                "type": "resume",
                "data": [{"sid": other.sid, "key": other.key}, {"sid": session.sid, "key": session.key, "last": 2}],
            }
        )
        refused = await wire.take(other.mine(), "the answer to an entry of an unknown session")
        ensure(refused.code == "SESSION_LOST", f"{refused}")
        own = [await wire.take(session.mine(), "the answer to an entry")]
        if own[0].code == "SESSION_LOST":
            raise Blocked("R-016-13", f"a session whose socket was lost is kept: {own[0]}")
        own += [await wire.take(session.mine(), "a missed reply") for _ in range(3)]
        ensure(own[0].type == "resumed", f"`resumed` comes first: {own}")
        valid(own[0].value, "server.Resumed")
        ensure(
            [one.get("id") for one in own[1:]] == [3, 4, 5],
            f"replies from last + 1 on: {[o.get('id') for o in own[1:]]}",
        )
        rest = await wire.quiet()
        ensure(not rest, f"and nothing else: {rest}")


@check("R-016-23", "a request that was accepted runs to its end")
async def _(target: Target) -> None:
    slow, actions = target.probe.need("slow"), target.probe.need("step")
    async with target.session() as session, target.multiplexed() as wire:
        await session.works("reset")
        await session.wire.send(session.numbered("step", slow), session.numbered("step", actions[0]))
        await asyncio.sleep(min(0.15, target.probe.slow_s / 3))
        await session.wire.lose()
        answer = await back(session, wire, last=1)
        ensure(answer.data.get("next_id") == 4, f"two requests were accepted: {answer}")
        for id in (2, 3):
            reply = await session.reply(id)
            ensure(
                reply.type == "observation" and reply.get("t") == id - 1,
                f"accepted before the connection was lost: {reply}",
            )


@check("R-016-24", "a reply to a request from before the attachment carries `request`, no other one does")
async def _(target: Target) -> None:
    actions = target.probe.need("step")
    async with target.session() as session, target.multiplexed() as wire:
        ensure(not (await session.works("reset")).get("request"), "a reply to a fresh request carries `request`")
        sent = [("step", encode(actions[0])), ("step", "[]")]  # the second fails
        if target.probe.tool is not None:
            sent.append(("mcp", encode(rpc("tools/call", target.probe.tool))))
        sent.append(("fork", encode({"t": 0, "child": {"sid": name(), "key": name()}})))
        for id, (kind, text) in enumerate(sent, 2):
            await session.wire.send(f'{{"sid":"{session.sid}","id":{id},"type":"{kind}","data":{text}}}')
            if (await session.reply(id)).code == "UNKNOWN_TYPE":
                break
            session.id = id
        await session.wire.lose()
        await back(session, wire, last=1)
        for id, (_, text) in zip(range(2, session.id + 1), sent, strict=False):
            reply = await session.reply(id)
            ensure(reply.get("request") == digest(text), f"`request` is the digest of {text}: {reply}")
        if target.bears is not None and target.bears < 3:
            return  # the next step would be one too many
        fresh = await session.works(*target.turn(1))
        ensure(fresh.get("request") is None, f"a request of this attachment: {fresh}")


@check("R-016-25", "a session that is over says so, and gives its replies")
async def _(target: Target) -> None:
    action = target.probe.need("step")[0]
    async with target.session() as session, target.multiplexed() as wire:
        reset = await session.works("reset")
        step = await session.works("step", action)
        await session.works("close")
        session.wire = wire
        answer = await session.resumed(last=1)
        ensure(answer.code == "SESSION_CLOSED", f"{answer}")
        place = {name: answer.data.get(name) for name in ("next_id", "eid", "t")}
        ensure(place == {"next_id": 4, "eid": reset.get("eid"), "t": 1}, f"next_id, eid and t: {answer}")
        reply = await session.reply(2)
        ensure(reply.payload == step.payload, f"the recorded reply to 2: {reply}")
        ensure((await session.reply(3)).type == "closed", "the recorded reply to close")


@check("R-016-26", "a `last` beyond what was answered is SESSION_LOST, and the session stays")
async def _(target: Target) -> None:
    action = target.probe.need("step")[0]
    async with target.session() as session, target.multiplexed() as wire:
        reset = await session.works("reset")
        other = Session(wire, session.sid, session.key)
        answer = await other.resumed(last=9)
        ensure(answer.code == "SESSION_LOST", f"last 9 of 1 reply: {answer}")
        place = {name: answer.data.get(name) for name in ("next_id", "eid", "t")}
        ensure(place == {"next_id": 2, "eid": reset.get("eid"), "t": 0}, f"next_id, eid and t: {answer}")
        session.wire = wire
        again = await session.resumed(last=1)
        ensure(again.type == "resumed" and again.data.get("next_id") == 2, f"the session stays as it is: {again}")
        ensure((await session.request("step", action)).get("t") == 1, "the session goes on")


@check("R-016-26", "an ack beyond what was sent is INVALID_ENVELOPE, and acknowledges nothing")
async def _(target: Target) -> None:
    async with target.session() as session, target.multiplexed() as wire:
        reset = await session.works("reset")
        for data in ({"last": 2}, {"last_seq": 2**53 - 1}):
            await session.wire.send(session.envelope("ack", data))
            refused = await session.wire.take(session.mine(), f"the answer to ack {encode(data)} of 1 reply")
            ensure(refused.code == "INVALID_ENVELOPE", f"ack {encode(data)} of 1 reply: {refused}")
        await session.wire.lose()
        await back(session, wire, last=0)
        reply = await session.reply(1)
        ensure(reply.payload == reset.payload, f"the reply to 1 after a refused ack: {reply}")


@check("R-016-27", "an attach takes the session from the socket that had it")
async def _(target: Target) -> None:
    action = target.probe.need("step")[0]
    async with target.session() as session, target.multiplexed() as wire:
        await session.works("reset")
        first = session.wire
        await back(session, wire, last=1)
        push = await first.take(lambda m: m.type == "detached", "detached on the socket that had the session")
        ensure(push.get("sid") == session.sid and push.data.get("reason") == "taken_over", f"{push}")
        await first.send(session.envelope("step", action, id=2))
        refused = await first.take(lambda m: m.get("id") == 2, "a refusal on the old socket")
        ensure(refused.code == "NOT_ATTACHED", f"{refused}")
        step = await session.request("step", action)
        ensure(step.type == "observation" and step.get("t") == 1, f"{step}")


@check("R-016-28", "a late attach with a low fence does not take a session")
async def _(target: Target) -> None:
    action = target.probe.need("step")[0]
    async with target.multiplexed() as wire, target.multiplexed() as other:
        session = Session(wire)
        opened = await session.open(fence=5)
        ensure(opened.data.get("fence") == 5, f"{opened}")
        await session.works("reset")
        late = Session(other, session.sid, session.key)
        for fence in (4, 5):
            answer = await late.resumed(last=1, fence=fence)
            ensure(
                answer.code == "NOT_ATTACHED" and answer.data.get("fence") == 5, f"fence {fence} against 5: {answer}"
            )
        await session.works("step", action)
        answer = await late.resumed(last=2, fence=6)
        ensure(answer.type == "resumed" and answer.data.get("fence") == 6, f"fence 6 against 5: {answer}")
        session.wire = wire
        answer = await session.resumed(last=2)
        ensure(
            answer.type == "resumed" and answer.data.get("fence") == 7,
            f"without a fence an attach wins, and is one up: {answer}",
        )
