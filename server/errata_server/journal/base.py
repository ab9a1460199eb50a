"""`Journal`, the abstract base class of all journals: its rows, its reads, and when a commit is durable.

A *commit* is a group of records that becomes durable together or not at all; a reply leaves the server only after its
commit did. `Journal.commit` hands the group to the store and waits. A store that cannot write (disk full, I/O error)
keeps the group and tries again: the caller stays suspended, `failing` says why, nothing is run twice (PROTOCOL E4).

No primitive here is bound to one event loop: a commit is answered on the loop it was asked from. Records are msgspec
structs: a frozen dataclass of as many fields takes ten times as long to make.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from errata_protocol.environment import SnapshotRef
from errata_protocol.episode_lists import EVERY, NEWEST, EpisodeFilter, EpisodeOrder, ListPlace, Status
from errata_protocol.errors import ErrataError, JournalUnavailable
from errata_protocol.labels import Labels
from errata_protocol.payload import semantic_sha256
from errata_protocol.replay import EpisodeAggregates, Kind, Origin

SessionStatus = Literal["open", "closed", "lost", "expired"]
ListedStatus = SessionStatus | Literal["detached"]
"""Status of a session in lists of episodes."""
RecordKind = Literal["reset", "step", "mcp", "fork", "close"]


class JournalDamaged(JournalUnavailable):
    """A row that was durable cannot be read as it was written, or the index names another one in its place."""


ALL_OWNERS = "*"
"""In the place of an owner: whoever can read the journal's files sees the episodes of all. No principal is equal to
it, since each is a hash or None, and no door passes it on."""


def is_owned(owner: str | None, principal: str | None) -> bool:
    """Return whether ``principal`` may see what belongs to ``owner``."""
    return principal in (owner, ALL_OWNERS)


def label_fields(labels: Labels) -> dict[str, Any]:
    """Return labels as the fields that `SessionRow` and `EpisodeRow` have of them."""
    return {"label_group": labels.group, "label_step": labels.step, "label_run": labels.run}


class SessionRow(Struct, frozen=True, gc=False):
    """A session as the journal knows it.

    Args:
        sid: Session id.
        environment: Environment name.
        recovery: Recovery class, as reported to the client.
        seed: Drawn by the server when the session was opened.
        created: Seconds since the epoch.
        given_out: A client knows its id, so the session outlives its socket (PROTOCOL A3; `Session.resumable`).
        principal: Hash of the token that opened it, None with auth off.
        status: ``open`` until closed by its owner, lost, or ended by its age.
        fork_of: eid of the parent for a fork, else None.
        fork_request: ``request_id`` of the fork request, else None.
        lost: Why it is lost, None if it is not, or was lost with its server.
        key_hash: `errata_protocol.mux.hash_key` of a multiplexed session's key, 32 bytes; None for any other session,
            and such a one is never found by its id alone.
        group: Sessions that ``close_group`` ends together.
        label_group: Label ``group`` of the session's episodes whose reset has none; not the ``group`` of sessions.
        label_step: Label ``step`` of the session's episodes whose reset has none.
        label_run: Label ``run`` of the session's episodes whose reset has none.
    """

    sid: str
    environment: str
    recovery: str
    seed: int
    created: float
    given_out: bool = False
    principal: str | None = None
    status: SessionStatus = "open"
    fork_of: str | None = None
    fork_request: str | None = None
    lost: str | None = None
    key_hash: bytes | None = None
    group: str | None = None
    label_group: str | None = None
    label_step: int | None = None
    label_run: str | None = None

    @property
    def labels(self) -> Labels:
        """Labels of its episodes, unless their resets have others."""
        return Labels(group=self.label_group, step=self.label_step, run=self.label_run)


class EpisodeRow(Struct, frozen=True, gc=False):
    """An episode: reset to done.

    Args:
        eid: Key minted by the server.
        sid: Session it ran in.
        environment: Environment name.
        created: Seconds since the epoch.
        episode_id: Upstream's alias, chosen by the client.
        principal: Owner, as in `SessionRow`.
        origin_eid: Parent episode of a fork.
        origin_t: Parent delivery of a fork.
        agent_text_version: Version of the environment's ``agent_text`` when it was delivered.
        label_group: Label ``group`` of the episode.
        label_step: Label ``step`` of the episode.
        label_run: Label ``run`` of the episode.
    """

    eid: str
    sid: str
    environment: str
    created: float
    episode_id: str | None = None
    principal: str | None = None
    origin_eid: str | None = None
    origin_t: int | None = None
    agent_text_version: str | None = None
    label_group: str | None = None
    label_step: int | None = None
    label_run: str | None = None

    @property
    def fork_name(self) -> str | None:
        """``episode_id`` in the environment's state of a fork; None where the episode is no fork.

        It was drawn with the fork. Servers before drew none, and gave such environments the eid, which their journaled
        answers may hold.
        """
        return None if self.origin_eid is None else self.episode_id or self.eid

    @property
    def labels(self) -> Labels:
        """Its labels."""
        return Labels(group=self.label_group, step=self.label_step, run=self.label_run)

    @property
    def origin(self) -> Origin | None:
        """Where a fork comes from, None for any other episode."""
        if self.origin_eid is None or self.origin_t is None:
            return None
        return Origin(eid=self.origin_eid, t=self.origin_t)


class DeliveryRow(Struct, frozen=True, gc=False, array_like=True):
    """One mutating request and its outcome; the unit of exactly-once.

    A row without ``t`` is a recorded reply that delivered nothing: an error, or the answer to a fork or close.

    Args:
        eid: Episode; empty for a recorded reply of a session that had none yet.
        t: Delivery index; None for a recorded reply that is no delivery.
        sid: Session.
        id: Request id on mux, None on plain sockets.
        kind: reset, step, mcp; ``fork`` marks the t=0 that was copied from a parent, or, without t, a fork of this
            session; ``close`` its end.
        request: What was run, enough to run it again: the request as received, and what the server drew for a reset
            that left it open (`errata_server.sessions.reexecution.drawn`).
        request_sha: sha256 of the request as received, 32 bytes.
        status: ``ok`` or the wire code of a recorded error.
        payload: P_t, or the ``data`` of the reply that is no delivery.
        digest: sha256 of ``payload``, 32 bytes.
        semantic_digest: 32 bytes, None where there is none or ``volatile`` is given: ask `semantic` for it.
        state: `errata_protocol.environment.Snapshot.state` after the delivery, None when not recoverable.
        refs: `errata_protocol.environment.Snapshot.refs`; garbage collection reads only these.
        created: Seconds since the epoch.
        reward: Finite reward, else None.
        done: The delivery ended the episode.
        error_kind: Marker, if any, so that listings never parse payloads.
        hint_template_key: Likewise.
        volatile: What the semantic digest leaves out of ``payload``. The digest is computed on demand. None
            where the row holds the digest itself.
    """

    eid: str
    t: int | None
    sid: str
    id: int | None
    kind: RecordKind
    request: bytes
    request_sha: bytes
    status: str
    payload: bytes
    digest: bytes
    semantic_digest: bytes | None
    state: bytes | None
    refs: tuple[SnapshotRef, ...]
    created: float
    reward: float | None = None
    done: bool = False
    error_kind: str | None = None
    hint_template_key: str | None = None
    volatile: tuple[str, ...] | None = None

    def semantic(self) -> bytes | None:
        """Return the digest that re-execution compares, 32 bytes; None where there is none (PROTOCOL C2)."""
        return self.semantic_digest if self.volatile is None else semantic_sha256(self.payload, self.volatile)

    @property
    def wire_kind(self) -> Kind:
        """The kind a client sees of a delivery: a fork's first one is its reset."""
        return "reset" if self.kind == "fork" or self.kind == "close" else self.kind


