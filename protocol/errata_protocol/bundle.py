"""The episode bundle: whole episodes with their exact payloads in one file, readable without a server.

A bundle is UTF-8 text with one JSON object a line: a `BundleHeader`; an `EpisodeRecord` for each episode, parents
before their forks; then for each episode its `DeliveryRecord`s in order of t, with the `FailureRecord`s between them,
and its `BundledReward`s; then a `BundleEnd`. docs/export.md explains each field.

Payloads and requests are JSON strings. The UTF-8 encoding of the string's value is the exact bytes, whatever tool
copied the line. A request that is not UTF-8 is in ``request_base64`` instead.

A reader skips lines whose ``record`` it does not know, and unknown fields: both may be added without a new version. It
refuses another ``version``.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from .errors import InvalidRequest
from .payload import DIGEST_PREFIX
from .replay import EpisodeDetail, EpisodeSummary, Kind, Origin, RewardRecord, TurnRecord
from .task_names import task_of

FORMAT = "errata-bundle"
VERSION = 1

MAX_LINE_BYTES = 256 * 1024**2
"""Longest line, bytes: several times the largest request and payload together."""

MAX_HEADER_BYTES = 16 * 1024**2
"""Longest first line, bytes: what is no bundle is refused before much of it is read."""

Digest = Annotated[str, Field(pattern=rf"^{DIGEST_PREFIX}[0-9a-f]{{64}}$")]
T = Annotated[int, Field(ge=0, lt=2**53)]
Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class BundleHeader(_Line):
    """The first line.

    Attributes:
        format: Always ``errata-bundle``.
        version: Version of this format; raised when older readers would misread it.
        created: When it was written, in seconds since the epoch.
        server: Version of Errata that wrote it.
        episodes: The episodes that were asked for; the others in the file are their ancestors.
    """

    record: Literal["bundle"] = "bundle"
    format: str = FORMAT
    version: int = VERSION
    created: float
    server: str
    episodes: tuple[str, ...]


class EpisodeRecord(_Line):
    """One episode; its fields are those of `errata_protocol.EpisodeSummary`, and these.

    Attributes:
        deliveries: Number of `DeliveryRecord`s that follow.
        rewards: Number of `BundledReward`s that follow.
        recovery: Recovery class of its session.
        task: Task of the episode, if it has a name.
        status: Status of its session when this was written: ``open``, ``closed``, ``lost`` or ``expired``.
        group: Label, as `errata_protocol.labels.Labels` has it; so are ``step`` and ``run``.
    """

    record: Literal["episode"] = "episode"
    eid: str
    episode_id: str | None = None
    environment: str
    session: str
    created: float
    origin: Origin | None = None
    agent_text_version: str | None = None
    recovery: str | None = None
    task: str | None = None
    status: str | None = None
    group: str | None = None
    step: int | None = None
    run: str | None = None
    deliveries: Count
    rewards: Count = 0


class _Requested(_Line):
    eid: str
    kind: Kind
    id: int | None = None
    request: str | None = None
    request_base64: str | None = None
    request_sha256: str | None = None
    payload: str
    digest: Digest
    created: float

    @property
    def request_bytes(self) -> bytes:
        """The request as journaled: the bytes received; for a reset also the values that the server drew."""
        if self.request_base64 is not None:
            return base64.b64decode(self.request_base64)
        return (self.request or "").encode()

    @property
    def payload_bytes(self) -> bytes:
        """The exact bytes that were sent."""
        return self.payload.encode()


class DeliveryRecord(_Requested):
    """Delivery t: its payload P_t, the request that it answered, and the error kind and hint key as in listings.

    Attributes:
        request_sha256: sha256 of the request as received, in hex.
        id: Request id on a multiplexed socket.
    """

    record: Literal["delivery"] = "delivery"
    t: T
    semantic_digest: Digest | None = None
    reward: float | None = None
    done: bool = False
    error_kind: str | None = None
    hint_template_key: str | None = None

    @property
    def turn(self) -> TurnRecord:
        """The turn as ``GET /episodes/{eid}`` lists it."""
        return TurnRecord(
            t=self.t,
            kind=self.kind,
            reward=self.reward,
            done=self.done,
            error_kind=self.error_kind,
            hint_template_key=self.hint_template_key,
            digest=self.digest,
            semantic_digest=self.semantic_digest,
        )


class FailureRecord(_Requested):
    """A request without a delivery: the environment raised an exception, or the machine failed.

    Attributes:
        after_t: The delivery before it.
        code: A key of `errata_protocol.CODES`; ``payload`` is the error as it was sent.
    """

    record: Literal["error"] = "error"
    after_t: T
    code: str


class BundledReward(_Line):
    """A late reward."""

    record: Literal["reward"] = "reward"
    eid: str
    t: T
    value: float
    source: str
    reward_id: str
    created: float


class BundleEnd(_Line):
    """The last line; a file without it is incomplete.

    Attributes:
        records: Number of lines before this one.
        sha256: sha256 of the bytes before this line, in hex.
    """

    record: Literal["end"] = "end"
    records: Count
    sha256: str


Line = BundleHeader | EpisodeRecord | DeliveryRecord | FailureRecord | BundledReward | BundleEnd

_KINDS: dict[str, type[Line]] = {
    "bundle": BundleHeader,
    "episode": EpisodeRecord,
    "delivery": DeliveryRecord,
    "error": FailureRecord,
    "reward": BundledReward,
    "end": BundleEnd,
}


def request_fields(request: bytes) -> dict[str, str]:
    """Return the fields of a record for a request's bytes: ``request`` if they are UTF-8, else ``request_base64``."""
    try:
        return {"request": request.decode()}
    except UnicodeDecodeError:
        return {"request_base64": base64.b64encode(request).decode()}


