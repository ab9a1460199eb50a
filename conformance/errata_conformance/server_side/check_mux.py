"""R-016-1 to 14: the socket, its envelopes, and sessions."""

from __future__ import annotations

import asyncio

from websockets.exceptions import InvalidHandshake, NegotiationError

from ..exact import encode
from ..results import Blocked, Broken, NotSupported, NotTested, ensure
from .check_fork import alike, branch
from .check_markers import rpc
from .check_replay import valid
from .registry import check
from .sockets import Message, Session, name
from .stalls import ensure_prompt
from .target import MUX, Target


def spoken(target: Target) -> None:
    """Check that the server accepts the subprotocol.

    Raises:
        NotSupported: It does not.
    """
    if not target.speaks_mux:
        raise NotSupported(f"the server does not name {MUX} in its handshake")


@check("R-016-2", "the subprotocol is named only where it was offered, and mux stands in extensions")
async def _(target: Target) -> None:
    spoken(target)
    for offered in (None, ["chat"]):
        try:
            async with target.connected(offered) as wire:
                ensure(wire.socket.subprotocol is None, f"offered {offered}, named {wire.socket.subprotocol}")
        except NegotiationError as error:
            raise Broken(f"offered {offered}: {error}") from None
    async with target.connected(["chat", MUX]) as wire:
        ensure(wire.mux, f"{MUX} was offered second, and named {wire.socket.subprotocol}")
    ensure(target.extensions.get("mux") == 1, f"extensions: {target.extensions}")


@check("R-016-3", "a frame is one envelope or an array, whose elements are admitted alone")
async def _(target: Target) -> None:
    spoken(target)
    missing = {
        "max_frame",
        "max_elements",
        "in_flight_socket",
        "in_flight_session",
        "detach_ttl_s",
    } - set(target.limits)
    ensure(not missing, f"capabilities: limits has no {', '.join(sorted(missing))}")
    async with target.multiplexed() as wire:
        first, second = Session(wire), Session(wire)
        await wire.send(
            [
                first.envelope("open", {"key": first.key}),
                {"sid": first.sid, "id": 1, "type": "no_such_type"},
                second.envelope("open", {"key": second.key}),
            ]
        )
        for session in (first, second):
            answer = await wire.take(session.mine(lambda m: m.get("id") is None), "the answer to open in an array")
            ensure(answer.type == "opened", f"{answer}")
        refusal = await first.reply(1)
        ensure(refusal.code == "UNKNOWN_TYPE", f"{refusal}")
        if target.limits.get("max_elements", 0) <= 4096:
            frame = [{"q": n + 1, "type": "capabilities"} for n in range(target.limits["max_elements"] + 1)]
            await wire.send(frame)
            reply = await wire.next("FRAME_TOO_LARGE for an array over max_elements")
            ensure(reply.code == "FRAME_TOO_LARGE" and reply.get("sid") is None, f"{reply}")
            await wire.send(frame[:-1])
            for n in range(target.limits["max_elements"]):
                await wire.take(lambda m, n=n: m.get("q") == n + 1, f"element {n} of max_elements")  # type: ignore[misc]


@check("R-016-4", "an unknown field of a client's envelope is INVALID_ENVELOPE")
async def _(target: Target) -> None:
    async with target.session() as session:
        for more in ({"note": 1}, {"eid": "x"}, {"t": 0}, {"digest": ""}, {"seq": 1}):
            await session.wire.send(session.envelope("reset", id=1, **more))
            reply = await session.reply(1)
            ensure(reply.code == "INVALID_ENVELOPE", f"a reset with {encode(more)}: {reply}")
        await session.works("reset")


