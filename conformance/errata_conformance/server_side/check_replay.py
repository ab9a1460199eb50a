"""R-015-1 to 14: episodes, capabilities, and state(t)."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from ..exact import digest, encode
from ..results import Blocked, Broken, NotApplicable, NotSupported, NotTested, ensure
from ..statements import schema
from .check_markers import rpc
from .registry import check
from .sockets import Message, Wire
from .stalls import ensure_prompt
from .target import Target

EID = re.compile(r"[A-Za-z0-9_.~-]{1,128}")
NEW = ("eid", "t", "digest")


def needed(target: Target) -> None:
    """Check that the server offers state(t).

    Raises:
        NotSupported: It does not.
        NotApplicable: It runs in production mode.
    """
    if target.production:
        raise NotApplicable("the server runs in production mode, which has no replay")
    if not target.answers_capabilities:
        raise NotSupported("a plain socket answers `capabilities` with an error")
    target.offers("state_at")


async def probed(wire: Wire) -> Message:
    """Request capabilities, after which deliveries have eid and t.

    Raises:
        Broken: No answer came.
        Blocked: The answer was another message.
    """
    reply = await wire.ask("capabilities")
    if reply.type != "capabilities":
        raise Blocked("R-015-5", f"capabilities was answered with {reply}")
    return reply


async def delivered(wire: Wire, kind: str, data: Any = None) -> Message:
    """Make a delivery on a socket that has requested capabilities; return its frame, which has eid and t.

    Raises:
        Blocked: The frame has none.
    """
    reply = await wire.works(kind, data)
    if not set(NEW) <= set(reply.value):
        raise Blocked("R-015-6", f"a delivery after capabilities has no {', '.join(NEW)}: {reply}")
    return reply


async def read(wire: Wire, t: int, eid: str | None = None) -> Message:
    """Read a delivery by state(t).

    Raises:
        Blocked: It cannot be read.
    """
    reply = await wire.ask("state", {"t": t, **({} if eid is None else {"eid": eid})})
    if reply.type != "state_at":
        raise Blocked("R-015-9" if eid is None else "R-015-11", f"state(t={t}, eid={eid}) was answered with {reply}")
    return reply


@check("R-015-5", "capabilities has the form of the text, on /ws and over HTTP")
async def _(target: Target) -> None:
    if not target.answers_capabilities:
        raise NotSupported("a plain socket answers `capabilities` with an error")
    async with target.plain() as wire:
        reply = await probed(wire)
        valid(reply.data, "plain.Capabilities")
        session = reply.data.get("session")
        ensure(isinstance(session, dict), f"`session` was expected on /ws: {reply}")
        ensure(
            (session.get("eid"), session.get("t")) == (None, None),
            f"eid and t are null before the first delivery: {reply}",
        )
    answer = await target.http("GET", "/capabilities")
    ensure(answer.status == 200, f"GET /capabilities: {answer.status}")
    # Where several members serve the address, each names its own shard.
    apart = {"session", "shard"} if "fleet" in reply.data.get("extensions", {}) else {"session"}
    here, there = ({k: v for k, v in found.items() if k not in apart} for found in (reply.data, answer.json()))
    ensure(there == here, f"GET /capabilities differs from /ws: {answer.body[:400]!r}, {encode(here)[:400]}")


def valid(value: Any, name: str) -> None:
    """Check a value against a schema.

    Raises:
        Broken: It is not valid.
    """
    found = next(iter(jsonschema.Draft202012Validator(schema(name)).iter_errors(value)), None)
    if found is not None:
        raise Broken(f"{name}: {found.json_path}: {found.message[:300]}")


@check("R-015-6", "frames are as before until capabilities was sent, and name their place from then on")
async def _(target: Target) -> None:
    needed(target)
    async with target.plain() as wire:
        for reply in (await wire.works("reset", {}), await wire.works(*target.turn(0))):
            ensure(set(reply.value) == {"type", "data"}, f"before capabilities a frame has type and data only: {reply}")
        await probed(wire)
        reply = await wire.works(*target.turn(1))
        ensure(
            set(reply.value) == {"type", "data", *NEW}, f"after capabilities a delivery has eid, t and digest: {reply}"
        )
        ensure(reply.get("digest") == digest(reply.payload), f"the digest is not that of the bytes of data: {reply}")
        ensure(set((await wire.works("state")).value) == {"type", "data"}, "a state frame has type and data only")


@check("R-015-1", "each reset begins an episode with a new eid")
async def _(target: Target) -> None:
    needed(target)
    async with target.plain() as wire, target.plain() as other:
        await probed(wire)
        await probed(other)
        named = await wire.ask("reset", {"episode_id": "same"})
        given = {"episode_id": "same"} if named.type == "observation" else {}
        eids = [(await delivered(one, "reset", given)).get("eid") for one in (wire, wire, other)]
        ensure(all(isinstance(eid, str) and EID.fullmatch(eid) for eid in eids), f"eids {eids}")
        ensure(len(set(eids)) == 3, f"three resets have eids {eids}")


@check("R-015-3", "t counts deliveries, and nothing else")
async def _(target: Target) -> None:
    needed(target)
    action = target.probe.need("step")[0]
    async with target.plain() as wire:
        await probed(wire)
        ensure((await delivered(wire, "reset", {})).get("t") == 0, "t of a reset is 0")
        await wire.ask("no-such-type")
        await wire.works("state")
        await probed(wire)
        if target.probe.fails is not None:
            await wire.ask("step", target.probe.fails)
        await wire.ask("mcp", rpc("tools/list", {}))
        t = (await delivered(wire, "step", action)).get("t")
        ensure(t == 1, f"errors, state, capabilities and tools/list do not count: t={t} of the first step, not 1")
        t = (await delivered(wire, *target.turn(1))).get("t")
        ensure(t == target.turn_t(1), f"t={t} of the next delivery, not {target.turn_t(1)}")
        if target.probe.tool is not None:
            called = await wire.ask("mcp", rpc("tools/call", target.probe.tool))
            if called.code == "UNKNOWN_TYPE":
                return  # a server without MCP
            ensure(called.get("t") == t + 1, f"a tools/call of the session counts: {called}")
            after = (await delivered(wire, "step", action)).get("t")
            ensure(after == t + 2, f"the step after a tools/call at t={t + 1} has t={after}")


@check("R-015-9", "state(t) has the bytes that were delivered")
async def _(target: Target) -> None:
    needed(target)
    async with target.plain() as wire:
        seen = [await wire.works("reset", {})]
        await probed(wire)
        seen += [await wire.works("step", action) for action in target.steps(6)]
        for t, message in enumerate(seen):
            reply = await wire.ask("state", {"t": t})
            ensure(reply.type == "state_at", f"state(t={t}) was answered with {reply}")
            ensure(
                reply.payload == message.payload,
                f"t={t}: delivered {message.payload[:200]}, read {reply.payload[:200]}",
            )
            ensure(reply.get("digest") == digest(reply.payload), f"t={t}: the digest is not that of the bytes of data")
            ensure((reply.get("t"), reply.get("kind")) == (t, "step" if t else "reset"), f"t={t}: {reply}")
            valid(reply.value, "plain.StateAtFrame")


@check("R-015-10", "reading does not run, change or wait for the environment")
async def _(target: Target) -> None:
    needed(target)
    action = target.probe.need("step")[0]
    async with target.plain() as wire, target.plain() as reader:
        await probed(wire)
        eid = (await delivered(wire, "reset", {})).get("eid")
        await delivered(wire, "step", action)
        before = await wire.works("state")
        for t in (0, 1, 1):
            await read(wire, t)
        ensure((await wire.works("state")).payload == before.payload, f"state was {before} before reading")
        if target.bears != 1:
            t = (await delivered(wire, "step", action)).get("t")
            ensure(t == 2, f"reading counted: the next step has t={t}, not 2")
        if target.probe.slow is None:
            return

        async def measured() -> dict[str, float]:
            nonlocal eid
            eid = (await delivered(wire, "reset", {})).get("eid")
            await wire.send({"type": "step", "data": target.probe.slow})
            await asyncio.sleep(min(0.1, target.probe.slow_s / 4))
            reply = await read(reader, 0, eid)
            return {"reading": (await wire.next("the slow step")).at - reply.at}

        await ensure_prompt(target.probe.slow_s, measured, lambda: read(reader, 0, eid))


@check("R-015-10", "replies on one socket stay in the order of the requests")
async def _(target: Target) -> None:
    needed(target)
    action = target.probe.need("step")[0]
    async with target.plain() as wire:
        await probed(wire)
        await delivered(wire, "reset", {})
        wanted: list[tuple[dict[str, Any], tuple[str, ...]]] = [
            ({"type": "state"}, ("state",)),
            ({"type": "step", "data": action}, ("observation",)),
            ({"type": "state", "data": {"t": 0}}, ("state_at",)),
            ({"type": "no-such-type"}, ("error",)),
            ({"type": "capabilities"}, ("capabilities",)),
            ({"type": "mcp", "data": rpc("tools/list", {})}, ("mcp", "error")),
        ]
        if target.probe.tool is not None:
            wanted.append(({"type": "mcp", "data": rpc("tools/call", target.probe.tool)}, ("mcp", "error")))
        wanted.append(({"type": "state"}, ("state",)))
        await wire.send(*[message for message, _ in wanted])
        for message, types in wanted:
            reply = await wire.next(f"the reply to {encode(message)[:120]}")
            if not any(reply.type in expected for _, expected in wanted):
                raise Blocked("R-015-8", f"no request asked for it: {reply}")
            ensure(reply.type in types, f"{encode(message)[:120]} was answered with {reply}")


@check("R-015-11", "eid reaches episodes of other sessions, running and ended")
async def _(target: Target) -> None:
    needed(target)
    async with target.plain() as wire, target.plain() as reader:
        await probed(wire)
        first = await delivered(wire, "reset", {})
        await delivered(wire, "reset", {})
        for one in (wire, reader):
            reply = await one.ask("state", {"t": 0, "eid": first.get("eid")})
            ensure(reply.type == "state_at" and reply.payload == first.payload, f"{reply}")
            ensure(reply.get("eid") == first.get("eid"), f"{reply}")


@check("R-015-4", "deliveries stay readable while the session lives")
async def _(target: Target) -> None:
    needed(target)
    async with target.plain() as wire:
        await probed(wire)
        seen = [await delivered(wire, "reset", {})]
        seen += [await delivered(wire, "step", action) for action in target.steps(40)]
        for _ in range(41 - len(seen)):  # an episode that cannot have so many: others come after it
            await delivered(wire, "reset", {})
        await delivered(wire, "reset", {})
        last = len(seen) - 1
        for t in sorted({0, 1, last // 2, last}):
            reply = await wire.ask("state", {"t": t, "eid": seen[0].get("eid")})
            ensure(
                reply.type == "state_at" and reply.payload == seen[t].payload,
                f"t={t} of {last}, after another reset: {reply}",
            )


@check("R-015-12", "errors of state(t) have their code and fields, and the session goes on")
async def _(target: Target) -> None:
    needed(target)
    async with target.plain() as wire:
        reply = await wire.ask("state", {"t": 0})
        ensure(reply.code == "NO_RESET", f"before the first delivery: NO_RESET was expected: {reply}")
        await probed(wire)
        eid = (await delivered(wire, "reset", {})).get("eid")
        reply = await wire.ask("state", {"t": 7})
        ensure(reply.code == "T_OUT_OF_RANGE", f"t=7 of 1 delivery: {reply}")
        fields = {name: reply.data.get(name) for name in ("eid", "t", "deliveries")}
        ensure(fields == {"eid": eid, "t": 7, "deliveries": 1}, f"T_OUT_OF_RANGE has {fields}")
        reply = await wire.ask("state", {"t": 0, "eid": "ep_no_such_episode"})
        ensure(reply.code == "UNKNOWN_EPISODE" and reply.data.get("eid") == "ep_no_such_episode", f"{reply}")
        bad: tuple[Any, ...] = (
            {},
            {"t": -1},
            {"t": 1.5},
            {"t": True},
            {"t": "0"},
            {"t": 0, "more": 1},
            {"t": 2**53},
            [],
        )
        for data in (*bad, {"t": 0, "eid": 1}):
            reply = await wire.ask("state", data)
            ensure(reply.code == "VALIDATION_ERROR", f"state with data {encode(data)}: {reply}")
        reply = await wire.ask("state", {"t": 0}, more=1)
        ensure(reply.code == "VALIDATION_ERROR", f"state with another key: {reply}")
        ensure(
            (await delivered(wire, "step", target.probe.need("step")[0])).get("t") == 1, "the session goes on at t=1"
        )


@check("R-015-8", "nothing comes that no request asked for")
async def _(target: Target) -> None:
    needed(target)
    async with target.plain() as wire:
        await probed(wire)
        await delivered(wire, "reset", {})
        step = await delivered(wire, "step", target.probe.need("step")[0])
        if "delayed_rewards" in target.extensions:
            reward = {"t": 1, "value": 0.5, "source": "conformance", "reward_id": "r-015-8"}
            await target.http("POST", f"/episodes/{step.get('eid')}/rewards", reward)
        came = await wire.quiet(max(0.5, target.quiet_s))
        ensure(not came, f"unsolicited: {came}")


@check("R-015-14", "GET /episodes/{eid}/states/{t} answers with the payload and its digest as ETag")
async def _(target: Target) -> None:
    needed(target)
    async with target.plain() as wire:
        await probed(wire)
        first = await delivered(wire, "reset", {})
        path = f"/episodes/{first.get('eid')}/states"
        answer = await target.http("GET", f"{path}/0")
        ensure(answer.status == 200, f"GET {path}/0: {answer.status} {answer.body[:200]!r}")
        ensure(answer.body == first.payload.encode(), f"the body is not the payload: {answer.body[:300]!r}")
        kind = answer.headers.get("content-type", "").split(";")[0]
        ensure(kind == "application/json", f"content-type {kind}")
        etag = answer.headers.get("etag")
        ensure(etag == f'"{digest(first.payload)}"', f"ETag {etag}")
        again = await target.http("GET", f"{path}/0", headers={"If-None-Match": str(etag)})
        ensure(again.status == 304 and not again.body, f"If-None-Match: {again.status}")
        for where, status, code in (
            (f"{path}/9", 404, "T_OUT_OF_RANGE"),
            ("/episodes/ep_no_such_episode/states/0", 404, "UNKNOWN_EPISODE"),
            (f"{path}/-1", 422, "VALIDATION_ERROR"),
            (f"{path}/x", 422, "VALIDATION_ERROR"),
        ):
            answer = await target.http("GET", where)
            found = answer.json()
            ensure(
                (answer.status, found.get("code")) == (status, code),
                f"GET {where}: {answer.status} {answer.body[:200]!r}",
            )
            ensure("message" in found, f"GET {where}: no message: {answer.body[:200]!r}")


@check("R-015-29", "an episode is not there for another principal")
async def _(target: Target) -> None:
    needed(target)
    if target.other_token is None:
        raise NotTested("two principals are needed: give --token and --other-token")
    async with target.plain() as wire, target.plain(token=target.other_token) as other:
        await probed(wire)
        eid = (await delivered(wire, "reset", {})).get("eid")
        unknown = "ep_" + "0" * (len(eid) - 3)
        for one in (eid, unknown):
            reply = await other.ask("state", {"t": 0, "eid": one})
            ensure(reply.code == "UNKNOWN_EPISODE", f"another principal's state(t): {reply}")
            answer = await target.http("GET", f"/episodes/{one}/states/0", token=target.other_token)
            ensure(answer.status == 404, f"another principal's GET: {answer.status}")
            body = {"t": 0, "request_id": "conformance"}
            answer = await target.http("POST", f"/episodes/{one}/fork", body, token=target.other_token)
            ensure(answer.status == 404, f"another principal's fork: {answer.status} {answer.body[:200]!r}")


@check("R-015-28", "no MCP tool or method replays or forks")
async def _(target: Target) -> None:
    needed(target)
    async with target.plain() as wire:
        await probed(wire)
        await delivered(wire, "reset", {})
        reply = await wire.ask("mcp", rpc("tools/list", {}))
        if reply.code == "UNKNOWN_TYPE":
            raise NotApplicable("the server has no MCP")
        listed = reply.data
        result = listed.get("result") if isinstance(listed, dict) else None
        names = [tool.get("name", "") for tool in (result or {}).get("tools", [])]
        bad = [name for name in names if re.search(r"fork|replay|state_at|restore|rewind", name)]
        ensure(not bad, f"tools/list names {bad}")
        for method in (
            "openenv/session/fork",
            "openenv/fork",
            "openenv/state_at",
            "openenv/session/state_at",
            "openenv/replay",
        ):
            answer = (await wire.ask("mcp", rpc(method, {"t": 0}))).data
            ensure("error" in answer, f"the MCP method {method} is answered: {encode(answer)[:200]}")


@check("R-015-31", "production mode has no replay and no fork")
async def _(target: Target) -> None:
    if not target.production:
        raise NotTested("give --production for a server that runs in production mode")
    async with target.plain() as wire:
        reply = await probed(wire)
        offered = {"state_at", "fork"} & set(reply.data.get("extensions", {}))
        ensure(not offered, f"extensions names {sorted(offered)}")
        first = await delivered(wire, "reset", {})
        answer = await wire.ask("state", {"t": 0})
        ensure(answer.code == "VALIDATION_ERROR", f"state with data: {answer}")
        for method, where in (("GET", "states/0"), ("POST", "fork")):
            found = await target.http(
                method,
                f"/episodes/{first.get('eid')}/{where}",
                {"t": 0, "request_id": "r"} if method == "POST" else None,
            )
            ensure(found.status in (404, 405), f"{method} /episodes/…/{where}: {found.status}")
