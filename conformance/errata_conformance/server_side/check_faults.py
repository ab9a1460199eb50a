"""Checks that make faults: they flood the server, stop it and kill it. They run with ``--faults`` only."""

from __future__ import annotations

import asyncio
import time

from ..exact import encode
from ..results import Blocked, Broken, NotTested, ensure
from .check_lost import back
from .check_mux import spoken
from .registry import check
from .sockets import Session, name
from .target import Target

UP_S = 60.0
"""How long a server may take to come up again, in seconds."""


async def shell(command: str) -> None:
    """Run a shell command.

    Raises:
        NotTested: It failed.
    """
    process = await asyncio.create_subprocess_shell(
        command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    if process.returncode:
        raise NotTested(f"{command!r} exits with {process.returncode}: {errors.decode()[-300:]}")


async def up(target: Target) -> None:
    """Start the server again, and wait until it answers.

    Raises:
        NotTested: It does not come up.
    """
    if target.start is None:
        raise NotTested("a command that starts the server again is needed: --start")
    await shell(target.start)
    deadline = time.monotonic() + UP_S
    while time.monotonic() < deadline:
        try:
            if (await target.http("GET", "/health")).status == 200:
                return
        except Broken:
            await asyncio.sleep(0.2)
    raise NotTested(f"the server did not answer within {UP_S:.0f} s after {target.start!r}")


@check("R-016-16", "a storm of lost connections doubles and loses nothing", alone=True)
async def _(target: Target) -> None:
    spoken(target)
    async with target.multiplexed() as wire:
        session = Session(wire)
        await session.open(fence=1)
        await session.works("reset")
        sent, last, fence = {}, 1, 1
        for id in range(2, 32):
            sent[id] = session.envelope(*target.turn(id - 2), id=id)
        while last < 31:
            async with target.multiplexed() as other:
                fence += 1
                answer = await back(session, other, last=last, fence=fence)
                following = answer.data["next_id"]
                await other.send(*[sent[id] for id in range(following, min(following + 6, 32))])
                for id in range(last + 1, min(following + 3, 32)):
                    reply = await session.reply(id)
                    ensure(reply.type == "observation" and reply.get("t") == target.turn_t(id - 2), f"id {id}: {reply}")
                    last = id
                await other.lose()
        async with target.multiplexed() as end:
            answer = await back(session, end, last=31, fence=fence + 1)
            place = (answer.data.get("next_id"), answer.data.get("t"))
            ensure(
                place == (32, target.turn_t(29)), f"31 requests were sent, the session stands at next_id, t = {place}"
            )


@check("R-016-6", "a flood of bad frames costs nobody else's session", alone=True)
async def _(target: Target) -> None:
    async with target.session() as session, target.multiplexed() as flood:
        await session.works("reset")
        for _ in range(300):
            await flood.send(
                "{", "[]", encode({"type": "x"}), encode({"sid": name(), "id": 1, "type": "step", "data": {}})
            )
        await session.works("step", target.probe.need("step")[0])
        codes = [(await flood.next("an answer to a bad frame")).code for _ in range(1200)]
        ensure(set(codes) == {"INVALID_JSON", "UNKNOWN_TYPE", "NOT_ATTACHED"}, f"codes {set(codes)}")
        await session.works("step", target.probe.need("step")[1])


@check("R-016-38", "a server that stops says goaway, answers what it accepted, and closes with 1012", alone=True)
async def _(target: Target) -> None:
    if target.stop is None:
        raise NotTested("a command that stops the server is needed: --stop")
    slow = target.probe.need("slow")
    stopping = None
    async with target.session() as session:
        wire = session.wire
        await session.works("reset")
        await wire.send(session.numbered("step", slow))
        await asyncio.sleep(min(0.1, target.probe.slow_s / 4))
        stopping = asyncio.create_task(shell(target.stop))
        try:
            goaway = await wire.take(lambda m: m.type == "goaway", "goaway")
            ensure(isinstance(goaway.data.get("retry_after"), int | float), f"{goaway}")
            reply = await session.reply()
            ensure(reply.type == "observation", f"what was accepted is answered: {reply}")
            code = await wire.ended()
            ensure(code == 1012, f"the connection was closed with {code}")
        finally:
            await stopping
            await up(target)


@check("R-016-13", "after kill -9 a session is where it was, or SESSION_LOST, and never fresh", alone=True)
async def _(target: Target) -> None:
    if target.kill is None:
        raise NotTested("a command that kills the server is needed: --kill")
    async with target.session() as session:
        seen = [await session.works("reset")]
        seen += [await session.works("step", action) for action in target.steps(3)]
        await shell(target.kill)
        await session.wire.ended()
    await up(target)
    eid, last = seen[0].get("eid"), len(seen) - 1
    async with target.multiplexed() as wire:
        session.wire = wire
        answer = await session.resumed(last=0)
        if answer.code == "SESSION_LOST":
            return
        ensure(answer.type == "resumed", f"{answer}")
        place = (answer.data.get("next_id"), answer.data.get("t"))
        ensure(place == (session.id + 1, last), f"acknowledged deliveries are gone: next_id, t = {place}")
        for id, was in enumerate(seen, 1):
            reply = await session.reply(id)
            ensure(reply.payload == was.payload, f"the reply to {id} was {was}, and is {reply}")
        if "state_at" in target.extensions:
            for t, was in enumerate(seen):
                read = await session.read("state", {"t": t})
                ensure(read.payload == was.payload, f"delivery {t} was {was}, and is {read}")
                await target.http("GET", f"/episodes/{eid}/states/{t}")
        try:
            step = await session.request(*target.turn(last))
        except Blocked as error:
            raise Broken(str(error)) from None
        lost = step.code == "SESSION_LOST"
        ensure(lost or step.get("t") == target.turn_t(last), f"the next request: {step}")
