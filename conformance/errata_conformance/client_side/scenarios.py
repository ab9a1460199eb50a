"""The scenarios for clients: what a client of R-014, R-015 and R-016 has to do when things go wrong."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..exact import digest, encode
from ..results import Blocked, Broken, NotSupported, NotTested, Outcome, Result, ensure
from ..sample.episodes import World
from .program import Program, Start, program
from .stage import Envelope, Stage, staged, text_of
from .witness import BASE, Witness

REPLY_S = 15.0
SCENARIO_S = 60.0
POLL_S = 0.02


@dataclass
class Candidate:
    """The client that is checked, in all scenarios.

    Args:
        start: Starts it.
        names: The sids, keys and groups that it has used.
    """

    start: Start
    names: set[str] = field(default_factory=set)


Body = Callable[[Candidate], Awaitable[None]]
SCENARIOS: list[tuple[str, str, Body]] = []
"""(statement, name, body) in the order in which they are reported."""
NUMBERED = ("reset", "step", "close", "fork")


def scenario(statement: str, name: str) -> Callable[[Body], Body]:
    """Register a scenario."""

    def registered(body: Body) -> Body:
        SCENARIOS.append((statement, name, body))
        return body

    return registered


async def run_client(client: Sequence[str] | Start, only: Collection[str] = ()) -> list[Result]:
    """Check a client against the statements: run the scenarios one after another, each with a server of its own.

    Args:
        client: The client's program and its arguments, to which the base URL of the server is appended; or what starts
            a client.
        only: Ids of the statements to check; empty for all.

    Returns:
        One result per scenario. A statement may have several scenarios.

    Raises:
        OSError: The program cannot be started.
    """
    candidate = Candidate(client if callable(client) else partial(program, client))
    return [await played_out(one, candidate) for one in SCENARIOS if not only or one[0] in only]


async def played_out(scenario: tuple[str, str, Body], candidate: Candidate) -> Result:
    """Run one scenario and return its result."""
    statement, name, body = scenario
    started = time.monotonic()

    def result(outcome: Outcome, detail: object = "") -> Result:
        return Result(statement, name, outcome, str(detail), None, time.monotonic() - started)

    try:
        async with asyncio.timeout(SCENARIO_S):
            await body(candidate)
    except Broken as error:
        return result(Outcome.FAILED, error)
    except Blocked as error:
        if error.statement == statement:
            return result(Outcome.FAILED, error)
        return Result(statement, name, Outcome.BLOCKED, str(error), error.statement, time.monotonic() - started)
    except NotSupported as error:
        return result(Outcome.NOT_SUPPORTED, error)
    except NotTested as error:
        return result(Outcome.NOT_TESTED, error)
    except TimeoutError:
        return result(Outcome.FAILED, f"the scenario did not end within {SCENARIO_S:.0f} s")
    except (KeyError, TypeError, AttributeError) as error:
        return result(Outcome.FAILED, f"an answer of another form was printed: {type(error).__name__}: {error}")
    return result(Outcome.PASSED)


@asynccontextmanager
async def played(
    candidate: Candidate, stage: Stage, world: World | None = None
) -> AsyncIterator[tuple[Stage, Program]]:
    """Run a stage's server, and the client against it, while the block runs.

    Raises:
        Blocked: The witness found a message that breaks a statement. It takes the place of what the block raised,
            which may be a consequence.
    """
    stage.witness = Witness(candidate.names)
    try:
        async with staged(stage, world), candidate.start(stage.url, REPLY_S) as client:
            yield stage, client
    finally:
        if stage.witness.wrongs:
            raise stage.witness.wrongs[0]


def connected(stage: Stage) -> None:
    """Check that the client connected to a multiplexed socket.

    Raises:
        Broken: It did not.
    """
    ensure(any("openenv.mux.v1" in one for one in stage.offered), f"offered were {stage.offered}")


async def happened(done: Callable[[], bool], client: Program) -> None:
    """Wait until the client has done what no answer of it shows, or until an answer would be late, too."""
    for _ in range(int(client.reply_s / POLL_S)):
        if done():
            return
        await asyncio.sleep(POLL_S)


async def first_steps(client: Program) -> None:
    """Reset, and step to a total of 2."""
    await client.total("a", "reset", {}, 0)
    await client.total("a", "step", {"n": 2}, 2)


@scenario("R-016-1", "the subprotocol is offered, and used where it is named")
async def _(candidate: Candidate) -> None:
    async with played(candidate, Stage()) as (stage, client):
        await client.say("a", "reset", {})
        await happened(lambda: bool(stage.offered), client)
        connected(stage)
        answer = await client.answer("a")
        ensure(answer["type"] == "observation", f"{answer}")
        ensure(stage.of("open") and stage.of("reset"), f"the client sent {stage.seen}")


@scenario("R-016-1", "where it is not named, the socket is a plain one")
async def _(candidate: Candidate) -> None:
    async with played(candidate, Stage(multiplexed=False)) as (_, client):
        await first_steps(client)


@scenario("R-015-7", "UNKNOWN_TYPE is an answer: nothing is offered, and the session goes on")
async def _(candidate: Candidate) -> None:
    world = World(production=True)
    world.answers_capabilities = False
    async with played(candidate, Stage(multiplexed=False), world) as (_, client):
        await first_steps(client)
        await client.total("a", "step", {"n": 3}, 5)


@scenario("R-014-12", "an unknown kind of error is text")
async def _(candidate: Candidate) -> None:
    def renamed(head: Envelope, payload: str) -> list[str] | None:
        if head.get("type") != "observation" or "command_not_found" not in payload:
            return None
        changed = payload.replace("command_not_found", "quantum_decoherence").replace("cmd.missing", "quantum.key")
        return [text_of({**head, "digest": digest(changed)}, changed)]

    async with played(candidate, Stage(on_send=renamed)) as (_, client):
        await first_steps(client)
        answer = await client.ask("a", "step", {"do": "mark"})
        ensure(answer["type"] == "observation", f"an observation with an unknown kind: {json.dumps(answer)[:300]}")
        ensure(answer["data"]["observation"]["error_kind"] == "quantum_decoherence", f"{json.dumps(answer)[:300]}")
        await client.total("a", "step", {"n": 1}, 4)


@scenario("R-016-4", "fields and types of the server that a client does not know are ignored")
async def _(candidate: Candidate) -> None:
    def extended(head: Envelope, payload: str) -> list[str] | None:
        noise = encode({"sid": head.get("sid"), "type": "weather", "data": {"sun": True}})
        value = json.loads(payload)
        if head.get("type") in ("opened", "resumed"):
            payload = encode({**value, "colour": "blue"})
        return [
            noise,
            text_of({**head, "colour": "blue", "more": {"x": [1]}}, payload),
            encode({"type": "moon", "data": 1}),
        ]

    async with played(candidate, Stage(on_send=extended)) as (_, client):
        await first_steps(client)
        await client.total("a", "step", {"n": 3}, 5)


def total(answer: dict[str, Any]) -> Any:
    """Return the total of a delivery that the client printed; None if it printed something else."""
    return answer["data"]["observation"]["total"] if answer["type"] in ("observation", "state_at") else None


async def two_episodes(candidate: Candidate, stage: Stage) -> None:
    """Play an episode in each of two sessions, and check that the client makes the calls that the program asks for.

    Raises:
        Blocked: The client makes other calls.
    """
    async with played(candidate, stage) as (_, client):
        for session in ("a", "b"):
            await client.total(session, "reset", {"episode_id": f"episode of {session}"}, 0)
        await client.total("a", "step", {"n": 2}, 2)
        await client.total("b", "step", {"n": 30}, 30)
        await client.total("a", "step", {"n": 3}, 5)
        lengths = {one.episode_id: one.t for one in stage.server.world.episodes.values()}
        if lengths != {"episode of a": 2, "episode of b": 1}:
            raise Blocked(BASE, f"two steps in the episode of a and one in that of b were asked for, not {lengths}")
        await client.ask("a", "close")
        await client.total("b", "step", {"n": 1}, 31)
        over = [one for one in stage.server.world.sessions.values() if one.over is not None]
        await happened(lambda: stage.multiplexed or stage.plain_sockets == 1, client)
        if (len(over), stage.plain_sockets) != ((1, 0) if stage.multiplexed else (0, 1)):
            raise Blocked(BASE, "the client was asked to close one of its two sessions; it closed none or both")


@scenario("R-016-15", "each session counts its own ids")
async def _(candidate: Candidate) -> None:
    stage = Stage()
    await two_episodes(candidate, stage)
    ids: dict[str, list[int]] = {}
    for one in stage.of(*NUMBERED):
        ids.setdefault(one["sid"], []).append(one["id"])
    ensure(sorted(ids.values()) == [[1, 2, 3], [1, 2, 3, 4]], f"ids of two sessions: {ids}")


@scenario("R-016-1", "plain sockets have one session each")
async def _(candidate: Candidate) -> None:
    await two_episodes(candidate, Stage(multiplexed=False))


async def optional(client: Program, type_: str, data: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the answer to a request in session "a" that a client need not offer.

    Raises:
        NotSupported: The client does not offer it.
    """
    answer = await client.ask("a", type_, data)
    if (answer.get("data") or {}).get("code") == "NOT_SUPPORTED":
        raise NotSupported(f"the client does not {what}")
    return answer


