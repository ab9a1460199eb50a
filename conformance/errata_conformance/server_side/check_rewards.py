"""R-016-34 to 37: late rewards."""

from __future__ import annotations

from typing import Any

from ..exact import encode
from ..results import Blocked, ensure
from .registry import check
from .sockets import Message, Session, name
from .target import Answer, Target


def offered(target: Target) -> None:
    """Check that the server offers late rewards.

    Raises:
        NotSupported: It does not.
    """
    target.offers("delayed_rewards")


def reward(t: int, value: float, **more: Any) -> dict[str, Any]:
    """Return a reward with the kit as its source."""
    return {"t": t, "value": value, "source": "conformance", "reward_id": name(), **more}


async def post(target: Target, eid: str, body: Any) -> Answer:
    """Post rewards."""
    return await target.http("POST", f"/episodes/{eid}/rewards", body)


async def posted(target: Target, eid: str, body: Any) -> None:
    """Post rewards and check that they are accepted.

    Raises:
        Blocked: They are not.
    """
    answer = await post(target, eid, body)
    if answer.status != 200:
        raise Blocked("R-016-34", f"POST …/rewards {encode(body)[:200]}: {answer.status} {answer.body[:300]!r}")


async def kept(session: Session, eid: str) -> list[dict[str, Any]]:
    """Return the rewards of an episode that the kit posted."""
    reply = await session.read("rewards", {"eid": eid})
    if reply.type != "rewards":
        raise Blocked("R-016-37", f"rewards was answered with {reply}")
    return [one for one in reply.data if one.get("source") == "conformance"]


async def pushed(session: Session, reward_id: str) -> Message:
    """Wait for the push of a reward."""
    found = session.mine(lambda m: m.type == "reward" and m.data.get("reward_id") == reward_id)
    return await session.wire.take(found, f"the push of reward {reward_id}")


async def stepped(target: Target, session: Session) -> tuple[str, Message]:
    """Reset and step; return the eid and the step's reply."""
    reset = await session.works("reset")
    return str(reset.get("eid")), await session.works("step", target.probe.need("step")[0])


@check("R-016-34", "a reward names a delivery, a finite value, and a source of its own")
async def _(target: Target) -> None:
    offered(target)
    async with target.session() as session:
        eid, _step = await stepped(target, session)
        for bad in (
            reward(9, 1.0),
            reward(-1, 1.0),
            reward(1, 1.0, source="environment"),
            reward(1, 1.0, reward_id="environment:1"),
            reward(1, 1.0, source=""),
            reward(1, 1.0, reward_id="x" * 256),
            reward(1, "many"),  # type: ignore[arg-type]
        ):
            answer = await post(target, eid, bad)
            ensure(answer.status in (404, 422), f"{encode(bad)[:200]}: {answer.status} {answer.body[:200]!r}")
        for text in ("NaN", "Infinity", "1e999"):
            body = encode(reward(1, 0.5)).replace("0.5", text)
            answer = await post(target, eid, body)
            ensure(answer.status in (400, 422), f"value {text}: {answer.status}")
        answer = await post(target, "ep_no_such_episode", reward(0, 1.0))
        ensure(answer.status == 404, f"an unknown episode: {answer.status}")
        ensure(not await kept(session, eid), "a refused reward is kept")
        good = reward(1, 0.5)
        answer = await post(target, eid, good)
        ensure(answer.status == 200, f"{encode(good)}: {answer.status} {answer.body[:300]!r}")


@check("R-016-35", "a repeated reward_id changes nothing; with other content it is CONFLICT")
async def _(target: Target) -> None:
    offered(target)
    async with target.session() as session:
        eid, _step = await stepped(target, session)
        one = reward(1, 0.5)
        await posted(target, eid, one)
        first = await kept(session, eid)
        again = await post(target, eid, one)
        ensure(again.status == 200, f"the same again: {again.status} {again.body[:200]!r}")
        answer = await post(target, eid, {**one, "value": 0.75})
        ensure(answer.status == 409, f"other content: {answer.status} {answer.body[:200]!r}")
        ensure(answer.json().get("code") == "CONFLICT", f"{answer.body[:200]!r}")
        answer = await post(target, eid, [reward(0, 0.25), {**one, "value": 0.75}])
        ensure(answer.status == 409, f"an array with a conflict: {answer.status}")
        now = await kept(session, eid)
        ensure(now == first and len(now) == 1, f"kept: {encode(now)[:400]}")


@check("R-016-36", "rewards are appended, and a delivery keeps its own")
async def _(target: Target) -> None:
    offered(target)
    async with target.session() as session:
        eid, step = await stepped(target, session)
        ensure(isinstance(step.data.get("reward"), int | float | None), f"{step}")
        both = [reward(1, 0.5), reward(1, 0.75)]
        for one in both:
            await posted(target, eid, one)
        found = [one["value"] for one in await kept(session, eid)]
        ensure(found == [0.5, 0.75], f"values of one step: {found}")
        if "state_at" in target.extensions:
            read = await session.read("state", {"t": 1})
            ensure(read.payload == step.payload, f"the delivery was {step}, and is {read}")


@check("R-016-37", "rewards are pushed in order, again after an attach until acknowledged, and listed")
async def _(target: Target) -> None:
    offered(target)
    async with target.session() as session, target.multiplexed() as wire, target.multiplexed() as third:
        eid, _step = await stepped(target, session)
        own = [reward(1, float(n)) for n in range(4)]
        await posted(target, eid, own[0])
        first = await pushed(session, own[0]["reward_id"])
        await posted(target, eid, own[1:3])
        rest = [await pushed(session, one["reward_id"]) for one in own[1:3]]
        seqs = [one.get("seq") for one in (first, *rest)]
        ensure(seqs == [seqs[0], seqs[0] + 1, seqs[0] + 2], f"seq without a gap: {seqs}")
        ensure(first.data == {"eid": eid, **own[0]}, f"{first}")
        await session.wire.lose()
        await posted(target, eid, own[3])
        session.wire = wire
        answer = await session.resumed(last=2, last_seq=seqs[1])
        if answer.type != "resumed":
            raise Blocked("R-016-13", f"a session whose socket was lost is kept: {answer}")
        again = [
            await wire.take(session.mine(lambda m: m.type == "reward"), "a push after an attach") for _ in range(2)
        ]
        found = [(one.get("seq"), one.data["reward_id"]) for one in again]
        wanted = [(seqs[2], own[2]["reward_id"]), (seqs[2] + 1, own[3]["reward_id"])]
        ensure(found == wanted, f"pushes from last_seq + 1 on: {found}, not {wanted}")
        await wire.send(session.envelope("ack", {"last_seq": seqs[2] + 1}))
        listed = [one["reward_id"] for one in await kept(session, eid)]
        ensure(listed == [one["reward_id"] for one in own], f"`rewards` lists {listed}")
        answer_http = await target.http("GET", f"/episodes/{eid}/rewards")
        values = [one["value"] for one in answer_http.json() if one.get("source") == "conformance"]
        ensure(values == [0.0, 1.0, 2.0, 3.0], f"GET …/rewards lists {values}")
        session.wire = third
        await session.resumed(last=2, last_seq=seqs[2] + 1)
        more = [one for one in await third.quiet() if one.type == "reward"]
        ensure(not more, f"acknowledged pushes come again: {more}")