class BundleWriter:
    """Encodes records as lines of a bundle, and counts and hashes them for its last line."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._records = 0

    def line(self, record: Line) -> bytes:
        """Return a record as a line of JSON with its newline, and add it to the count and the hash."""
        made = to_json(record.model_dump(exclude_none=True)) + b"\n"
        self._sha.update(made)
        self._records += 1
        return made

    def end(self) -> bytes:
        """Return the last line, a `BundleEnd` for all lines before it."""
        return to_json(BundleEnd(records=self._records, sha256=self._sha.hexdigest()).model_dump()) + b"\n"


def bundle_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file with their newlines, each of a bounded length.

    Args:
        file: A file, or another stream of bytes.

    Raises:
        InvalidRequest: A line is longer than a line of a bundle can be.
    """
    number, most = 1, MAX_HEADER_BYTES
    while line := file.readline(most + 1):
        if len(line) > most:
            raise InvalidRequest(f"line {number} is longer than {most:,} bytes: this is no episode bundle")
        yield line
        number, most = number + 1, MAX_LINE_BYTES


def parse_line(line: bytes) -> Line | None:
    """Return the record in a line; None if this version does not know its kind.

    Raises:
        ValueError: The line is not a valid record.
    """
    held: Any = from_json(line, allow_inf_nan=False)
    if not isinstance(held, dict) or not isinstance(held.get("record"), str):
        raise ValueError("it is no JSON object with a record field")
    kind = _KINDS.get(held["record"])
    if kind is None:
        return None
    try:
        return kind.model_validate(held)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{held['record']}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def check_header(record: Line | None) -> BundleHeader:
    """Return ``record`` if it is the header of a bundle that this version can read.

    Raises:
        InvalidRequest: It is not a header, or of another version.
    """
    if not isinstance(record, BundleHeader) or record.format != FORMAT:
        raise InvalidRequest("this is no episode bundle: its first line is not a bundle header")
    if record.version != VERSION:
        raise InvalidRequest(
            f"the bundle has version {record.version} and this Errata reads {VERSION}: use a newer one"
        )
    return record


def read_bundle(lines: Iterable[bytes]) -> Iterator[tuple[int, int, Line]]:
    """Yield (offset in bytes, length in bytes, record) for the lines of a bundle.

    Digests are not checked; `errata_protocol.bundle_check.verify_bundle` does that.

    Args:
        lines: Lines with their newlines, as from iterating over a binary file.

    Raises:
        InvalidRequest: It is not a bundle, of another version, damaged or incomplete.
    """
    offset = 0
    last: Line | None = None
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_line(line)
        except ValueError as error:
            if number == 1:
                check_header(None)
            raise InvalidRequest(f"line {number} of the bundle cannot be read: {error}") from error
        if number == 1:
            check_header(record)
        if record is not None:
            yield offset, len(line), record
            last = record
        offset += len(line)
    if offset == 0:
        check_header(None)
    if not isinstance(last, BundleEnd):
        raise InvalidRequest("the bundle was cut off: its last line is missing; export it again")


