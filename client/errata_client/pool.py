"""`EnvPool`: steps many sessions together, such as those of a trainer's rollout batch.

The requests of a batch are written in one turn of the event loop, so that they leave in a few frames, without a task
for each. On a server without the multiplexed protocol each environment has a plain socket.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from errata_protocol.errors import InvalidRequest, LocalProtocolError, ServiceError
from errata_protocol.labels import Labels
from errata_protocol.replay import Kind

from .batch import Batch, Result
from .client import ErrataClient
from .connections.connection import Connection
from .connections.stats import SessionStats
from .sync import run_blocking

Actions = Sequence[Any] | Mapping[int, Any]
"""Actions in the order of the environments, or by the index of the environment."""


class BatchFailed(ServiceError):
    """Some requests of a batch failed; ``results`` has the results of the others.

    Args:
        results: For each place of the batch its `StepResult` or exception.

    Attributes:
        results: The same.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        failed = {place: result for place, result in enumerate(results) if isinstance(result, BaseException)}
        place, first = next(iter(failed.items()))
        super().__init__(
            f"{len(failed)} of {len(results)} environments of the batch failed, the first at place {place}: {first!r}; "
            ".results holds all, and return_exceptions=True returns them instead",
            failed=sorted(failed),
        )
        self.results = list(results)


@dataclass(slots=True)
class PoolStats:
    """Counters of a pool, since it was made.

    Attributes:
        resets: Resets that were answered.
        steps: Steps that were answered.
        failed: Requests that ended in an exception, timeouts included.
        in_flight: Requests without outcome.
    """

    resets: int = 0
    steps: int = 0
    failed: int = 0
    in_flight: int = 0