@check("R-016-5", "a frame is read strictly before anything of it takes effect")
async def _(target: Target) -> None:
    async with target.session() as session:
        sid = session.sid
        deep = "[" * 65 + "]" * 65
        for text, codes in (
            (f'{{"sid":"{sid}","id":1,"id":1,"type":"reset"}}', ("INVALID_ENVELOPE", "INVALID_JSON")),
            (f'{{"sid":"{sid}","id":1.0,"type":"reset"}}', ("INVALID_ENVELOPE",)),
            (f'{{"sid":"{sid}","id":true,"type":"reset"}}', ("INVALID_ENVELOPE",)),
            (f'{{"sid":"{sid}","id":"1","type":"reset"}}', ("INVALID_ENVELOPE",)),
            (f'{{"sid":"{sid}","id":0,"type":"reset"}}', ("INVALID_ENVELOPE",)),
            (f'{{"sid":"{sid}","id":9007199254740992,"type":"reset"}}', ("INVALID_ENVELOPE",)),
            (f'{{"sid":"{sid}","id":1,"type":"reset","data":{{"x":{deep}}}}}', ("INVALID_ENVELOPE", "INVALID_JSON")),
            (f'[{{"sid":"{sid}","id":1,"type":"reset"}},{{"sid":"{sid}","id":2', ("INVALID_JSON",)),
            (f'{{"sid":"{sid}","id":1,"type":"reset","data":{{"seed":NaN}}}}', ("INVALID_JSON",)),
        ):
            await session.wire.send(text)
            try:
                reply = await session.wire.next(f"the answer to {text[:120]}")
            except Broken as error:
                raise Blocked("R-016-6", str(error)) from None
            ensure(reply.code in codes, f"{text[:120]}: {' or '.join(codes)} was expected: {reply}")
        await session.works("reset")


@check("R-016-6", "what cannot be read is answered by its table, and uses no id")
async def _(target: Target) -> None:
    async with target.session() as session:
        wire, sid = session.wire, session.sid
        for text in ("{", "[]", "nothing", ""):
            await wire.send(text)
            reply = await wire.next(f"the answer to {text!r}")
            ensure(reply.code == "INVALID_JSON" and reply.value.get("sid", 0) is None, f"{text!r}: {reply}")
        for bad, code in (
            ({"sid": sid, "id": 1, "type": "no_such_type"}, "UNKNOWN_TYPE"),
            ({"sid": sid, "type": "reset"}, "INVALID_ENVELOPE"),
            ({"sid": sid, "id": 1, "q": 1, "type": "reset"}, "INVALID_ENVELOPE"),
            ({"sid": "short", "id": 1, "type": "reset"}, "INVALID_ENVELOPE"),
            ({"sid": sid, "q": 1, "type": "state", "data": {"t": "0"}}, "INVALID_ENVELOPE"),
            ({"sid": sid, "q": 1, "type": "state", "data": {"eid": "ep_of_nobody"}}, "INVALID_ENVELOPE"),
            ({"sid": sid, "id": 1, "type": "close", "deadline_ms": -1}, "INVALID_ENVELOPE"),
            ({"sid": name(), "type": "open"}, "INVALID_ENVELOPE"),
            ({"sid": name(), "type": "open", "data": {"key": "short"}}, "INVALID_ENVELOPE"),
            ({"sid": name(), "type": "open", "data": {"key": name(), "more": 1}}, "INVALID_ENVELOPE"),
        ):
            await wire.send([{"q": 7, "type": "capabilities"}, bad])
            got = [await wire.next("an answer"), await wire.next(f"the answer to {encode(bad)}")]
            error = next((one for one in got if one.type == "error"), None)
            ensure(error is not None and error.code == code, f"{encode(bad)}: {code} was expected: {got}")
            ensure(error is not None and error.get("index") == 1, f"index 1 was expected: {error}")
            for field in ("id", "q"):
                ensure(
                    error is not None and error.get(field) == bad.get(field), f"{field} as far as well-formed: {error}"
                )
            ensure(any(one.type == "capabilities" for one in got), f"the other element is admitted: {got}")
        await session.works("reset")
        reply = await session.request("step", [])
        ensure(
            reply.code == "VALIDATION_ERROR" and reply.get("index") is None,
            f"ill-formed data of step is VALIDATION_ERROR: {reply}",
        )
        again = await session.request("step", target.probe.need("step")[0])
        ensure(again.type == "observation", f"VALIDATION_ERROR is recorded, so the next id follows: {again}")