class BundledEpisode:
    """The part of an episode that is kept in memory: everything but its payloads and requests.

    Args:
        record: The episode.

    Attributes:
        places: (offset, length) of the line of each delivery in the bundle, by t.
        turn_at: The turn of each of these deliveries, by t.
        late_rewards: Number of late rewards of each delivery that has any, by t.
        task: Task of the episode; in a bundle of an earlier version, what its first delivery names.
        last: Time of the newest delivery, seconds since the epoch.
        span: Place of all its lines in the bundle, which follow one another: first byte and the byte after the last.
    """

    def __init__(self, record: EpisodeRecord) -> None:
        self.record = record
        self.turns: list[TurnRecord] = []
        self.rewards: list[RewardRecord] = []
        self.places: dict[int, tuple[int, int]] = {}
        self.turn_at: dict[int, TurnRecord] = {}
        self.late_rewards = Counter[int]()
        self.task = record.task
        self.last = record.created
        self.span = (0, 0)

    def extend(self, begin: int, end: int) -> None:
        """Take the place of the next line of the episode."""
        self.span = (self.span[0] or begin, end)

    @functools.cached_property
    def ts(self) -> list[int]:
        """The t of its deliveries in order, once all of them were read."""
        return sorted(self.turn_at)

    @property
    def summary(self) -> EpisodeSummary:
        """The episode as ``GET /episodes`` lists it."""
        return EpisodeSummary(**self._summary())

    @property
    def detail(self) -> EpisodeDetail:
        """The episode as ``GET /episodes/{eid}`` shows it."""
        return EpisodeDetail(**self._summary(), turns=self.turns, agent_text_version=self.record.agent_text_version)

    def _summary(self) -> dict[str, Any]:
        kinds = Counter(turn.error_kind for turn in self.turns if turn.error_kind is not None)
        keys = Counter(turn.hint_template_key for turn in self.turns if turn.hint_template_key is not None)
        return {
            **self.record.model_dump(include=_ALIKE),
            "origin": self.record.origin,
            "done": any(turn.done for turn in self.turns),
            "deliveries": len(self.turns),
            "reward": _finite_sum(turn.reward or 0.0 for turn in self.turns),
            "error_kinds": dict(sorted(kinds.items())),
            "task": self.task,
            "status": "done" if any(turn.done for turn in self.turns) else self.record.status,
            "last": self.last,
            "hint_keys": dict(sorted(keys.items())),
        }


_ALIKE = {"eid", "episode_id", "environment", "session", "created", "group", "step", "run"}
"""Fields of an `EpisodeRecord` that a summary has unchanged."""


def _finite_sum(values: Iterable[float]) -> float:
    """Return a sum; one beyond what a double holds is the largest double, which JSON can carry."""
    total = sum(values)
    return total if math.isfinite(total) else math.copysign(sys.float_info.max, total)


def index_bundle(lines: Iterable[bytes]) -> dict[str, BundledEpisode]:
    """Return the episodes of a bundle by eid, in its order, with the places of their payloads.

    Raises:
        InvalidRequest: As for `read_bundle`; or a record belongs to an episode that the bundle does not have.
    """
    found: dict[str, BundledEpisode] = {}
    for offset, length, record in read_bundle(lines):
        if isinstance(record, DeliveryRecord | FailureRecord | BundledReward) and record.eid in found:
            found[record.eid].extend(offset, offset + length)
        if isinstance(record, EpisodeRecord):
            found[record.eid] = BundledEpisode(record)
        elif isinstance(record, DeliveryRecord | BundledReward):
            if record.eid not in found:
                raise InvalidRequest(f"the bundle has a {record.record} of {record.eid}, and no such episode")
            episode = found[record.eid]
            if isinstance(record, DeliveryRecord):
                episode.turns.append(record.turn)
                episode.places[record.t] = (offset, length)
                episode.turn_at[record.t] = episode.turns[-1]
                episode.last = record.created
                if episode.task is None and len(episode.turns) == 1:
                    episode.task = task_of(record.payload_bytes, record.request_bytes)
            else:
                episode.late_rewards[record.t] += 1
                episode.rewards.append(
                    RewardRecord(t=record.t, value=record.value, source=record.source, reward_id=record.reward_id)
                )
    return found
