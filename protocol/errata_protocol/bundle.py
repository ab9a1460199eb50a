"""The episode bundle: whole episodes with their exact payloads in one file that reads without a server.

A bundle is UTF-8 text, one JSON object a line: a `BundleHeader`, an `EpisodeRecord` for each episode (parents before
their forks), then for each episode its `DeliveryRecord`s in order of t with the `FailureRecord`s between them and its
`RewardRecord`s, then a `BundleEnd`. docs/export.md says what each field means.

Payloads and requests stand as JSON strings: the UTF-8 form of the string's value is the exact bytes, whatever tool
copied the line. A request that is no UTF-8 stands in ``request_base64`` instead.

Reading rules: a line whose ``record`` is unknown is skipped, and so is an unknown field; both may be added without a
new version. Another ``version`` is refused.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from .errors import InvalidRequest
from .payload import DIGEST_PREFIX
from .replay import EpisodeDetail, EpisodeSummary, Kind, Origin, RewardRecord, TurnRecord

FORMAT = "errata-bundle"
VERSION = 1

Digest = Annotated[str, Field(pattern=rf"^{DIGEST_PREFIX}[0-9a-f]{{64}}$")]
T = Annotated[int, Field(ge=0)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class BundleHeader(_Line):
    """First line.

    Attributes:
        format: Always ``errata-bundle``.
        version: Of this format; raised when an older reader would misread it.
        created: When it was written, seconds since the epoch.
        server: Version of the Errata that wrote it.
        episodes: What was asked for; others in the file are their ancestors.
    """

    record: Literal["bundle"] = "bundle"
    format: str = FORMAT
    version: int = VERSION
    created: float
    server: str
    episodes: tuple[str, ...]


class EpisodeRecord(_Line):
    """One episode; the fields are those of `errata_protocol.EpisodeSummary`.

    Attributes:
        deliveries: How many `DeliveryRecord`s follow.
        rewards: How many `BundledReward`s follow.
        recovery: Recovery class of its session.
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
    deliveries: int
    rewards: int = 0


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
        """The request as journaled: as received, and for a reset with what the server drew."""
        if self.request_base64 is not None:
            return base64.b64decode(self.request_base64)
        return (self.request or "").encode()

    @property
    def payload_bytes(self) -> bytes:
        """The exact bytes that were sent."""
        return self.payload.encode()


class DeliveryRecord(_Requested):
    """Delivery t: P_t, and the request that it answered; the markers' short form stands beside, as in listings.

    Attributes:
        request_sha256: Of the request as received, in hex.
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
    """A request that delivered nothing: the environment raised, or the machine failed.

    Attributes:
        after_t: The delivery before it.
        code: Row of `errata_protocol.CODES`; ``payload`` is the error as it was sent.
    """

    record: Literal["error"] = "error"
    after_t: T
    code: str


class BundledReward(_Line):
    """A late reward."""

    record: Literal["reward"] = "reward"
    eid: str
    t: T
    value: Annotated[float, Field(allow_inf_nan=False)]
    source: str
    reward_id: str
    created: float


class BundleEnd(_Line):
    """Last line: a file without it was cut off.

    Attributes:
        records: Lines before this one.
        sha256: Of the bytes before this line, in hex.
    """

    record: Literal["end"] = "end"
    records: int
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
    """Return the fields that hold a request's bytes."""
    try:
        return {"request": request.decode()}
    except UnicodeDecodeError:
        return {"request_base64": base64.b64encode(request).decode()}


class BundleWriter:
    """Turns records into the lines of a bundle, and counts them for its end."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._records = 0

    def line(self, record: Line) -> bytes:
        """Return the bytes of a record, its newline included."""
        made = to_json(record.model_dump(exclude_none=True)) + b"\n"
        self._sha.update(made)
        self._records += 1
        return made

    def end(self) -> bytes:
        """Return the last line."""
        return to_json(BundleEnd(records=self._records, sha256=self._sha.hexdigest()).model_dump()) + b"\n"


def parse_line(line: bytes) -> Line | None:
    """Return the record of a line; None for one of a kind that this version does not know.

    Raises:
        ValueError: It is no record.
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
    """Return the header that a file begins with.

    Raises:
        InvalidRequest: It is no bundle, or of a version that this reader would misread.
    """
    if not isinstance(record, BundleHeader) or record.format != FORMAT:
        raise InvalidRequest("this is no episode bundle: its first line is not a bundle header")
    if record.version != VERSION:
        raise InvalidRequest(
            f"the bundle has version {record.version} and this Errata reads {VERSION}: use a newer one"
        )
    return record


def read_bundle(lines: Iterable[bytes]) -> Iterator[tuple[int, int, Line]]:
    """Yield (offset in bytes, length in bytes, record) of a bundle's lines.

    It checks no digest: `errata_protocol.bundle_check.verify_bundle` does.

    Args:
        lines: With their newlines, as iterating over a binary file gives them.

    Raises:
        InvalidRequest: It is no bundle, of another version, damaged, or cut off.
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
    """What of an episode fits into memory: all but its payloads and requests.

    Args:
        record: The episode.

    Attributes:
        places: Of its deliveries by t: (offset, length) of the line in the bundle.
    """

    def __init__(self, record: EpisodeRecord) -> None:
        self.record = record
        self.turns: list[TurnRecord] = []
        self.rewards: list[RewardRecord] = []
        self.places: dict[int, tuple[int, int]] = {}

    @property
    def summary(self) -> EpisodeSummary:
        """The episode as ``GET /episodes`` lists it."""
        return EpisodeSummary(**self._summary())

    @property
    def detail(self) -> EpisodeDetail:
        """The episode as ``GET /episodes/{eid}`` shows it."""
        return EpisodeDetail(**self._summary(), turns=self.turns, agent_text_version=self.record.agent_text_version)

    def _summary(self) -> dict[str, Any]:
        kinds: dict[str, int] = {}
        for turn in self.turns:
            if turn.error_kind is not None:
                kinds[turn.error_kind] = kinds.get(turn.error_kind, 0) + 1
        return {
            **self.record.model_dump(include={"eid", "episode_id", "environment", "session", "created"}),
            "origin": self.record.origin,
            "done": any(turn.done for turn in self.turns),
            "deliveries": len(self.turns),
            "reward": sum(turn.reward or 0.0 for turn in self.turns),
            "error_kinds": dict(sorted(kinds.items())),
        }


def index_bundle(lines: Iterable[bytes]) -> dict[str, BundledEpisode]:
    """Return the episodes of a bundle by eid, in its order, with the places of their payloads.

    Raises:
        InvalidRequest: As `read_bundle`; or a record is of an episode that the bundle does not have.
    """
    found: dict[str, BundledEpisode] = {}
    for offset, length, record in read_bundle(lines):
        if isinstance(record, EpisodeRecord):
            found[record.eid] = BundledEpisode(record)
        elif isinstance(record, DeliveryRecord | BundledReward):
            if record.eid not in found:
                raise InvalidRequest(f"the bundle has a {record.record} of {record.eid}, and no such episode")
            episode = found[record.eid]
            if isinstance(record, DeliveryRecord):
                episode.turns.append(record.turn)
                episode.places[record.t] = (offset, length)
            else:
                episode.rewards.append(
                    RewardRecord(t=record.t, value=record.value, source=record.source, reward_id=record.reward_id)
                )
    return found
