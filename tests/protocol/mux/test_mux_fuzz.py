"""Nothing that a peer sends makes a machine raise but what it says it raises (PROTOCOL D1)."""

from __future__ import annotations

import json
import os
import random
from typing import Any

from errata_protocol.errors import RemoteProtocolError
from errata_protocol.mux import ClientProtocol
from errata_protocol.mux.messages import MUTATING, READS
from tests.protocol.mux.world import ServerShell, World, key_of, sid_of

KINDS = [
    *("open", "resume", "reset", "step", "mcp", "fork", "close", "state", "capabilities", "rewards", "close_group"),
    *("cancel", "ack", "part", "teleport", "observation", "error"),
]


def value(rng: random.Random) -> Any:
    """Return a value that a field may have, or may not."""
    sids = [sid_of(n) for n in range(3)] + [key_of(n) for n in range(3)]
    return rng.choice(
        [*sids, *sids, None, "", "x", 0, 1, 2, 3, -1, 2**53, 1.5, True, [], {}, {"t": 0}, "a:b", "é" * 30]
    )


def data(rng: random.Random, kind: str) -> Any:
    """Return ``data`` of about the right form."""
    names = ("sid", "key", "last", "last_seq", "fence", "group", "t", "eid", "n", "of", "text", "method", "child")
    fields = {name: value(rng) for name in rng.sample(names, rng.randint(0, 4))}
    session = rng.randrange(3)
    good: dict[str, Any] = {
        "open": {"key": key_of(session)},
        "resume": [{"sid": sid_of(session), "key": key_of(session), "last": rng.randint(0, 2)}],
        "fork": {"t": 0, "child": {"sid": sid_of(rng.randint(3, 9)), "key": key_of(0)}},
        "mcp": {"method": rng.choice(["tools/call", "tools/list"])},
        "part": {"n": rng.randint(1, 3), "of": rng.randint(1, 3), "text": rng.choice(['{"type":', '"step"}', "[]"])},
        "ack": {"last": rng.randint(0, 2)},
        "close_group": {"group": key_of(0)},
    }
    return rng.choice([good.get(kind, fields), good.get(kind, fields), fields, [fields], value(rng)])


def envelope(rng: random.Random, world: World) -> dict[str, Any]:
    """Return a message that is right, or nearly."""
    kind = rng.choice(KINDS)
    made: dict[str, Any] = {"type": kind}
    sid = sid_of(rng.randrange(3))
    session = world.shell.protocol.session(sid)
    if kind != "resume" or rng.random() < 0.1:
        made["sid"] = sid if rng.random() < 0.95 else value(rng)
    if kind in MUTATING or rng.random() < 0.1:
        made["id"] = rng.choice([session.next_id if session else 1, rng.randint(1, 6)])
    if (kind in READS and "id" not in made) or rng.random() < 0.05:
        made["q"] = rng.randint(1, 6) if rng.random() < 0.9 else value(rng)
    if rng.random() < 0.9:
        made["data"] = data(rng, kind)
    for name in ("if", "deadline_ms"):
        if rng.random() < 0.1:
            made[name] = value(rng)
    return made


def test_nothing_a_client_sends_makes_the_server_raise() -> None:
    rng = random.Random(int(os.environ.get("ERRATA_FUZZ_SEED", "0")))
    world = World()
    shell, sockets = world.shell, [world.shell.protocol.connect() for _ in range(3)]
    types: set[str] = set()
    for number in range(int(os.environ.get("ERRATA_FUZZ_FRAMES", "5000"))):
        socket = rng.randrange(3)
        frame = json.dumps([envelope(rng, world) for _ in range(rng.randint(1, 4))])
        shell.take(shell.protocol.receive(sockets[socket], frame, float(number)))
        while shell.due and rng.random() < 0.8:
            shell.perform(rng.randrange(len(shell.due)), float(number), fail=rng.random() < 0.1)
        for sent in sockets[socket].data_to_send():
            text = json.loads(sent)
            types |= {message["type"] for message in (text if isinstance(text, list) else [text])}
        if rng.random() < 0.02:
            shell.take(shell.protocol.disconnect(sockets[socket], float(number)))
            sockets[socket] = shell.protocol.connect()
        if rng.random() < 0.02:
            shell.take(shell.protocol.tick(float(number)))
        if number % 100 == 99:  # closed sessions stay closed: begin anew
            world.server_crashes()
            world.journal.rows.clear()
            shell, sockets = world.shell, [world.shell.protocol.connect() for _ in range(3)]
        assert isinstance(shell, ServerShell)
    assert types >= {"opened", "resumed", "observation", "mcp", "forked", "closed", "state", "detached", "error"}, types


def test_nothing_a_server_sends_makes_the_client_raise_anything_but_that_it_is_wrong() -> None:
    rng = random.Random(int(os.environ.get("ERRATA_FUZZ_SEED", "0")))
    kinds = [
        "opened",
        "resumed",
        "observation",
        "closed",
        "forked",
        "error",
        "reward",
        "detached",
        "goaway",
        "part",
        "state",
    ]
    codes = ["OVERLOADED", "OUT_OF_ORDER", "NOT_ATTACHED", "SESSION_CLOSED", "CONFLICT", "EXECUTION_ERROR", "NEW", 5]
    wrong = 0
    client = ClientProtocol()
    for number in range(int(os.environ.get("ERRATA_FUZZ_FRAMES", "5000"))):
        if number % 100 == 0:
            client = ClientProtocol()
            client.connected(0.0)
            for n in range(3):
                session = client.open(sid_of(n), key_of(n))
                client.request(session, "reset")
                client.read("state", session)
        said: dict[str, Any] = {"sid": sid_of(rng.randrange(3)), "type": rng.choice(kinds)}
        address = rng.choice(["id", "id", "q", "seq", None])
        if address is not None:
            said[address] = rng.randint(1, 2) if rng.random() < 0.95 else value(rng)
        position = {
            "next_id": rng.randint(1, 4),
            "eid": None,
            "t": None,
            "seq": 0,
            "recovery": "none",
        }
        refusal = {
            "message": "m",
            "code": rng.choice(codes),
            rng.choice(["next_id", "retry_after", "fence"]): value(rng),
        }
        said["data"] = rng.choice(
            [position | {"fence": 1}, refusal, {"reason": value(rng)}, value(rng), {"retry_after": 1}]
        )
        client.data_to_send()
        try:
            client.receive(json.dumps(said), float(number))
        except RemoteProtocolError:
            wrong += 1
            client.disconnected(float(number))
            client.connected(float(number))
        client.tick(float(number))
    assert wrong > 100