class EnvPool:
    """``n`` sessions on one server, by index.

    Args:
        base_url: As for `ErrataClient`.
        n: How many sessions.
        client_cls: Class of the clients, e.g. ``TerminalEnv``.
        connection: The connection of all sessions; by default they share the one of their event loop.
        kwargs: Further arguments of ``client_cls``, for each client.

    Attributes:
        clients: The clients, for requests to one session: ``await pool.clients[3].fork(5)``.
        stats: Counters.
    """

    def __init__(
        self,
        base_url: str,
        n: int,
        *,
        client_cls: type[ErrataClient[Any, Any, Any]] = ErrataClient,
        connection: Connection | None = None,
        **kwargs: Any,
    ) -> None:
        if n < 1:
            raise InvalidRequest(f"a pool of {n} environments: give at least 1")
        self.clients = [client_cls(base_url, connection=connection, **kwargs) for _ in range(n)]
        self.stats = PoolStats()
        self._closed = False

    def __repr__(self) -> str:
        first = self.clients[0]
        done = ", ".join("-" if client.t is None else str(client.t) for client in self.clients[:8])
        more = ", ..." if len(self.clients) > 8 else ""
        return f"<EnvPool of {len(self.clients)} sessions, the first of which is {first!r}; t={done}{more}>"

    def __len__(self) -> int:
        """How many environments."""
        return len(self.clients)

    @property
    def session_stats(self) -> SessionStats:
        """The sums of all clients' `ErrataClient.stats`."""
        return sum((client.stats for client in self.clients), SessionStats())

    async def connect(self) -> Self:
        """Open all sessions; new ones where the pool was closed.

        Raises:
            ConnectionError: The server cannot be reached.
            ErrataError: The server refused a session, e.g. CAPACITY_REACHED; all were closed again.
        """
        self._closed = False
        try:
            opened = await asyncio.gather(*(client._connect_async() for client in self.clients), return_exceptions=True)
            for outcome in opened:
                if isinstance(outcome, BaseException):
                    raise outcome
        except BaseException:  # also on cancellation, whose caller gets no pool to close
            await self.aclose()
            raise
        return self

    async def aclose(self) -> None:
        """Close all clients. Their sessions end, except durable ones and those with tickets."""
        self._closed = True
        await asyncio.gather(*(client._close_async() for client in self.clients), return_exceptions=True)

    async def __aenter__(self) -> Self:
        """Open all sessions."""
        return await self.connect()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def sync(self) -> SyncEnvPool:
        """Return the blocking form of this pool, usable from any thread."""
        return SyncEnvPool(self)

    async def reset_batch(
        self,
        kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        labels: Labels | Sequence[Labels] | None = None,
        indices: Sequence[int] | None = None,
        return_exceptions: bool = False,
        timeout_s: float | None = None,
    ) -> list[Result]:
        """Reset environments together.

        Args:
            kwargs: Arguments of reset: the same for all, or one mapping for each of ``indices``.
            labels: Labels of the episodes (`ErrataClient.labels`): the same for all, or one for each of ``indices``;
                None leaves the clients' as they are.
            indices: Which environments; None takes all.
            return_exceptions: Return the exception of a failed request in its place.
            timeout_s: Timeout of the whole batch, seconds; None takes the clients' ``message_timeout_s``.

        Returns:
            A `StepResult` for each of ``indices``, in their order.

        Raises:
            BatchFailed: Some failed and ``return_exceptions`` is False; raised when all others have their results.
            InvalidRequest: ``kwargs`` or ``indices`` do not fit the environments.
            LocalProtocolError: The pool is closed.
            ValueError: ``timeout_s`` is not a number.
        """
        places = self._places(indices)
        if kwargs is None or isinstance(kwargs, Mapping):
            given: Sequence[Any] = [kwargs or {}] * len(places)
        else:
            given = kwargs
        if labels is not None:
            self._label(places, labels)
        return await self._all("reset", places, given, return_exceptions, timeout_s)

    async def step_batch(
        self,
        actions: Actions,
        *,
        indices: Sequence[int] | None = None,
        return_exceptions: bool = False,
        timeout_s: float | None = None,
    ) -> list[Result]:
        """Step environments together.

        Args:
            actions: One for each of ``indices``, or a mapping from index to action.
            indices: Which environments; None takes all, or those of the mapping.
            return_exceptions: Return the exception of a failed request in its place.
            timeout_s: See `reset_batch`. None: the longest timeout that the server allows these actions, if longer.

        Returns:
            A `StepResult` for each of ``indices``, in their order or in that of the mapping.

        Raises:
            As `reset_batch`.
        """
        return await self._all("step", *self._given(actions, indices), return_exceptions, timeout_s)

    async def as_completed(
        self, actions: Actions, *, indices: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[tuple[int, Result]]:
        """Step environments together and yield each result as it arrives.

        Closing the iterator early cancels the pending steps.

        Args:
            actions: See `step_batch`.
            indices: See `step_batch`.
            timeout_s: See `step_batch`; pending steps are cancelled then and give TimeoutError.

        Yields:
            (index, `StepResult` or exception), in the order of arrival.

        Raises:
            InvalidRequest, LocalProtocolError, ValueError: As `reset_batch`, before the first result.
        """
        places, given = self._given(actions, indices)
        waits_s = self._timeout(timeout_s)
        batch = self._batch("step", places, given)
        waits_s = waits_s if timeout_s is not None else max(waits_s, batch.call_timeout_s)
        until = asyncio.get_running_loop().time() + waits_s
        try:
            while (place := await batch.next(until)) is not None:
                yield places[place], batch.results[place]
        finally:
            batch.cancel()

    async def _all(
        self, kind: Kind, places: Sequence[int], given: Sequence[Any], return_exceptions: bool, timeout_s: float | None
    ) -> list[Result]:
        waits_s = self._timeout(timeout_s)
        batch = self._batch(kind, places, given)
        results = await batch.all(waits_s if timeout_s is not None else max(waits_s, batch.call_timeout_s))
        if not return_exceptions and any(isinstance(result, BaseException) for result in results):
            raise BatchFailed(results)
        return results

    def _label(self, places: Sequence[int], labels: Labels | Sequence[Labels]) -> None:
        """Set the labels of the clients at ``places``."""
        given = [labels] * len(places) if isinstance(labels, Labels) else labels
        if len(given) != len(places):
            raise InvalidRequest(f"{len(given)} labels for {len(places)} environments: give one for each, or one")
        for place, one in zip(places, given, strict=True):
            self.clients[place].labels = one

    def _batch(self, kind: Kind, places: Sequence[int], given: Sequence[Any]) -> Batch:
        if self._closed:
            # A reset would make each client open a session again, which would never be closed.
            raise LocalProtocolError(f"the pool is closed, no {kind} was sent: connect() opens other sessions")
        if len(given) != len(places):
            raise InvalidRequest(f"{len(given)} entries for {len(places)} environments: give one for each")
        self.stats.in_flight += len(places)
        return Batch(
            [(self.clients[index], data) for index, data in zip(places, given, strict=True)], kind, self._count
        )

    def _count(self, kind: Kind, result: Result) -> None:
        stats = self.stats
        stats.in_flight -= 1
        if isinstance(result, BaseException):
            stats.failed += 1
        elif kind == "reset":
            stats.resets += 1
        else:
            stats.steps += 1

    def _timeout(self, timeout_s: float | None) -> float:
        default: float = self.clients[0]._message_timeout
        if timeout_s is not None and math.isnan(timeout_s):
            raise ValueError("timeout_s is not a number: give seconds, or None for message_timeout_s")
        return default if timeout_s is None else timeout_s

    def _places(self, indices: Sequence[int] | None) -> Sequence[int]:
        if indices is None:
            return range(len(self.clients))
        for index in indices:
            if not 0 <= index < len(self.clients):
                raise InvalidRequest(f"there is no environment {index}: the pool has 0 to {len(self.clients) - 1}")
        return indices

    def _given(self, actions: Actions, indices: Sequence[int] | None) -> tuple[Sequence[int], Sequence[Any]]:
        if isinstance(actions, Mapping):
            if indices is not None:
                raise InvalidRequest("a mapping of actions names its environments: leave indices out")
            return self._places(list(actions)), list(actions.values())
        return self._places(indices), actions


class SyncEnvPool:
    """Blocking form of an `EnvPool`, on the event loop that blocking clients share.

    Args:
        pool: The pool. Do not use its own methods at the same time.
    """

    def __init__(self, pool: EnvPool) -> None:
        self._pool = pool

    def __len__(self) -> int:
        """How many environments."""
        return len(self._pool)

    @property
    def clients(self) -> list[Any]:
        """The blocking clients, by index."""
        return [client.sync() for client in self._pool.clients]

    @property
    def stats(self) -> PoolStats:
        """Counters."""
        return self._pool.stats

    @property
    def session_stats(self) -> SessionStats:
        """See `EnvPool.session_stats`."""
        return self._pool.session_stats

    def connect(self) -> Self:
        """Open all sessions. See `EnvPool.connect`."""
        run_blocking(self._pool.connect())
        return self

    def close(self) -> None:
        """Close all clients. See `EnvPool.aclose`."""
        run_blocking(self._pool.aclose())

    def __enter__(self) -> Self:
        """Open all sessions."""
        return self.connect()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def reset_batch(
        self,
        kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        labels: Labels | Sequence[Labels] | None = None,
        indices: Sequence[int] | None = None,
        return_exceptions: bool = False,
        timeout_s: float | None = None,
    ) -> list[Result]:
        """Reset environments together. See `EnvPool.reset_batch`."""
        return run_blocking(
            self._pool.reset_batch(
                kwargs, labels=labels, indices=indices, return_exceptions=return_exceptions, timeout_s=timeout_s
            )
        )

    def step_batch(
        self,
        actions: Actions,
        *,
        indices: Sequence[int] | None = None,
        return_exceptions: bool = False,
        timeout_s: float | None = None,
    ) -> list[Result]:
        """Step environments together. See `EnvPool.step_batch`."""
        return run_blocking(
            self._pool.step_batch(actions, indices=indices, return_exceptions=return_exceptions, timeout_s=timeout_s)
        )

    def as_completed(
        self, actions: Actions, *, indices: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> Iterator[tuple[int, Result]]:
        """Step environments together and yield each result as it arrives. See `EnvPool.as_completed`."""
        results = self._pool.as_completed(actions, indices=indices, timeout_s=timeout_s)

        async def following() -> tuple[int, Result] | None:
            return await anext(results, None)

        async def drop() -> None:
            await results.aclose()  # type: ignore[attr-defined] # an asynchronous generator has it

        try:
            while (found := run_blocking(following())) is not None:
                yield found
        finally:
            run_blocking(drop())
