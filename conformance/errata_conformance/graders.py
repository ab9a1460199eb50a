"""Graders for ``openenv validate`` (RFC 008), with the entry points ``openenv.validation.graders``.

`EpisodeDeterminism` plays the measured episode in two new sessions and compares the deliveries. `Replayability` reads
every delivery of a new episode again and compares the bytes. Both need a running server. Only this module of the kit
imports OpenEnv, and only OpenEnv imports this module.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from openenv.validation.report import CheckResult
from openenv.validation.types import CheckStatus, Level
from websockets.exceptions import WebSocketException

from .results import Blocked, Broken, NotSupported, NotTested
from .server_side.check_fork import alike
from .server_side.check_replay import probed
from .server_side.sockets import Message, Wire
from .server_side.target import Target


class _Grader:
    check_id = ""
    level = Level.RUNTIME
    requires_capabilities: frozenset[str] = frozenset()
    requires_provider: frozenset[Any] = frozenset()
    depends_on: tuple[str, ...] = ("runtime.startup",)
    remediation = ""

    def applies_to(self, manifest: Any) -> bool:
        """Return True: every environment can be graded."""
        return True

    def run(self, subject: Any) -> CheckResult:
        """Grade a running server."""
        started = time.monotonic()
        status, lines, measured = CheckStatus.PASS, [f"{self.check_id} holds"], {}
        evidence = subject.runtime_evidence
        if subject.running is None or evidence is None:
            status, lines = CheckStatus.SKIP, ["no server is running"]
        else:
            try:
                measured = asyncio.run(self.graded(Target(subject.running.base_url), requests(evidence)))
            except (NotSupported, NotTested) as error:
                status, lines = CheckStatus.SKIP, [str(error)]
            except (Broken, Blocked) as error:
                status, lines = CheckStatus.FAIL, [str(error)[:2000]]
            except (OSError, WebSocketException) as error:
                why = f"{subject.running.base_url} does not answer: {type(error).__name__}: {error}"
                status, lines = CheckStatus.FAIL, [why[:2000]]
        return CheckResult(
            check_id=self.check_id,
            status=status,
            measured=measured,
            evidence=lines,
            remediation=self.remediation if status is CheckStatus.FAIL else None,
            duration_s=time.monotonic() - started,
        )

    async def graded(self, target: Target, episode: list[dict[str, Any]]) -> dict[str, Any]:
        """Grade the server, and return the measurements by name.

        Args:
            target: The server.
            episode: The resets and steps of the measured episode, in order; each has ``type`` and perhaps ``data``.

        Raises:
            Broken: The server does not do what is graded.
            Blocked: The server broke another statement, so that it could not be graded.
            NotSupported: The server does not offer what is graded.
            NotTested: Something that the grading needs is missing.
            OSError: The server does not answer.
        """
        raise NotImplementedError


def requests(evidence: Any) -> list[dict[str, Any]]:
    """Return the resets and steps of the measured episode, in their order."""
    return [json.loads(one.request_json) for one in evidence.exchanges if one.operation in ("reset", "step")]


async def played(wire: Wire, episode: list[dict[str, Any]]) -> list[Message]:
    """Send an episode's requests and return what was delivered."""
    return [await wire.works(one["type"], one.get("data", {})) for one in episode]


class EpisodeDeterminism(_Grader):
    """The same requests give the same deliveries."""

    check_id = "runtime.episode_determinism"
    remediation = "Seed every generator from reset(seed=...), and leave durations and times out of observations."

    async def graded(self, target: Target, episode: list[dict[str, Any]]) -> dict[str, Any]:
        """Play the episode in two new sessions, and compare the deliveries.

        Args:
            target: The server.
            episode: The requests; see `_Grader.graded`.

        Returns:
            ``{"deliveries": N}``, the number of deliveries that were compared.

        Raises:
            Broken: Two deliveries differ.
            Blocked: The server refused the socket, or did not answer a request as any OpenEnv server does.
            NotTested: The episode is empty, or the server is at its capacity.
        """
        if not episode:
            raise NotTested("no reset and no step was measured")
        async with target.plain() as wire:
            first = await played(wire, episode)
        async with target.plain() as wire:
            second = await played(wire, episode)
        for t, (one, other) in enumerate(zip(first, second, strict=True)):
            try:
                alike(target, other, one)
            except Broken as error:
                raise Broken(f"request {t} was answered differently: {error}") from None
        return {"deliveries": len(first)}


class Replayability(_Grader):
    """Every delivery can be read again, with equal bytes (R-015-9)."""

    check_id = "semantic.replayability"
    level = Level.SEMANTIC
    remediation = "Keep the bytes of each delivery and answer state(t) with them: R-015-9."

    async def graded(self, target: Target, episode: list[dict[str, Any]]) -> dict[str, Any]:
        """Play the episode in a new session, read every delivery again by ``state`` with its t, and compare the bytes.

        The reads are made after the last request, on the same socket. The t of a delivery is its index among the
        requests, so the episode has to begin with a reset and to have no other.

        Args:
            target: The server.
            episode: The requests; see `_Grader.graded`. If it is empty, N is 0.

        Returns:
            ``{"deliveries": N}``, the number of deliveries that were read again.

        Raises:
            Broken: A delivery was read with other bytes, or could not be read; or ``capabilities`` got no reply.
            Blocked: The server refused the socket, replied to ``capabilities`` with another message, or did not answer
                a request of the episode as any OpenEnv server does.
            NotSupported: The server does not name ``state_at`` in its extensions.
            NotTested: The server is at its capacity.
            OSError: The server does not answer.
        """
        await target.learn()
        target.offers("state_at")
        async with target.plain() as wire:
            await probed(wire)
            seen = await played(wire, episode)
            for t, message in enumerate(seen):
                again = await wire.ask("state", {"t": t})
                if again.type != "state_at" or again.payload != message.payload:
                    raise Broken(f"t={t} was {message}, and is {again}")
        return {"deliveries": len(seen)}


replayability = Replayability()
episode_determinism = EpisodeDeterminism()
