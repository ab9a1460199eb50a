"""The released protocol by version: what every OpenEnv server does, and its known defects.

A check raises `KnownDefect` if the released server of that version does not do what clients would expect and the defect
is known.
"""

from __future__ import annotations

from ..exact import encode
from ..results import Broken, KnownDefect, NotTested, ensure
from .registry import check
from .target import Target

ALL = ("0.3", "0.5", "0.10")
SINCE_5 = ("0.5", "0.10")


@check("base.health", "GET /health says healthy", profiles=ALL)
async def _(target: Target) -> None:
    answer = await target.http("GET", "/health")
    ensure(answer.status == 200 and answer.json().get("status") == "healthy", f"{answer.status} {answer.body[:200]!r}")


@check("base.schema", "GET /schema has the schemas of action, observation and state", profiles=ALL)
async def _(target: Target) -> None:
    answer = await target.http("GET", "/schema")
    ensure(answer.status == 200, f"status {answer.status}")
    missing = {"action", "observation", "state"} - set(answer.json())
    ensure(not missing, f"no {', '.join(sorted(missing))}")


@check("base.metadata", "GET /metadata has name and description", profiles=ALL)
async def _(target: Target) -> None:
    answer = await target.http("GET", "/metadata")
    found = answer.json()
    ensure(answer.status == 200 and isinstance(found.get("name"), str), f"{answer.status} {answer.body[:200]!r}")


@check("base.mcp_route", "POST /mcp answers with JSON-RPC", profiles=ALL)
async def _(target: Target) -> None:
    answer = await target.http("POST", "/mcp", {})
    ensure(answer.status == 200 and answer.json().get("jsonrpc") == "2.0", f"{answer.status} {answer.body[:200]!r}")


@check("base.connect", "/ws accepts a client", profiles=ALL)
async def _(target: Target) -> None:
    async with target.plain():
        pass


@check("base.exchange", "reset, step and state are answered, one reply for each", profiles=ALL)
async def _(target: Target) -> None:
    async with target.plain() as wire:
        first = await wire.works("reset", {})
        ensure({"observation", "reward", "done"} <= set(first.data), f"data of an observation: {first}")
        began = (await wire.works("state")).data.get("step_count")
        steps = target.steps(2)
        for action in steps:
            await wire.works("step", action)
        state = await wire.works("state")
        ensure({"episode_id", "step_count"} <= set(state.data), f"data of state: {state}")
        counted = (began, len(steps))  # an environment may leave the count as it was
        ensure(state.data["step_count"] in counted, f"step_count {len(steps)} was expected: {state}")


@check("base.episode_id", "the episode_id of reset stands in state", profiles=ALL)
async def _(target: Target) -> None:
    async with target.plain() as wire:
        await wire.works("reset", {"episode_id": "conformance-1"})
        named = (await wire.works("state")).data["episode_id"]
        if named != "conformance-1":
            await wire.works("reset", {})
            without = (await wire.works("state")).data["episode_id"]
            ensure(named in (None, without), f"episode_id was conformance-1, and is {named!r}")
            raise NotTested("the environment's state does not have the episode_id of a reset")


@check("base.extra_keys", "an observation frame has type and data and nothing else", profiles=ALL)
async def _(target: Target) -> None:
    async with target.plain() as wire:
        reply = await wire.works("reset", {})
        ensure(set(reply.value) == {"type", "data"}, f"{reply}")
        allowed = {"observation", "reward", "done", "metadata"}
        ensure(set(reply.data) <= allowed, f"data has {sorted(set(reply.data) - allowed)}")


@check("base.errors", "a bad message gets its code, and the session goes on", profiles=ALL)
async def _(target: Target) -> None:
    async with target.plain() as wire:
        await wire.works("reset", {})
        for text, code in (
            ("{", "INVALID_JSON"),
            (encode({"type": "no-such-type"}), "UNKNOWN_TYPE"),
            (encode({"type": "step"}), "VALIDATION_ERROR"),
            (encode({"type": "reset", "more": 1}), "VALIDATION_ERROR"),
        ):
            await wire.send(text)
            reply = await wire.next(f"the reply to {text}")
            ensure(reply.code == code, f"{text} has to be {code}: {reply}")
        await wire.works("step", target.probe.need("step")[0])


@check(
    "base.invalid_action", "an action that does not validate is VALIDATION_ERROR, and the session goes on", profiles=ALL
)
async def _(target: Target) -> None:
    invalid = target.probe.need("invalid")
    async with target.plain() as wire:
        await wire.works("reset", {})
        reply = await wire.ask("step", invalid)
        ensure(reply.code == "VALIDATION_ERROR", f"{reply}")
        await wire.works("step", target.probe.need("step")[0])