async def reads(candidate: Candidate, stage: Stage) -> None:
    """Read two earlier deliveries."""
    async with played(candidate, stage) as (_, client):
        await first_steps(client)
        await client.total("a", "step", {"n": 3}, 5)
        for t, wanted in ((1, 2), (0, 0), (2, 5)):
            answer = await optional(client, "state", {"t": t}, "read state(t)")
            ensure(total(answer) == wanted, f"delivery {t} has the total {wanted}: {json.dumps(answer)[:300]}")
        await client.total("a", "step", {"n": 1}, 6)


@scenario("R-015-9", "the delivery that was asked for is read")
async def _(candidate: Candidate) -> None:
    await reads(candidate, Stage())


@scenario("R-015-9", "the same on a plain socket")
async def _(candidate: Candidate) -> None:
    await reads(candidate, Stage(multiplexed=False))


async def forks(candidate: Candidate, stage: Stage) -> None:
    """Fork twice, and step in the children and in the parent."""
    async with played(candidate, stage) as (_, client):
        await first_steps(client)
        await client.total("a", "step", {"n": 3}, 5)
        for child in ("b", "c"):
            answer = await optional(client, "fork", {"t": 1, "child": child}, "fork")
            ensure(answer["type"] == "forked", f"a fork was expected: {json.dumps(answer)[:300]}")
        await client.total("b", "step", {"n": 1}, 3)
        await client.total("c", "step", {"n": 10}, 12)
        await client.total("a", "step", {"n": 100}, 105)


