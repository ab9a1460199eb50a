"""`Member`: one worker of a fleet, as it sees the others: who they are, and how to ask them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import quote

import httpx
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket

from errata_protocol.capabilities import ServerLimits
from errata_protocol.errors import JournalUnavailable, Misdirected
from errata_protocol.fleet import FleetMember, State
from errata_protocol.mux.client_decoding import error_of
from errata_protocol.shards import shard_of

from ..runtime.capacity import Capacity
from ..runtime.fleet import DeliveredState
from ..runtime.metrics import Metrics
from .board import Board, Phase
from .elsewhere import FORKED, Elsewhere
from .origin import passed_on
from .relay import Relay
from .routes import Sole, of_id

ASK_S = 30.0
"""How long the answer of another worker is waited for, seconds: it may be starting again."""

START_S = 0.05
"""Time between two looks at whether all workers have started, seconds."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the supervisor makes before it forks, and all workers inherit.

    Args:
        url: The address.
        listening: The socket that all workers accept from.
        probes: The socket of the health port, which all workers accept from too; None for no such port.
        board: The shared memory.
        names: Names of the shards, in order.
        directories: Data directories of the shards.
        inboxes: Of each worker a pair of sockets for its connections: the end that others send descriptors to, and its
            own.
        placed: Of each worker such a pair for connections that any worker may serve.
        doors: Of each worker the listening Unix socket on which others ask it.
        paths: Where these are.
        logins: Directory of the viewer's logins.
    """

    url: str
    listening: socket.socket
    probes: socket.socket | None
    board: Board
    names: tuple[str, ...]
    directories: tuple[Path, ...]
    inboxes: tuple[tuple[socket.socket, socket.socket], ...]
    placed: tuple[tuple[socket.socket, socket.socket], ...]
    doors: tuple[socket.socket, ...]
    paths: tuple[Path, ...]
    logins: Path


class FleetCapacity(Capacity):
    """A limit on the instances of an environment, or of a principal, in all workers.

    It is exact but for opens of the same moment: those of N workers may exceed it by N - 1.

    Args:
        limit: Upper bound of `in_use`.
        board: Where the workers write their counts.
        worker: This worker.
        name: Name of the count.

    Raises:
        CapacityReached: This worker has too many counts.
    """

    __slots__ = ("_board", "_here", "_name", "_worker")

    def __init__(self, limit: int | None, board: Board, worker: int, name: str) -> None:
        self._board, self._worker, self._name, self._here = board, worker, name, 0
        super().__init__(limit)

    @property
    def used(self) -> int:
        """Instances of this worker."""
        return self._here

    @used.setter
    def used(self, used: int) -> None:
        self._board.count(self._worker, self._name, used)
        self._here = used

    @property
    def in_use(self) -> int:
        """Instances of all workers."""
        return self._board.total(self._name)


class Member:
    """One worker.

    Args:
        plan: What all workers share.
        worker: Number of this worker.

    Attributes:
        relayed: How many frames were sent to other workers.
        places: Paths at which environments with one instance are served; see `Sole`.
        close_here: What closes a group's sessions of each environment.
    """

    def __init__(self, plan: Plan, worker: int) -> None:
        self.plan = plan
        self.worker = worker
        self.relayed = 0
        self.places: frozenset[str] = frozenset()
        self._with_one_instance: set[str] = set()
        self.close_here: dict[str, Callable[[str, str | None], Awaitable[int]]] = {}
        self._clients: dict[int, httpx.AsyncClient] = {}
        self.elsewhere = Elsewhere(lambda: self.names, worker, self.answer_of)

    def show(self, metrics: Metrics) -> None:
        """Add the metrics that only a worker of several has."""
        metrics.counter(
            "errata_relayed_frames_total",
            "Frames of multiplexed sockets that were passed on to other workers.",
            lambda: self.relayed,
        )

    # -- `errata_server.runtime.fleet.Fleet` --------------------------------------------------------------------------

    def members(self) -> list[FleetMember]:
        """Return all workers as they are now; their order is the plan's. One that has been drained is ``down``."""
        return [FleetMember(shard=name, state=self.state(worker)) for worker, name in enumerate(self.plan.names)]

    def state(self, worker: int) -> State:
        """Return the state of a worker as a member (PROTOCOL F6)."""
        board = self.plan.board
        if board.is_drained(worker) or not board.is_alive(worker):
            return "down"
        return "up" if board.phase(worker) is Phase.SERVES else "draining"

    def took(self, sid: str) -> None:
        """Note that a multiplexed session is this worker's; called before its row is committed."""
        self.plan.board.take_sid(self.worker, sid)

    def capacity(self, environment: str, limit: int | None) -> Capacity:
        """Return the capacity of an environment, which counts the instances of all workers."""
        if limit == 1:
            self._with_one_instance.add(environment)
        return FleetCapacity(limit, self.plan.board, self.worker, f"environment {environment}")

    def principal_capacity(self, principal: str | None, limit: int | None) -> Capacity:
        """Return the capacity of a principal, which counts the instances of all workers."""
        return FleetCapacity(limit, self.plan.board, self.worker, f"principal {principal or ''}")

    def relay(self, socket: WebSocket, handshake: WebSocket, limits: ServerLimits) -> Relay:
        """Return the relay of a multiplexed socket."""
        return Relay(self, socket, handshake, limits)

    async def state_at(self, eid: str, t: int, asked_on: HTTPConnection) -> DeliveredState | None:
        """Read a delivery of another worker's episode; return None if the episode is this worker's, or none's."""
        if (other := self.elsewhere.owner_of(eid)) is None:
            return None
        self.check_served(other)
        place = str(asked_on.scope["path"]).removesuffix("/ws")
        headers = [one for one in passed_on(asked_on) if not one[0].lower().startswith("sec-websocket-")]
        try:
            answer = await self.client(other).get(f"{place}/episodes/{quote(eid, safe='')}/states/{t}", headers=headers)
        except httpx.HTTPError as error:
            raise unanswered(other) from error
        if answer.status_code != 200:
            raise error_of(answer.content)
        kind = cast(Literal["reset", "step", "mcp"], answer.headers["X-Errata-Kind"])
        return DeliveredState(eid, t, kind, answer.headers["ETag"].strip('"'), answer.content)

    def closes_groups(self, environment: str, close: Callable[[str, str | None], Awaitable[int]]) -> None:
        """Add what closes an environment's open sessions of a group and principal here, and returns how many."""
        self.close_here[environment] = close

    async def close_group(self, environment: str, group: str, principal: str | None) -> int:
        """Close a group's open sessions at the other workers; return how many they were."""
        asked = {"environment": environment, "group": group, "principal": principal}
        return sum(answer["closed"] for answer in (await self.ask_others("/fleet/close_group", asked)).values())

    # -- asking others ------------------------------------------------------------------------------------------------

    @property
    def served(self) -> list[int]:
        """The workers that have not been drained, this one among them."""
        return [worker for worker in range(len(self.plan.names)) if not self.plan.board.is_drained(worker)]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the shards in order; "" for one whose worker has been drained: its ids are nobody's here."""
        board = self.plan.board
        return tuple("" if board.is_drained(worker) else name for worker, name in enumerate(self.plan.names))

    def check_served(self, worker: int) -> None:
        """Refuse what is a worker's that has been drained. Ids that name no shard are the first one's all the same.

        Raises:
            Misdirected: It has been drained.
        """
        if (shard := self.absent(worker)) is not None:
            raise Misdirected(shard)

    def absent(self, worker: int) -> str | None:
        """Return the shard of a worker that has been drained; None for one that has not."""
        return self.plan.names[worker] if self.plan.board.is_drained(worker) else None

    def for_new(self, path: str) -> int:
        """Return the worker for new sessions that arrive here: this one, or another one while this one drains.

        Args:
            path: Path of the request, or of the handshake.
        """
        if (home := self.sole.of(path)) is not None:
            return home
        board = self.plan.board
        return self.worker if board.phase(self.worker) is Phase.SERVES else board.place(self.worker)

    def serve(self, names: Sequence[str]) -> None:
        """Note at which paths the environments with one instance are; called when all are loaded.

        Args:
            names: Names of all environments; a single one is served at the root, too.
        """
        self.places = frozenset(f"/{name}" for name in names if name in self._with_one_instance)
        if self.places and len(names) == 1:
            self.places |= {""}

    @property
    def sole(self) -> Sole:
        """What is at one worker: the first that takes new sessions."""
        board = self.plan.board
        serving = (worker for worker in range(len(self.plan.names)) if board.phase(worker) is Phase.SERVES)
        return Sole(self.places, next(serving, self.worker))

    async def all_started(self) -> None:
        """Wait until each worker has started once."""
        while not self.plan.board.all_started:  # noqa: ASYNC110  # shared memory has no event
            await asyncio.sleep(START_S)

    def path_of(self, worker: int) -> Path:
        """Return where a worker's Unix socket is."""
        return self.plan.paths[worker]

    def owner_of(self, sid: str) -> int | None:
        """Return the worker of a multiplexed session that names a shard, or was opened recently; None for others."""
        return of_id(sid, self.names) if shard_of(sid) is not None else self.plan.board.owner_of(sid)

    async def owners_of(self, sids: Sequence[str]) -> dict[str, int]:
        """Return the workers that have multiplexed sessions; those that none has are left out.

        Raises:
            JournalUnavailable: A worker that may have one does not answer.
        """
        await self.all_started()  # until then the board does not have the sids of all
        found = {sid: owner for sid in sids if (owner := self.owner_of(sid)) is not None}
        left = [sid for sid in sids if sid not in found]
        if left:
            for other, answer in (await self.ask_others("/fleet/sids", {"sids": left})).items():
                found.update((left[at], other) for at in answer["has"])
            self._may_be_drained(found, left)
        return found

    def _may_be_drained(self, found: dict[str, int], left: Sequence[str]) -> None:
        """Add sessions that nobody has and that may be a drained worker's, which opened more than the board knows."""
        board = self.plan.board
        forgetful = (one for one in range(board.workers) if board.is_drained(one) and board.forgets_sids(one))
        if (drained := next(forgetful, None)) is not None:
            found.update((sid, drained) for sid in left if sid not in found and shard_of(sid) is None)

    async def ask_others(self, path: str, asked: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Return what each of the other workers answers.

        Raises:
            JournalUnavailable: One does not answer.
        """
        others = [other for other in self.served if other != self.worker]
        answers = await asyncio.gather(*(self.ask(other, path, asked) for other in others))
        return dict(zip(others, answers, strict=True))

    async def answer_of(self, other: int, path: str, asked: Mapping[str, Any]) -> bytes:
        """Return the body of a worker's answer.

        Raises:
            ErrataError: The worker answers with this error.
            Misdirected: The worker has been drained, and what is asked for is one of its episodes.
            JournalUnavailable: The worker does not answer, or fails.
        """
        if path != FORKED:  # an episode may have forks in a directory that is not served, and is kept for them
            self.check_served(other)
        try:
            answer = await self.client(other).post(path, json=asked)
        except httpx.HTTPError as error:
            raise unanswered(other) from error
        if answer.status_code == 200:
            return answer.content
        if answer.headers.get("content-type") != "application/json":  # a defect of its, which its log has
            raise unanswered(other)
        raise error_of(answer.content)

    async def ask(self, other: int, path: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return what another worker answers.

        Raises:
            ErrataError: It refuses.
            JournalUnavailable: It does not answer.
        """
        try:
            answer = await self.client(other).post(path, json=asked)
            if answer.is_client_error:
                raise error_of(answer.content)
            answer.raise_for_status()
            found: dict[str, Any] = answer.json()
            return found
        except (httpx.HTTPError, ValueError) as error:
            raise unanswered(other) from error

    def client(self, other: int) -> httpx.AsyncClient:
        """Return the HTTP client for another worker."""
        if other not in self._clients:
            self._clients[other] = httpx.AsyncClient(
                # As many connections as clients ask for: a stream of events has one for as long as it lasts.
                transport=httpx.AsyncHTTPTransport(
                    uds=str(self.path_of(other)),
                    limits=httpx.Limits(max_connections=None),
                    verify=False,  # there is no TLS, so no certificates are loaded on the event loop
                ),
                base_url="http://fleet",
                timeout=ASK_S,
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # those of one client are not another's
                trust_env=False,
            )
        return self._clients[other]

    async def close(self) -> None:
        """Close the connections to other workers."""
        for client in self._clients.values():
            await client.aclose()


def unanswered(other: int) -> JournalUnavailable:
    """Return the error for a worker that does not answer."""
    return JournalUnavailable(f"worker {other} of this server does not answer: try again", retry_after=1.0)