class SessionChange(Struct, frozen=True, gc=False):
    """A later change to a session row; None leaves a column as it is."""

    sid: str
    status: SessionStatus | None = None
    given_out: bool | None = None
    lost: str | None = None

    def applied(self, row: SessionRow) -> SessionRow:
        """Return the session's row after this change."""
        return replace(
            row,
            status=self.status if self.status is not None else row.status,
            given_out=self.given_out if self.given_out is not None else row.given_out,
            lost=self.lost if self.lost is not None else row.lost,
        )


class RewardRow(Struct, frozen=True, gc=False):
    """A reward that came after its delivery (PROTOCOL D8, F4): appended, never changed.

    Args:
        eid: Episode.
        t: Delivery that the reward is for.
        value: Finite.
        source: Where it comes from, e.g. ``environment`` or a verifier's name.
        reward_id: Unique in its episode: posting it again changes nothing.
        sid: Session of the episode.
        seq: Number of the push that carries it, from 1 in its session; None in a session that nothing is pushed to.
        created: Seconds since the epoch.
    """

    eid: str
    t: int
    value: float
    source: str
    reward_id: str
    sid: str
    seq: int | None
    created: float


Record = SessionRow | EpisodeRow | DeliveryRow | SessionChange | RewardRow

Settled = Callable[[Sequence[Record], ErrataError | None], None]
"""Called once with the records of a commit, and None or the error that `Journal.commit` would raise."""