@scenario("R-016-39", "a child is opened, and goes on where it was forked")
async def _(candidate: Candidate) -> None:
    await forks(candidate, Stage())


@scenario("R-015-19", "each fork of a plain session has a request_id of its own")
async def _(candidate: Candidate) -> None:
    await forks(candidate, Stage(multiplexed=False))


@scenario("R-016-15", "ids count from 1 without a gap, over all episodes")
async def _(candidate: Candidate) -> None:
    async with played(candidate, Stage()) as (stage, client):
        await first_steps(client)
        await client.total("a", "reset", {}, 0)
        await client.total("a", "step", {"n": 3}, 3)
        ids = [one["id"] for one in stage.of(*NUMBERED)]
        ensure(ids == [1, 2, 3, 4], f"ids of reset, step, reset, step: {ids}")


def fences(stage: Stage) -> list[Any]:
    """Return the fences of all attaches, in order."""
    attaches = [one["data"] for one in stage.of("open")]
    attaches += [entry for one in stage.of("resume") for entry in one["data"]]
    return [one.get("fence") for one in attaches]


def sent_once(stage: Stage) -> None:
    """Check that each id was used for one request only.

    Raises:
        Broken: It was not.
    """
    by_id: dict[tuple[Any, Any], str] = {}
    for one in stage.of(*NUMBERED):
        request = encode([one["type"], one.get("data", {})])
        other = by_id.setdefault((one["sid"], one["id"]), request)
        ensure(other == request, f"id {one['id']} stands for {other} and for {request}")