@check("base.exception", "an exception of the environment is EXECUTION_ERROR, and the session goes on", profiles=ALL)
async def _(target: Target) -> None:
    fails = target.probe.need("fails")
    async with target.plain() as wire:
        await wire.works("reset", {})
        reply = await wire.ask("step", fails)
        ensure(reply.code == "EXECUTION_ERROR", f"{reply}")
        await wire.works("step", target.probe.need("step")[0])


@check("base.close", "close ends the connection with 1000 and no reply", profiles=ALL)
async def _(target: Target) -> None:
    async with target.plain() as wire:
        await wire.works("reset", {})
        await wire.send({"type": "close"})
        code = await wire.ended()
        ensure(code == 1000 and not wire.messages, f"code {code}, messages {wire.messages}")


@check("base.order", "pipelined requests are answered in their order", profiles=ALL)
async def _(target: Target) -> None:
    actions = target.probe.need("step")
    async with target.plain() as wire:
        await wire.works("reset", {})
        await wire.send({"type": "step", "data": actions[0]}, {"type": "step", "data": actions[1]}, {"type": "state"})
        kinds = [(await wire.next()).type for _ in range(3)]
        ensure(kinds == ["observation", "observation", "state"], f"types {kinds}")


@check("base.session_id", "openenv/session/create makes a session that /ws?session_id= attaches", profiles=SINCE_5)
async def _(target: Target) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
    made = (await target.http("POST", "/mcp", body)).json()
    if "error" in made:
        raise NotTested(f"no session was made: {encode(made)[:200]}")
    session_id = made["result"]["session_id"]
    async with target.plain(f"?session_id={session_id}") as wire:
        await wire.works("reset", {})
        await wire.works("step", target.probe.need("step")[0])
        before = await wire.works("state")
    async with target.plain(f"?session_id={session_id}") as wire:
        state = await wire.works("state")
        ensure(state.data == before.data, f"the session is not the same after a reconnect: {before}, {state}")
    close = {"jsonrpc": "2.0", "id": 2, "method": "openenv/session/close", "params": {"session_id": session_id}}
    await target.http("POST", "/mcp", close)


@check("base.unknown_session", "an unknown session_id is refused", profiles=SINCE_5)
async def _(target: Target) -> None:
    async with target.plain("?session_id=00000000-0000-0000-0000-000000000000") as wire:
        reply = await wire.next("a refusal")
        ensure(reply.code == "SESSION_ERROR", f"{reply}")


@check("base.session_id_heeded", "an unknown session_id gives no environment", profiles=("0.3",))
async def _(target: Target) -> None:
    async with target.plain("?session_id=00000000-0000-0000-0000-000000000000") as wire:
        try:
            reply = await wire.ask("reset", {})
        except Broken:
            return  # the server refused and closed before the message came
        if reply.type == "observation":
            raise KnownDefect("session_id is ignored: the client gets another environment", "mended in OpenEnv 0.5.0")


@check("base.metadata_delivered", "metadata of an observation reaches the client", profiles=ALL)
async def _(target: Target) -> None:
    async with target.plain() as wire:
        reply = await wire.works("reset", {})
        if "metadata" not in reply.data["observation"]:
            raise KnownDefect(f"an observation arrives without its metadata: {reply}", "OpenEnv #616, mended in 0.4.0")


@check("base.array", "an array on a plain socket is an error, and the session goes on", profiles=ALL)
async def _(target: Target) -> None:
    async with target.plain() as wire:
        await wire.works("reset", {})
        reply = await wire.ask_text("[1]")
        if await wire.ended(1.0) is not None:
            raise KnownDefect(f"the session is lost: {reply}", "no issue of OpenEnv is known")


@check("base.binary", "a binary frame is read or refused, and the session goes on", profiles=ALL)
async def _(target: Target) -> None:
    async with target.plain() as wire:
        await wire.works("reset", {})
        reply = await wire.ask_text(b'{"type":"state"}')
        if await wire.ended(1.0) is not None:
            raise KnownDefect(f"the session is lost: {reply}", "no issue of OpenEnv is known")


@check("base.not_finite", "NaN from the environment is not delivered as another value", profiles=ALL)
async def _(target: Target) -> None:
    action = target.probe.need("not_finite")
    async with target.plain() as wire:
        await wire.works("reset", {})
        reply = await wire.ask("step", action)
        if reply.type == "observation":
            raise KnownDefect(f"NaN arrives as null: {reply}", "no issue of OpenEnv is known")