@check("R-016-7", "open makes a session, and the same open is the same session")
async def _(target: Target) -> None:
    spoken(target)
    action = target.probe.need("step")[0]
    async with target.multiplexed() as wire:
        session = Session(wire)
        opened = await session.opened()
        ensure(opened.type == "opened", f"{opened}")
        valid(opened.value, "server.Opened")
        first = {k: opened.data.get(k) for k in ("next_id", "eid", "t", "seq")}
        ensure(first == {"next_id": 1, "eid": None, "t": None, "seq": 0}, f"a new session: {opened}")
        reset = await session.request("reset")
        ensure(reset.type == "observation", f"{reset}")
        step = await session.request("step", action)
        again = await session.opened()
        place = {k: again.data.get(k) for k in ("next_id", "eid", "t")}
        ensure(place == {"next_id": 3, "eid": reset.get("eid"), "t": 1}, f"open again: {again}")
        for id, seen in ((1, reset), (2, step)):
            reply = await session.reply(id)
            ensure(reply.payload == seen.payload, f"the reply to {id} again: {reply}")


@check("R-016-9", "a wrong key and an unknown session are answered alike")
async def _(target: Target) -> None:
    async with target.session() as session, target.multiplexed() as wire:
        await session.works("reset")
        answers = []
        for sid in (session.sid, name()):
            await wire.send({"type": "resume", "data": [{"sid": sid, "key": name()}]})
            answers.append(await wire.take(lambda m, sid=sid: m.get("sid") == sid, "the answer to resume"))  # type: ignore[misc]
        for answer in answers:
            ensure(answer.code == "SESSION_LOST", f"{answer}")
            ensure(set(answer.data) == {"code", "message"}, f"no further fields: {answer}")
        ensure(answers[0].data == answers[1].data, f"the answers differ: {answers}")
        other = Session(wire, session.sid)
        answer = await other.opened()
        ensure(
            answer.code == "SESSION_LOST" and set(answer.data) == {"code", "message"},
            f"open with a wrong key: {answer}",
        )
        await session.works("step", target.probe.need("step")[0])


@check("R-016-10", "a message about a session that is not attached is NOT_ATTACHED")
async def _(target: Target) -> None:
    async with target.session() as session, target.multiplexed() as wire:
        await session.works("reset")
        for sid in (session.sid, name()):
            await wire.send(
                {"sid": sid, "id": 2, "type": "step", "data": target.probe.need("step")[0]},
                {"sid": sid, "q": 1, "type": "state"},
            )
            for _ in range(2):
                reply = await wire.next("a refusal")
                ensure(reply.code == "NOT_ATTACHED", f"{reply}")
        await session.works("step", target.probe.need("step")[0])


@check("R-016-11", "requests may follow their open at once")
async def _(target: Target) -> None:
    spoken(target)
    action = target.probe.need("step")[0]
    async with target.multiplexed() as wire:
        for together in (True, False):
            session = Session(wire)
            messages = [
                session.envelope("open", {"key": session.key}),
                session.numbered("reset"),
                session.numbered("step", action),
            ]
            await wire.send(*([messages] if together else messages))
            opened = await wire.take(session.mine(), "the answer to open")
            ensure(opened.type == "opened", f"{opened}")
            for id in (1, 2):
                reply = await session.reply(id)
                ensure(reply.type == "observation" and reply.get("t") == id - 1, f"{reply}")
            await session.works("close")