@scenario("R-016-22", "a request that was accepted before a cut is not sent under another id")
async def _(candidate: Candidate) -> None:
    stage = Stage()
    armed = [True]

    def lost(head: Envelope, _payload: str) -> list[str] | None:
        if head.get("type") == "observation" and head.get("t") == 2 and armed and armed.pop():
            asyncio.get_running_loop().call_later(0.02, stage.cut)
            return []
        return None

    stage.on_send = lost
    async with played(candidate, stage) as (_, client):
        await first_steps(client)
        await client.total("a", "step", {"n": 3}, 5)
        await client.total("a", "step", {"n": 5}, 10)
        sent_once(stage)
        entries = [entry for one in stage.of("resume") for entry in one["data"]]
        ensure(entries, f"the client did not resume: {[one['type'] for one in stage.of('open', 'resume')]}")
        ensure(entries[0].get("last", 0) in (1, 2), f"`last` of the resume: {entries[0]}")


@scenario("R-016-22", "a request that was lost before it was accepted is sent again under its id")
async def _(candidate: Candidate) -> None:
    stage = Stage()
    armed = [True]

    def lost(envelope: Envelope) -> bool:
        if envelope.get("type") == "step" and envelope.get("id") == 3 and armed and armed.pop():
            stage.cut()
            return False
        return True

    stage.on_message = lost
    async with played(candidate, stage) as (_, client):
        await first_steps(client)
        await client.total("a", "step", {"n": 3}, 5)
        sent_once(stage)
        ids = [one["id"] for one in stage.of("step")]
        ensure(ids == [2, 3, 3], f"ids of two steps, the second of which was lost once: {ids}")


@scenario("R-016-28", "fence counts up with each attach")
async def _(candidate: Candidate) -> None:
    async with played(candidate, Stage()) as (stage, client):
        await first_steps(client)
        for n in (1, 2):
            stage.cut()
            await client.total("a", "step", {"n": 1}, 2 + n)
        found = fences(stage)
        ensure(all(isinstance(one, int) for one in found), f"fences of the attaches (SHOULD): {found}")
        ensure(len(found) >= 3 and found == sorted(set(found)), f"fences of the attaches: {found}")


@scenario("R-016-18", "a refused request is sent again under its id")
async def _(candidate: Candidate) -> None:
    armed = [True]
    stage = Stage()

    def first(envelope: Envelope) -> bool:
        if envelope.get("type") == "step" and envelope.get("id") == 3 and armed and armed.pop():
            error = {"code": "OVERLOADED", "message": "too much at once", "retry_after": 0.2}
            text = text_of({"sid": envelope["sid"], "id": 3, "type": "error"}, encode(error))
            stage.inject(text)
            return False
        return True

    stage.on_message = first
    async with played(candidate, stage) as (_, client):
        await first_steps(client)
        await client.total("a", "step", {"n": 3}, 5)
        ids = [one["id"] for one in stage.of("step")]
        ensure(ids == [2, 3, 3], f"ids after OVERLOADED for 3: {ids}")


@scenario("R-016-40", "an unknown code with an id and no next_id is a recorded reply")
async def _(candidate: Candidate) -> None:
    stage = Stage()

    def strange(head: Envelope, payload: str) -> list[str] | None:
        if head.get("type") == "error" and "EXECUTION_ERROR" in payload:
            return [text_of(head, encode({"code": "QUANTUM_ERROR", "message": "nobody knows this code"}))]
        return None

    stage.on_send = strange
    async with played(candidate, stage) as (_, client):
        await first_steps(client)
        answer = await client.ask("a", "step", {"do": "fail"})
        ensure(answer["type"] == "error", f"an error was expected: {answer}")
        await client.total("a", "step", {"n": 3}, 5)
        ids = [one["id"] for one in stage.of("step")]
        ensure(ids == [2, 3, 4], f"ids after a recorded error for 3: {ids}")