class TurnRow(Struct, frozen=True, gc=False):
    """A delivery without its payload, request and state: what listings need; its semantic digest where asked for."""

    t: int
    kind: RecordKind
    digest: bytes
    semantic_digest: bytes | None
    reward: float | None
    done: bool
    error_kind: str | None
    hint_template_key: str | None


class EpisodeStats(Struct, frozen=True):
    """An episode with what its deliveries add up to: all that a list of episodes shows, filters and sorts by.

    Args:
        row: The episode.
        deliveries: How many.
        reward: Sum of their finite rewards.
        done: One of them ended it.
        error_kinds: Marked turns by kind, sorted.
        hint_keys: Turns by the key of their hint's template, sorted.
        task: `errata_protocol.task_names.task_of` its t=0; of a fork whose t=0 names none, that of its parent.
        last: When its newest delivery was made, seconds since the epoch; its creation, without any.
        session_status: `listed_status` of its session; None for one that is not known, and counts as closed.
    """

    row: EpisodeRow
    deliveries: int
    reward: float
    done: bool
    error_kinds: dict[str, int]
    hint_keys: dict[str, int]
    task: str | None
    last: float
    session_status: ListedStatus | None

    @property
    def eid(self) -> str:
        """Its key."""
        return self.row.eid

    @property
    def episode_id(self) -> str | None:
        """Upstream's alias."""
        return self.row.episode_id

    @property
    def environment(self) -> str:
        """Name of its environment."""
        return self.row.environment

    @property
    def created(self) -> float:
        """Seconds since the epoch."""
        return self.row.created

    @property
    def origin(self) -> Origin | None:
        """Where a fork comes from."""
        return self.row.origin

    @property
    def group(self) -> str | None:
        """Its label of this name."""
        return self.row.label_group

    @property
    def step(self) -> int | None:
        """Its label of this name."""
        return self.row.label_step

    @property
    def run(self) -> str | None:
        """Its label of this name."""
        return self.row.label_run

    @property
    def status(self) -> Status:
        """``done`` once a delivery ended it, else the status of its session."""
        return "done" if self.done else self.session_status or "closed"


def listed_status(status: SessionStatus | None, sid: str, attached: frozenset[str] | None) -> ListedStatus | None:
    """Return the status of a session in lists: an open one without a connection is ``detached``.

    Args:
        status: Status that the journal has; None for a session that is not known.
        sid: The session.
        attached: Ids of all sessions that have a connection; None where nobody knows, and open ones stay ``open``.
    """
    return "detached" if status == "open" and attached is not None and sid not in attached else status


class HeldEpisode(Struct, frozen=True):
    """An episode of any owner, with its size. For the operator of the server, never for a client.

    Args:
        n: Its place in the order in which episodes were made.
        row: The episode.
        deliveries: How many.
        payload_bytes: Of all its rows, recorded errors included.
        request_bytes: Likewise.
        state_bytes: Of its snapshots; sandbox layers are files of their own.
        last: When its newest row was made, seconds since the epoch.
        done: A delivery ended it.
    """

    n: int
    row: EpisodeRow
    deliveries: int
    payload_bytes: int
    request_bytes: int
    state_bytes: int
    last: float
    done: bool

    @property
    def size_bytes(self) -> int:
        """All that its rows hold, without the store's own overhead."""
        return self.payload_bytes + self.request_bytes + self.state_bytes