@check("R-016-12", "a session's requests run in order; sessions and reads do not wait for each other")
async def _(target: Target) -> None:
    slow, actions = target.probe.need("slow"), target.probe.need("step")
    async with target.session() as session:
        wire = session.wire
        other = Session(wire)
        await other.open()

        async def asked() -> dict[str, Message]:
            await wire.send(other.numbered("step", actions[0]))
            replies = {"a step of another session": await other.reply()}
            if "state_at" in target.extensions:
                replies["a read of t=0"] = await session.read("state", {"t": 0})
            return replies

        async def measured() -> dict[str, float]:
            await session.works("reset")
            await other.works("reset")
            ids = session.numbered("step", slow), session.numbered("step", actions[0])
            for request in ids:
                await wire.send(request)
            await asyncio.sleep(min(0.05, target.probe.slow_s / 8))
            early = await asked()
            first, second = [await session.reply(request["id"]) for request in ids]
            ensure(first.get("t") == 1 and second.get("t") == 2, f"{first}, {second}")
            ensure(second.at >= first.at, "the second step was answered before the first")
            return {what: first.at - reply.at for what, reply in early.items()}

        await ensure_prompt(target.probe.slow_s, measured, asked)


@check("R-016-14", "close_group ends the group's sessions wherever they are attached")
async def _(target: Target) -> None:
    spoken(target)
    group = name()
    async with target.multiplexed() as wire, target.multiplexed() as other, target.multiplexed() as third:
        sessions = [Session(wire), Session(other), Session(wire)]
        for session, of in zip(sessions, (group, group, name()), strict=True):
            await session.open(group=of)
            await session.works("reset")
        await third.send({"q": 1, "type": "close_group", "data": {"group": group}})
        closed = await third.take(lambda m: m.get("q") == 1, "the answer to close_group")
        unsupported(closed)
        ensure(closed.type == "group_closed" and closed.data.get("closed") == 2, f"2 closed: {closed}")
        for session in sessions[:2]:
            push = await session.wire.take(
                session.mine(lambda m: m.type == "detached"), "detached for a session of the group"
            )
            ensure(push.data.get("reason") == "closed", f"{push}")
            answer = await Session(third, session.sid, session.key).resumed()
            if answer.code == "SESSION_LOST":
                raise Blocked("R-016-25", f"resume of a session of a closed group: {answer}")
            ensure(answer.code == "SESSION_CLOSED", f"resume of a session of the group: {answer}")
        await sessions[2].works("step", target.probe.need("step")[0])


def unsupported(reply: Message) -> None:
    """Check that the server knows a message that small servers may leave out.

    Raises:
        NotSupported: It answered UNKNOWN_TYPE.
    """
    if reply.code == "UNKNOWN_TYPE":
        raise NotSupported(f"the server does not know the message: {reply}")


@check("R-016-39", "fork makes a session under the child's sid and key")
async def _(target: Target) -> None:
    target.offers("fork")
    t, steps = branch(target), target.steps(2)
    async with target.session() as session:
        wire = session.wire
        reset = await session.works("reset")
        seen = [reset, *[await session.works("step", action) for action in steps]]
        child = Session(wire)
        forked = await session.request("fork", {"t": t, "child": {"sid": child.sid, "key": child.key}})
        unsupported(forked)
        ensure(forked.type == "forked", f"{forked}")
        ensure(forked.data.get("sid") == child.sid and forked.data.get("t") == 0, f"{forked}")
        ensure(forked.data.get("origin") == {"eid": reset.get("eid"), "t": t}, f"{forked}")
        await wire.send(child.envelope("step", steps[-1], id=1))
        refused = await child.reply(1)
        ensure(refused.code == "NOT_ATTACHED", f"a child is not attached: {refused}")
        opened = await child.open()
        ensure((opened.data.get("eid"), opened.data.get("t")) == (forked.data["eid"], 0), f"{opened}")
        step = await child.request("step", steps[-1])
        ensure(step.type == "observation" and step.get("t") == 1, f"the child's first step: {step}")
        alike(target, step, seen[-1], t)
        taken = await session.request("fork", {"t": 1, "child": {"sid": child.sid, "key": name()}})
        ensure(taken.code == "VALIDATION_ERROR", f"a taken sid: {taken}")
        late = await session.request("fork", {"t": 9, "child": {"sid": name(), "key": name()}})
        ensure(late.code == "T_OUT_OF_RANGE", f"t beyond the last delivery: {late}")
        await session.works(*target.turn(len(steps)))


