"""Load over a few multiplexed sockets. Envelopes are built once for each session, without
Errata's client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec

from .factories import FactoryCheck
from .latencies import spread_ms
from .mux_link import Envelope, Link, Phase, Session, framed
from .websocket import prepared

RESUME_ENTRIES = 256
"""Sessions in one resume message."""

RECONNECT_S = 0.02
"""Seconds between two attempts to reach a server that is starting."""


class MuxLoad:
    """Many sessions over a few sockets.

    Args:
        port: The server's.
        sockets: Number of sockets; each has as many requests in flight as the server advertises, 1,024 by default.
    """

    def __init__(self, port: int, *, sockets: int = 16) -> None:
        self._port = port
        self._links = [Link() for _ in range(sockets)]
        self._connected = False
        self._sessions: dict[str, Session] = {}

    async def open(
        self,
        sessions: int,
        frame: int = 64,
        then: str = "reset",
        reset: dict[str, Any] | None = None,
        counter: str | None = None,
        limit_s: float = 900.0,
    ) -> dict[str, float]:
        """Open sessions, all at once.

        Args:
            sessions: Number of sessions.
            frame: Envelopes a frame.
            then: Request that has to be answered before a session counts as open: ``state`` or ``reset``, which is
                sent in the same frame as the open, or ``nothing`` but the open.
            reset: Arguments of reset.
            counter: File in which instances are counted; see `FactoryCheck`.
            limit_s: Time limit for all sessions; those that are not open by then are missing from ``opened``.
        """
        check = FactoryCheck(counter)
        began, cpu = time.perf_counter(), time.process_time()
        await self._connect()
        fresh = [Session(self._links[n % len(self._links)]) for n in range(sessions)]
        took: list[float] = []
        arguments = json.dumps(reset or {}, separators=(",", ":")).encode()
        wanted = {"nothing": "opened", "state": "state", "reset": "observation"}[then]

        def messages(session: Session) -> list[bytes]:
            made = [session.opening()]
            if then == "state":
                made.append(session.reading())
            elif then == "reset":
                made.append(session.message(b"reset", arguments))
            return made

        def on_reply(session: Session, envelope: Envelope, now: float) -> bool:
            if envelope.type == wanted:
                took.append(now - session.sent)
                session.id += then == "reset"
                return True
            if envelope.type != "opened":
                raise RuntimeError(f"open was answered {envelope.type}: {bytes(envelope.data)[:300]!r}")
            return False

        try:
            async with asyncio.timeout(limit_s):
                await self._exchange(fresh, frame, messages, on_reply, on_batch=lambda: check.answered(len(took)))
        except TimeoutError:
            pass  # as with a plain socket: those that are not open are counted, not fatal
        elapsed = time.perf_counter() - began
        return {
            "opened": float(len(took)),
            "factories_missing": check.missing,
            "opens_per_s": len(took) / elapsed,
            "seconds": elapsed,
            "client_cpu_us": (time.process_time() - cpu) / sessions * 1e6,
            **spread_ms(took),
        }

    async def step(
        self, seconds: float, action: dict[str, Any], frame: int = 64, limit: int | None = None
    ) -> dict[str, float]:
        """Step every session back to back.

        Each socket sends a frame when ``frame`` of its sessions are ready for their next step, or when no awaited
        reply could fill the frame.

        Args:
            seconds: Time after which no further step is sent.
            action: The action of each step.
            frame: Envelopes a frame.
            limit: Largest number of steps of each session.
        """
        took: list[float] = []
        data = json.dumps(action, separators=(",", ":")).encode()
        phase = Phase(self._links, sum(len(link.sessions) for link in self._links))
        began, cpu = time.perf_counter(), time.process_time()
        end = began + seconds
        frames = sum(link.frames for link in self._links)
        for link in self._links:
            self._drive(link, phase, data, end, frame, limit or -1, took)
        await phase.over()
        elapsed = time.perf_counter() - began
        return {
            "steps": float(len(took)),
            "steps_per_s": len(took) / elapsed,
            "client_cpu_us": (time.process_time() - cpu) / len(took) * 1e6,
            "replies_per_frame": len(took) / max(1, sum(link.frames for link in self._links) - frames),
            **spread_ms(took),
        }

    def _drive(
        self, link: Link, phase: Phase, data: bytes, end: float, frame: int, limit: int, took: list[float]
    ) -> None:
        clock = time.perf_counter
        now = clock()
        for session in link.sessions:
            session.sent = now
            session.left = limit
        sessions = self._sessions

        def take(envelope: Envelope) -> None:
            session = sessions[envelope.sid]  # type: ignore[index] # a push without one ends the phase
            if envelope.type != "observation" or envelope.id != session.id:
                raise RuntimeError(f"a step was answered {envelope.type} {envelope.id}: {bytes(envelope.data)[:300]!r}")
            now = clock()
            took.append(now - session.sent)
            link.in_flight -= 1
            session.id += 1
            session.left -= 1
            if now < end and session.left:
                session.sent = now
                link.ready.append(session.message(b"step", data))
            else:
                phase.one()

        link.take = phase.guard(take)
        link.batch = lambda: link.flush(frame)
        link.lost = phase.lost
        link.ready = [session.message(b"step", data) for session in link.sessions]
        link.in_flight = 0
        link.flush(frame)

    async def cut_while_stepping(self, action: dict[str, Any], after_s: float) -> dict[str, float]:
        """Step back to back, and drop every socket while requests and replies are in flight.

        Returns:
            ``cut_at``: the time of the cut, in seconds of the machine's monotonic clock.
        """
        stepping = asyncio.ensure_future(self.step(1e9, action))
        await asyncio.wait((stepping,), timeout=after_s)
        if stepping.done():
            await stepping
        for link in self._links:
            link.cut()
        cut_at = time.monotonic()
        stepping.cancel()
        await asyncio.wait((stepping,))
        return {"cut_at": cut_at}

    async def lose(self, action: dict[str, Any]) -> dict[str, float]:
        """Step back to back until the server has ended."""
        stepping = asyncio.ensure_future(self.step(1e9, action))
        await asyncio.wait((stepping,))
        error = stepping.exception()
        if not isinstance(error, ConnectionError):
            raise RuntimeError(f"the server was not lost: {error}")
        for link in self._links:
            link.cut()
        return {"lost_at": time.monotonic()}

    async def resume(
        self, since: float, action: dict[str, Any], frame: int = 64, timeout_s: float = 120.0
    ) -> dict[str, float]:
        """Connect again, resume every session, and make one step in each.

        A session whose step was accepted before the cut gets that reply first. Each reply has to name the delivery that
        belongs to its id, so a step that acted twice, or was lost, fails the benchmark.

        Args:
            since: Start of the outage on the machine's monotonic clock.
            action: The action of the steps before: a step whose reply is missing is sent again under its id.
            frame: Envelopes a frame.
            timeout_s: Longest time for which the server may be unreachable.
        """
        data = json.dumps(action, separators=(",", ":")).encode()
        first = resumed = stepped = 0.0
        missed = 0
        clock = time.monotonic
        sessions = self._sessions
        left_to_resume = len(sessions)
        phase = Phase(self._links, len(sessions))
        for session in sessions.values():
            session.left = 0  # ids that the server has accepted and answers without another request

        def take(link: Link, envelope: Envelope) -> None:
            nonlocal first, resumed, stepped, missed, left_to_resume
            session = sessions[envelope.sid]  # type: ignore[index]
            first = first or clock()
            if envelope.type == "resumed":
                next_id = int(msgspec.json.decode(envelope.data)["next_id"])
                if not session.id <= next_id <= session.id + 1:
                    raise RuntimeError(f"a session expects id {next_id} next; {session.id} has no reply yet")
                session.left = next_id - session.id
                left_to_resume -= 1
                if left_to_resume == 0:
                    resumed = clock()
                if session.left:
                    link.in_flight += 1
                else:
                    link.ready.append(session.message(b"step", data))
                return
            if envelope.type != "observation" or envelope.id != session.id or envelope.t != session.id - 1:
                raise RuntimeError(
                    f"after a resume, id {session.id} was answered {envelope.type} {envelope.id} t={envelope.t}: "
                    f"{bytes(envelope.data)[:300]!r}"
                )
            link.in_flight -= 1
            session.id += 1
            if session.left:
                session.left = 0
                missed += 1
                link.ready.append(session.message(b"step", data))
            else:
                stepped = stepped or clock()
                phase.one()

        async def again(link: Link) -> None:
            link.in_flight, link.ready = 0, []
            link.take = phase.guard(lambda envelope: take(link, envelope))
            link.batch = lambda: link.flush(frame)
            link.lost = lambda: None
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await link.connect(self._port)
                        break
                    except OSError:
                        await asyncio.sleep(RECONNECT_S)
            link.lost = phase.lost
            for start in range(0, len(link.sessions), RESUME_ENTRIES):
                entries = [session.entry() for session in link.sessions[start : start + RESUME_ENTRIES]]
                link.send(prepared(msgspec.json.encode({"type": "resume", "data": entries})))

        await asyncio.gather(*(again(link) for link in self._links))
        await phase.over()
        return {
            "first_answer_s": first - since,
            "all_resumed_s": resumed - since,
            "first_stepped_s": stepped - since,
            "all_stepped_s": clock() - since,
            "replies_missed": float(missed),
        }

    async def detach(self) -> dict[str, float]:
        """Drop every socket and keep the sessions."""
        self.abandon()
        return {}

    def abandon(self) -> None:
        """Drop every socket after a failure, so that the other sessions stop stepping."""
        for link in self._links:
            link.cut()
        self._connected = False

    async def close(self, frame: int = 64) -> dict[str, float]:
        """End every session, then the sockets."""
        began = time.perf_counter()

        def on_reply(session: Session, envelope: Envelope, now: float) -> bool:
            if envelope.type != "closed":
                raise RuntimeError(f"close was answered {envelope.type}: {bytes(envelope.data)[:300]!r}")
            return True

        ending = [session for link in self._links for session in link.sessions]
        for link in self._links:
            link.sessions = []
        await self._exchange(ending, frame, lambda session: [session.message(b"close", b"{}")], on_reply, keep=False)
        self._sessions.clear()
        await asyncio.gather(*(link.close() for link in self._links))
        self._connected = False
        return {"closed": float(len(ending)), "seconds": time.perf_counter() - began}

    async def _connect(self) -> None:
        if not self._connected:
            await asyncio.gather(*(link.connect(self._port) for link in self._links))
            self._connected = True

    async def _exchange(
        self,
        sessions: list[Session],
        frame: int,
        messages: Callable[[Session], list[bytes]],
        on_reply: Callable[[Session, Envelope, float], bool],
        *,
        keep: bool = True,
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """Send some messages for each session, all at once, and wait until ``on_reply`` has said that each is done."""
        phase = Phase(self._links, len(sessions))
        by_sid = {session.sid: session for session in sessions}

        def take(envelope: Envelope) -> None:
            if envelope.sid not in by_sid:
                raise RuntimeError(f"unexpected {envelope.type}: {bytes(envelope.data)[:300]!r}")
            if on_reply(by_sid[envelope.sid], envelope, time.perf_counter()):
                phase.one()

        for link in self._links:
            link.take, link.batch, link.lost = phase.guard(take), on_batch, phase.lost
        for session in sessions:
            session.link.ready += messages(session)
            if keep:
                session.link.sessions.append(session)
                self._sessions[session.sid] = session
        now = time.perf_counter()
        for session in sessions:
            session.sent = now
        for link in self._links:
            link.in_flight, ready, link.ready = 0, link.ready, []
            if ready:
                link.send(framed(ready, frame))
        await phase.over()
