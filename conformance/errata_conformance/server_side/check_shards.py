"""R-016-50: ids that name another data directory."""

from __future__ import annotations

import re

from ..results import NotSupported, ensure
from .check_markers import rpc
from .registry import check
from .sockets import Message, Session, name
from .target import Target

NAME = re.compile(r"[a-z0-9]{12}")


@check("R-016-50", "what names another data directory is MISDIRECTED at every door, and nothing runs")
async def _(target: Target) -> None:
    own = target.shard
    if own is None:
        raise NotSupported("the server names no `shard` in capabilities: its data directory has no name")
    ensure(NAME.fullmatch(own) is not None, f"shard is 12 lowercase letters and digits, not {own!r}")
    other = "".join("b" if letter == "a" else "a" for letter in own)
    sid, eid = f"sh-{other}-{name()}", f"ep_sh-{other}-{name()}"

    def misdirected(what: str, code: object, shard: object, answer: object) -> None:
        ensure(code == "MISDIRECTED" and shard == other, f"{what}: {answer}")

    def refused(what: str, reply: Message) -> None:
        misdirected(what, reply.code, reply.data.get("shard") if isinstance(reply.data, dict) else None, reply)

    if target.speaks_mux:
        async with target.multiplexed() as wire:
            refused("open of a sid", await Session(wire, sid).opened())
            refused("resume of a sid", await Session(wire, sid).resumed(last=0))
    async with target.plain(f"?session_id={sid}") as plain:
        refused("attach to a session_id", await plain.next("a refusal"))
    closed = await target.http("POST", "/mcp", rpc("openenv/session/close", {"session_id": sid}))
    data = closed.json().get("error", {}).get("data", {})
    misdirected("openenv/session/close", data.get("code"), data.get("shard"), closed.body[:200])
    if "state_at" not in target.extensions:
        return
    for method, path, body in (
        ("GET", f"/episodes/{eid}/states/0", None),
        ("GET", f"/episodes/{eid}/rewards", None),
        ("POST", f"/episodes/{eid}/rewards", {"t": 0, "value": 1.0, "source": "conformance", "reward_id": name()}),
        *([("POST", f"/episodes/{eid}/fork", {"t": 0, "request_id": name()})] if "fork" in target.extensions else []),
    ):
        answer = await target.http(method, path, body)
        ensure(answer.status == 421, f"{method} {path}: {answer.status} {answer.body[:200]!r}")
        misdirected(f"{method} {path}", answer.json().get("code"), answer.json().get("shard"), answer.body[:200])
    async with target.plain() as plain:
        here = (await plain.ask("capabilities")).data.get(
            "shard"
        )  # another one where several members serve the address
        reset = await plain.works("reset", {})
        refused("state of an eid", await plain.ask("state", {"t": 0, "eid": eid}))
        ensure(str(reset.get("eid")).startswith(f"ep_sh-{here}-"), f"a new eid names the directory: {reset}")
        ensure((await plain.ask("state", {"t": 0})).type == "state_at", "the session goes on")