@scenario("R-016-24", "another process's reply is not taken for one's own")
async def _(candidate: Candidate) -> None:
    stage = Stage()
    armed = [True]

    def stolen(envelope: Envelope) -> bool:
        """Put another process's request in the place of the client's, and cut."""
        if envelope.get("type") == "step" and envelope.get("id") == 3 and armed and armed.pop():
            for socket in stage.sockets:
                socket.pass_on(encode({"sid": envelope["sid"], "id": 3, "type": "step", "data": {"n": 1000}}))
            asyncio.get_running_loop().call_later(0.05, stage.cut)
            return False
        return True

    def silent(head: Envelope, _payload: str) -> list[str] | None:
        return [] if head.get("id") == 3 and not head.get("request") else None

    stage.on_message, stage.on_send = stolen, silent
    async with played(candidate, stage) as (_, client):
        await first_steps(client)
        await client.say("a", "step", {"n": 3})
        answer = await client.answer("a")
        if answer["type"] == "observation":
            total = answer["data"]["observation"]["total"]
            ensure(total != 1002, "the client took the reply to another process's step for its own")
            ensure(total == 1005, f"its own step acts after the other one: total {total}")


@scenario("R-016-33", "an envelope in parts is put together")
async def _(candidate: Candidate) -> None:
    def cut_up(head: Envelope, payload: str) -> list[str] | None:
        if head.get("type") != "observation":
            return None
        text = text_of(head, payload)
        size = -(-len(text) // 3)
        texts = [text[at : at + size] for at in range(0, len(text), size)]
        address = {name: head[name] for name in ("sid", "id")}
        return [
            encode({**address, "type": "part", "data": {"n": n + 1, "of": len(texts), "text": one}})
            for n, one in enumerate(texts)
        ]

    async with played(candidate, Stage(on_send=cut_up)) as (_, client):
        await first_steps(client)
        await client.total("a", "step", {"n": 3}, 5)


async def forged(candidate: Candidate, stage: Stage) -> None:
    """Read a delivery whose payload is not the one of its digest."""
    async with played(candidate, stage) as (_, client):
        await first_steps(client)
        answer = await client.ask("a", "state", {"t": 1})
        if (answer.get("data") or {}).get("code") == "NOT_SUPPORTED":
            raise NotSupported("the client does not read state(t)")
        ensure(answer["type"] == "error", f"a forged payload was used: {json.dumps(answer)[:300]}")


@scenario("R-015-13", "a payload whose digest differs is not used")
async def _(candidate: Candidate) -> None:
    def changed(head: Envelope, payload: str) -> list[str] | None:
        return [text_of(head, payload.replace('"total":', '"total":7'))] if head.get("type") == "state_at" else None

    await forged(candidate, Stage(on_send=changed))


@scenario("R-015-13", "the same on a plain socket")
async def _(candidate: Candidate) -> None:
    def changed(frame: str) -> str:
        return frame.replace('"total":', '"total":7') if '"type":"state_at"' in frame else frame

    await forged(candidate, Stage(multiplexed=False, on_frame=changed))


@scenario("R-015-24", "a child of a plain fork is compared with its eid before it is used")
async def _(candidate: Candidate) -> None:
    stage = Stage(multiplexed=False)
    async with played(candidate, stage) as (_, client):
        await first_steps(client)
        stage.server.ignores_session_id = True
        answer = await client.ask("a", "fork", {"t": 1, "child": "b"})
        if answer["type"] == "error":
            if answer["data"].get("code") == "NOT_SUPPORTED":
                raise NotSupported("the client does not fork plain sessions")
            return  # it compared at once
        answer = await client.ask("b", "step", {"n": 1})
        ensure(
            answer["type"] == "error", f"the client used another environment as the child: {json.dumps(answer)[:300]}"
        )
