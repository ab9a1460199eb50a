"""Whatever comes through the multiplexed door: it stands and keeps nothing, no other is touched (PROTOCOL D1, F2).

`make fuzz` does it with 100,000 frames; ERRATA_FUZZ_SEED draws others.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import resource
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.mux import Replied
from errata_protocol.mux.server_session import ServerConnection, ServerSession
from errata_server.sessions.session import Session
from errata_server.settings import Settings

from .asgi_peer import Peer
from .conftest import simulated
from .mux_fuzz import Fuzzer
from .mux_trainer import Trainer
from .test_mux_door import application, joined, n_of

FRAMES = int(os.environ.get("ERRATA_FUZZ_FRAMES", "4000"))
SEED = int(os.environ.get("ERRATA_FUZZ_SEED", "0"))
PEERS = 4
OWNER, FOE = {"authorization": "Bearer owner"}, {"authorization": "Bearer foe"}
OTHERS_MAY_BE_TOLD = {
    *("NOT_ATTACHED", "SESSION_LOST", "INVALID_ENVELOPE", "UNKNOWN_TYPE", "OVERLOADED", "NOT_SUPPORTED"),
    *("VALIDATION_ERROR", "CONFLICT"),
}
"""Codes of errors that may name a session to who does not have its key: none depends on whether there is one."""


class Crowd:
    """The peers that send; what they are answered is looked at and thrown away."""

    def __init__(self, app: FastAPI, chance: random.Random, witness: Trainer) -> None:
        self._app, self._chance = app, chance
        secrets = [(s.sid, s.key) for s in witness.protocol.sessions.values()]
        self._secret_sids = {sid for sid, _ in secrets}
        # Half of them are the witness's principal without its keys, half another principal that has stolen the keys.
        self._fuzzers = [Fuzzer(chance, [s for s, _ in secrets], secrets if n % 2 else []) for n in range(PEERS)]
        self._peers: list[Peer | None] = [None] * PEERS
        self.told: Counter[str] = Counter()

    async def send(self) -> None:
        """Send one frame; now and then on a new socket."""
        at = self._chance.randrange(PEERS)
        peer = self._peers[at]
        if peer is None or self._chance.random() < 0.005:
            await self.leave(at)
            headers = FOE if at % 2 else OWNER
            peer = self._peers[at] = Peer(self._app, headers=headers, subprotocols=(PROTOCOL_NAME,))
            await peer.__aenter__()
            assert peer.answer["type"] == "websocket.accept"
        peer.send(self._fuzzers[at].frame())
        await asyncio.sleep(0)
        while not peer.got.empty():
            self._look(peer.got.get_nowait())

    def _look(self, message: dict[str, Any]) -> None:
        assert message["type"] == "websocket.send", "the door does not hang up"
        said = json.loads(message["text"])
        for envelope in said if isinstance(said, list) else [said]:
            kind = envelope["type"]
            self.told[envelope["data"]["code"] if kind == "error" else kind] += 1
            if envelope.get("sid") in self._secret_sids:
                assert kind == "error" and envelope["data"]["code"] in OTHERS_MAY_BE_TOLD, envelope

    async def leave(self, at: int) -> None:
        """End a socket."""
        peer, self._peers[at] = self._peers[at], None
        if peer is not None:
            await peer.__aexit__(None, None, None)

    async def leave_all(self) -> None:
        """End every socket."""
        for at in range(PEERS):
            await self.leave(at)


@contextlib.asynccontextmanager
async def nothing_unheard(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Fail on exceptions that nobody awaits, and on errors in the log."""
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
    with caplog.at_level(logging.WARNING):
        yield
    assert unheard == []
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR or r.exc_info] == []


def alive() -> Counter[str]:
    """Count what a door keeps of its clients."""
    gc.collect()
    kept = (ServerSession, ServerConnection, Session)
    found = Counter(type(o).__name__ for o in gc.get_objects() if type(o) in kept)
    found["tasks"] = len(asyncio.all_tasks())
    return found


async def at_rest(tasks: set[asyncio.Task[Any]]) -> Counter[str]:
    """Return what is kept once all but ``tasks`` have ended, or had a minute."""
    if others := asyncio.all_tasks() - tasks:
        await asyncio.wait(others, timeout=60.0)
    return alive()


@pytest.mark.timeout(max(600, FRAMES // 40))
async def test_fuzzed_frames_break_nothing_leave_nothing_and_touch_nobody(caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(SEED)
    # Detached sessions sleep at once, so that what is left at the end was leaked and not kept for a while.
    settings = Settings(journal_wait_s=0.3, detach_ttl_s=0.0, token=SecretStr("owner,foe"))
    app = application(simulated(settings), places=64)
    async with nothing_unheard(caplog), joined(app, seed=SEED, headers=OWNER) as witness:
        sessions = [await witness.open(group=witness.secret()) for _ in range(3)]
        for session in sessions:
            await witness.ask(session, "reset")
        crowd, steps, tasks = Crowd(app, chance, witness), 0, asyncio.all_tasks()
        for _ in range(200):  # so that caches are filled before anything is counted
            await crowd.send()
        await crowd.leave_all()
        before, rss_kib = await at_rest(tasks), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        witnessed = len(witness.events)
        for number in range(FRAMES):
            await crowd.send()
            if number % 50 == 0:
                steps += 1
                for session in sessions:
                    reply = await witness.ask(session, "step", {"n": 1})
                    assert (reply.t, n_of(reply), reply.id) == (steps, steps, steps + 1)
        await crowd.leave_all()
        left = await at_rest(tasks)
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss_kib
    print(f"{FRAMES} frames, grown by {grown_kib} KiB; {dict(left)} left of {dict(before)}; told {dict(crowd.told)}")
    heard = Counter(type(event) for event in witness.events[witnessed:])
    assert heard == {Replied: steps * len(sessions)}, "the witness heard of nothing but its own steps"
    assert left <= before, (left, before)
    assert grown_kib < 40 * 1024 + FRAMES * 8, "8 KiB a frame is what the journal in memory keeps"
    for name in ("opened", "resumed", "observation", "forked", "closed", "state_at", "INVALID_JSON", "SESSION_LOST"):
        assert crowd.told[name], (name, crowd.told)