class Reads(ABC):
    """What can be read of a journal. Every store and every reader of its files has these methods; see `Journal`."""

    @abstractmethod
    def delivery(self, eid: str, t: int) -> DeliveryRow | None:
        """Return the delivery with its payload, or None."""

    @abstractmethod
    def recorded(self, eid: str, t: int) -> list[DeliveryRow]:
        """Return delivery t and, in order, the errors recorded between it and delivery t + 1; empty without it.

        The errors are promised for sessions that are continued by re-execution; a store may keep no others.
        """

    @abstractmethod
    def last_delivery(self, sid: str) -> DeliveryRow | None:
        """Return the newest delivery of a session that has a t, or None before its first reset."""

    @abstractmethod
    def replies(self, sid: str, first: int, last: int) -> list[DeliveryRow]:
        """Return the rows of a session with ``first <= id <= last``, in order of id; ids that are kept no longer fail
        to appear. A store may leave ``request`` out of rows without t."""

    @abstractmethod
    def last_id(self, sid: str) -> int:
        """Return the highest id that a row of the session has, 0 without any. Deleting episodes does not lower it."""

    @abstractmethod
    def rewards(self, eid: str) -> list[RewardRow]:
        """Return the late rewards of an episode, in the order of their commits."""

    @abstractmethod
    def pushes(self, sid: str, first: int, last: int) -> list[RewardRow]:
        """Return the rewards of a session with ``first <= seq <= last``, in order of seq; those of deleted episodes
        are not among them."""

    @abstractmethod
    def last_seq(self, sid: str) -> int:
        """Return the highest seq of the session's rewards, 0 without any. Deleting episodes does not lower it."""

    @abstractmethod
    def episode(self, eid: str) -> EpisodeRow | None:
        """Return an episode, or None."""

    @abstractmethod
    def first_episode(self, sid: str) -> EpisodeRow | None:
        """Return the oldest episode of a session, or None."""

    @abstractmethod
    def session_episodes(self, sid: str) -> list[str]:
        """Return the eids of a session's episodes, oldest first, without those that were deleted."""

    @abstractmethod
    def turns(self, eid: str, *, semantic: bool = False) -> list[TurnRow]:
        """Return all deliveries of an episode in order of t, without payloads.

        Args:
            eid: Episode.
            semantic: With their semantic digests, for which payloads have to be read.
        """

    @abstractmethod
    def deliveries(self, eid: str, *, after: int = -1, limit: int, most_bytes: int) -> list[DeliveryRow]:
        """Return deliveries of an episode, whole and in order of t. What it costs does not depend on how many others
        the episode has.

        Args:
            eid: Episode.
            after: The t behind which they begin; -1 for the first.
            limit: At most this many.
            most_bytes: Size of requests and payloads, in bytes, after which no further one is read.
        """

    @abstractmethod
    def late_rewards(self, eid: str, *, first: int, last: int) -> dict[int, int]:
        """Return how many late rewards the deliveries of an episode have, by their t.

        Args:
            eid: Episode.
            first: Lowest t that counts.
            last: Highest t that counts.
        """

    @abstractmethod
    def episodes(
        self,
        *,
        limit: int,
        after: ListPlace | None = None,
        wanted: EpisodeFilter = EVERY,
        order: EpisodeOrder = NEWEST,
        principal: str | None,
        attached: frozenset[str] | None = None,
    ) -> tuple[list[EpisodeStats], ListPlace | None]:
        """Return episodes in an order, and the place of the last one if others follow, else None.

        Args:
            limit: At most this many.
            after: Place behind which the page begins, of an earlier answer in this order; None for the first page.
            wanted: What the episodes have to be.
            order: What they are sorted by.
            principal: Only of this owner; None means those made with auth off, and `ALL_OWNERS` all.
            attached: Ids of the sessions that have a connection; see `listed_status`.
        """

    @abstractmethod
    def aggregates(
        self,
        *,
        bucket_s: int,
        wanted: EpisodeFilter = EVERY,
        principal: str | None,
        attached: frozenset[str] | None = None,
    ) -> EpisodeAggregates:
        """Return what episodes add up to, by the time of their creation.

        Args:
            bucket_s: Length of a bucket, seconds.
            wanted: What the episodes have to be.
            principal: Owner of the episodes; None means those made with auth off, and `ALL_OWNERS` all.
            attached: Ids of the sessions that have a connection; see `listed_status`.

        Raises:
            errata_protocol.errors.InvalidRequest: There are too many buckets or counts.
        """

    @abstractmethod
    def episode_stats(self, eid: str, attached: frozenset[str] | None = None) -> EpisodeStats | None:
        """Return an episode of any owner with what its deliveries add up to, or None; ``attached`` as in `episodes`."""

    @abstractmethod
    def held(self, *, after: int, limit: int) -> list[HeldEpisode]:
        """Return episodes of all owners, oldest first: what size, retention and export go through.

        Args:
            after: `HeldEpisode.n` of the last one of an earlier answer, else 0.
            limit: At most this many.
        """

    @abstractmethod
    def session(self, sid: str) -> SessionRow | None:
        """Return a session, or None."""

    @abstractmethod
    def open_sessions(self) -> list[SessionRow]:
        """Return all sessions with status ``open``."""

    @abstractmethod
    def fork_session(self, eid: str, request_id: str) -> SessionRow | None:
        """Return the session that an earlier fork request made, or None."""

    @abstractmethod
    def refs(self) -> set[SnapshotRef]:
        """Return every ref that a committed row names."""