@check("R-016-42", "no MCP method opens, resumes, forks or rewards")
async def _(target: Target) -> None:
    async with target.session() as session:
        await session.works("reset")
        for method in (
            "openenv/session/open",
            "openenv/session/resume",
            "openenv/session/fork",
            "openenv/session/rewards",
        ):
            session.q += 1
            q = session.q
            await session.wire.send(session.envelope("mcp", rpc(method, {}), q=q))
            reply = await session.wire.take(session.mine(lambda m, q=q: m.get("q") == q), f"the reply to {method}")  # type: ignore[misc]
            unsupported(reply)
            ensure(reply.type == "error" or "error" in reply.data, f"the MCP method {method} is answered: {reply}")
        listed = await session.read("mcp", rpc("tools/list", {}))
        tools = ((listed.data or {}).get("result") or {}).get("tools", []) if listed.type == "mcp" else []
        bad = [
            one.get("name")
            for one in tools
            if any(word in one.get("name", "") for word in ("session", "fork", "resume", "reward"))
        ]
        ensure(not bad, f"tools/list names {bad}")


@check("R-016-43", "the handshake is authenticated as that of /ws")
async def _(target: Target) -> None:
    spoken(target)
    if target.token is None:
        raise NotTested("give --token for a server that asks for one")
    refused = {}
    for offered in (None, [MUX]):
        try:
            async with target.connected(offered, bare=True) as wire:
                reply = None
                if wire.mux:
                    await wire.send(Session(wire).envelope("open", {"key": name()}))
                try:
                    reply = await wire.next(within=target.quiet_s)
                except Broken:
                    pass
                refused[bool(offered)] = wire.closed is not None or (reply is not None and reply.type == "error")
        except InvalidHandshake:
            refused[bool(offered)] = True
    ensure(refused[True], "a handshake without a token opens a multiplexed socket")
    ensure(refused[True] == refused[False], f"plain and multiplexed sockets differ: {refused}")


@check("R-016-44", "ids of plain sessions and sids are separate")
async def _(target: Target) -> None:
    async with target.session() as session:
        await session.works("reset")
        async with target.plain(f"?session_id={session.sid}") as wire:
            try:
                await wire.send({"type": "state"})
                reply = await wire.next("a refusal of a sid as session_id")
            except Broken:
                reply = None
            ensure(reply is None or reply.type == "error", f"/ws?session_id=SID found a session: {reply}")
        body = rpc("tools/list", {"session_id": session.sid})
        answer = (await target.http("POST", "/mcp", body)).json()
        body["params"] = {"session_id": "00000000-0000-0000-0000-000000000000"}
        unknown = (await target.http("POST", "/mcp", body)).json()
        ensure(("error" in answer) == ("error" in unknown), f"MCP found a multiplexed session: {encode(answer)[:200]}")


@check("R-016-45", "production mode keeps the socket, and nothing of replay and rewards")
async def _(target: Target) -> None:
    spoken(target)
    if not target.production:
        raise NotTested("give --production for a server that runs in production mode")
    async with target.session() as session:
        reset = await session.works("reset")
        reply = await session.read("state", {"t": 0})
        ensure(reply.code == "NOT_SUPPORTED", f"state(t): {reply}")
        reply = await session.request("fork", {"t": 0, "child": {"sid": name(), "key": name()}})
        ensure(reply.code == "NOT_SUPPORTED", f"fork: {reply}")
        for method, body in (("GET", None), ("POST", {"t": 0, "value": 1.0, "source": "x", "reward_id": "x"})):
            answer = await target.http(method, f"/episodes/{reset.get('eid')}/rewards", body)
            ensure(answer.status in (404, 405), f"{method} …/rewards: {answer.status}")