class Journal(Reads):
    """Durable deliveries. Reads see everything committed. If ``blocking`` is true they belong on a worker thread."""

    durable: bool
    """A commit survives the death of the process."""
    blocking: bool
    """Reads may wait for a disk or for another thread; they belong on a worker thread."""

    @property
    @abstractmethod
    def failing(self) -> str | None:
        """Why commits cannot be made durable now; None while they can."""

    @property
    def trouble(self) -> str | None:
        """Another problem to report at ``/ready``, such as a failed thread of the store; None without one."""
        return None

    def watch(self, written: Callable[[int, float], None]) -> None:
        """Call ``written(commits, seconds)`` after each transaction, on whatever thread wrote it."""

    async def commit(self, *records: Record) -> None:
        """Make ``records`` durable together, in order, and return. Waits as long as the store cannot write.

        Cancelling the wait does not take the commit back.

        Raises:
            errata_protocol.errors.Conflict: A record contradicts a committed one (same episode and t, same session
                and id, same episode and reward_id, same session and seq); nothing of the group was written.
            errata_protocol.errors.UnknownEpisode: A delivery's episode, or the delivery that an episode was forked
                from, is not committed or was deleted meanwhile, or a reward's delivery; nothing of the group was
                written. A recorded reply (t None) of such an episode is left out instead: it goes with its episode,
                as in `delete_episode`; one without an episode stays with its session.
            errata_protocol.errors.EnvironmentOutputInvalid: The store has no form for a value of a record, such as a
                text with a lone surrogate; nothing of the group was written.
            errata_protocol.errors.JournalUnavailable: The journal was closed before the commit.
        """
        await durable(self.submit, records)

    @abstractmethod
    def submit(
        self,
        records: Sequence[Record],
        settled: Settled,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """As `commit`, for callers that have no task to wait in.

        Args:
            records: To make durable.
            settled: Called once on this event loop, now or later.
            loop: The event loop that runs, where it is known.

        Raises:
            errata_protocol.errors.JournalUnavailable: The journal is closed; ``settled`` is not called.
        """

    def compact(self, *, stop: Callable[[], bool] = lambda: False) -> int:
        """Give the space of deleted episodes back, where that takes work; return how many bytes. On a worker thread.

        Args:
            stop: Asked from time to time; once it returns true, what is left is for the next call.

        Raises:
            errata_protocol.errors.JournalUnavailable: It cannot be written.
        """
        return 0

    @abstractmethod
    def delete_episode(self, eid: str, *, unless_forked: bool = False) -> int:
        """Delete an episode with its deliveries, errors and rewards. Durable on return.

        Args:
            eid: The episode.
            unless_forked: Delete nothing if another episode was forked from this one. No commit comes between the
                check and the deletion.

        Returns:
            The number of deleted deliveries; 0 if the episode does not exist or was kept because of a fork.

        Raises:
            JournalUnavailable: The journal is closed, read-only, or cannot be written.
        """

    @abstractmethod
    def close(self) -> None:
        """Write what is pending, stop threads, release files. Idempotent."""


async def durable(submit: Callable[[Sequence[Record], Settled], None], records: Sequence[Record]) -> None:
    """Submit records and wait until they are durable; see `Journal.commit`."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(_: Sequence[Record], error: ErrataError | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    submit(records, settle)
    await future
