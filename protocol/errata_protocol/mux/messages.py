"""Every message of the multiplexed socket as a Pydantic model (PROTOCOL D, G): for schemas and for control messages.

The hot path (reset, step, and their replies) goes by `envelope.Envelope` and never makes one of these; the ``data`` of
what a client says to the protocol itself (open, resume, fork, ...) is read with the models here.

It is longer than other modules because a message is a few lines and there are thirty-one of them.

Decisions that PROTOCOL D states:

- What a message says stands in ``data``; ``sid``, ``id`` and ``q`` address it and stand in the envelope. ``resume`` and
  ``close_group`` address no session and have no ``sid``; ``cancel`` has the ``id`` that it cancels.
- open is answered by ``opened``, which says what ``resumed`` says; fork by ``forked``, close by ``closed``, close_group
  (a read: it can be repeated) by ``group_closed``, reset and step by ``observation`` as upstream.
- ``fence`` orders the attaches of one session: a client counts it up with each open and resume that it sends. One that
  a dead socket still held, and that comes late, is thereby refused (NOT_ATTACHED, with the number to exceed) instead of
  taking the session away from the socket that resumed it since. Left out, it always wins, and counts one further, at
  most to the highest number.
- ``ack`` acknowledges without a resume, so that a client that never loses its socket lets replies be forgotten.
- ``part`` carries a piece of the *text of the whole envelope*, so that any message can be split.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ..capabilities import Capabilities
from ..errors import InvalidEnvelope
from ..payload import DIGEST_PREFIX
from ..replay import Kind, Origin
from .envelope import MAX_ID, refuse_duplicate_keys

Sid = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{21,128}$")]
Eid = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.~-]{1,128}$")]
RequestId = Annotated[int, Field(ge=1, le=MAX_ID)]
Count = Annotated[int, Field(ge=0, le=MAX_ID)]
Digest = Annotated[str, Field(pattern=rf"^{DIGEST_PREFIX}[0-9a-f]{{64}}$")]


class Said(BaseModel):
    """What a client says: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Told(BaseModel):
    """What a server says: a newer one may say more."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


# -- data of what a client says ------------------------------------------------------------------------------


class OpenData(Said):
    """Names a new session, or attaches the one of that sid and key."""

    key: Sid
    group: Sid | None = None
    fence: RequestId | None = None


class ResumeEntry(Said):
    """One session to attach; ``last`` and ``last_seq`` acknowledge everything up to them."""

    sid: Sid
    key: Sid
    last: Count = 0
    last_seq: Count = 0
    fence: RequestId | None = None


class Child(Said):
    """Address and key of a fork, picked by the client."""

    sid: Sid
    key: Sid


class ForkData(Said):
    """Which state to continue from; ``eid`` is the current episode where it is left out."""

    t: Count
    child: Child
    eid: Eid | None = None


class StateData(Said):
    """Empty for the environment's own state; with ``t`` for state(t)."""

    t: Count | None = None
    eid: Eid | None = None


class RewardsData(Said):
    """Whose rewards to list; the current episode's where ``eid`` is left out."""

    eid: Eid | None = None


class GroupData(Said):
    """Sessions that were opened with this group."""

    group: Sid


class AckData(Said):
    """Everything up to these was received."""

    last: Count = 0
    last_seq: Count = 0


class PartData(Said):
    """Piece ``n`` (from 1) of ``of``; the pieces' texts together are one envelope."""

    n: RequestId
    of: RequestId
    text: str


class If(Said):
    """Where the session has to stand when the request's turn comes."""

    t: Count
    eid: Eid | None = None


class Nothing(Said):
    """No fields."""


# -- what a client says --------------------------------------------------------------------------------------


class Mutating(Said):
    """A request that is recorded under its id."""

    sid: Sid
    id: RequestId
    condition: If | None = Field(default=None, alias="if")
    deadline_ms: Count | None = None


class Open(Said):
    """Make a session, or attach to it: ``opened``, or an error."""

    sid: Sid
    type: Literal["open"]
    data: OpenData


class Resume(Said):
    """Attach many sessions: for each ``resumed`` or an error, then missed replies and pushes."""

    sid: None = None
    type: Literal["resume"]
    data: list[ResumeEntry]


class Reset(Mutating):
    """Begin an episode; ``data`` holds the environment's arguments."""

    type: Literal["reset"]
    data: dict[str, Any] = Field(default_factory=dict)


class Step(Mutating):
    """Act; ``data`` is the action."""

    type: Literal["step"]
    data: dict[str, Any]


class McpCall(Mutating):
    """An MCP tools/call; ``data`` is the JSON-RPC request."""

    type: Literal["mcp"]
    data: dict[str, Any]


class McpRead(Said):
    """Any other MCP request."""

    sid: Sid
    q: RequestId
    type: Literal["mcp"]
    data: dict[str, Any]


class Fork(Mutating):
    """Make a session that stands at one of this session's states."""

    type: Literal["fork"]
    data: ForkData


class Close(Mutating):
    """End the session; its episodes stay readable."""

    type: Literal["close"]
    data: Nothing = Nothing()


class State(Said):
    """Read the environment's state, or the payload of one delivery."""

    sid: Sid
    q: RequestId
    type: Literal["state"]
    data: StateData = StateData()


class CapabilitiesRequest(Said):
    """Ask what the server can do."""

    sid: Sid | None = None
    q: RequestId
    type: Literal["capabilities"]
    data: Nothing = Nothing()


class Rewards(Said):
    """Read an episode's late rewards."""

    sid: Sid
    q: RequestId
    type: Literal["rewards"]
    data: RewardsData = RewardsData()


class CloseGroup(Said):
    """End all sessions of a group, attached anywhere or nowhere."""

    sid: None = None
    q: RequestId
    type: Literal["close_group"]
    data: GroupData


class Cancel(Said):
    """Take back a request that has not started; never answered itself."""

    sid: Sid
    id: RequestId
    type: Literal["cancel"]


class Ack(Said):
    """Let the server forget what was received; never answered."""

    sid: Sid
    type: Literal["ack"]
    data: AckData


class Part(BaseModel):
    """A piece of an envelope over 256 KiB, of either side; addressed like the whole."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    sid: Sid | None = None
    id: RequestId | None = None
    q: RequestId | None = None
    seq: RequestId | None = None
    type: Literal["part"]
    data: PartData


# -- what a server says --------------------------------------------------------------------------------------


class PositionData(Told):
    """Where a session stands: the id it takes next, its last committed delivery and push, its recovery class."""

    next_id: RequestId
    eid: Eid | None
    t: Count | None
    seq: Count
    recovery: Literal["snapshot", "reexecute", "none"]
    fence: RequestId


class ForkedData(Told):
    """The child stands at its own t=0; resume it to attach it."""

    sid: Sid
    eid: Eid
    t: Literal[0]
    origin: Origin


class RewardData(Told):
    """A reward that came after its step (PROTOCOL F4)."""

    eid: Eid
    t: Count
    value: float
    source: str
    reward_id: str


class ClosedCount(Told):
    """How many sessions of the group were ended."""

    closed: Count


class DetachedData(Told):
    """Why this socket no longer speaks for the session."""

    reason: Literal["taken_over", "closed", "expired", "lost"]


class GoAwayData(Told):
    """Seconds after which to connect again."""

    retry_after: float


class ErrorData(Told):
    """``code`` is a row of `errata_protocol.errors.CODES`; further fields belong to the code."""

    message: str
    code: str


class Opened(Told):
    """Answer to open."""

    sid: Sid
    type: Literal["opened"]
    data: PositionData


class Resumed(Told):
    """Answer to one entry of resume; what was missed follows."""

    sid: Sid
    type: Literal["resumed"]
    data: PositionData


class Recorded(Told):
    """A reply that the journal has; of what was asked before this attach, ``request`` says the digest."""

    sid: Sid
    id: RequestId
    request: Digest | None = None


class Delivered(Recorded):
    """A recorded reply with its payload and place."""

    eid: Eid
    t: Count
    digest: Digest
    data: dict[str, Any]


class Observation(Delivered):
    """Reply to reset and step."""

    type: Literal["observation"]


class McpReply(Recorded):
    """Reply to an MCP tools/call; one that reached no tool is no delivery, and has neither place nor digest."""

    type: Literal["mcp"]
    eid: Eid | None = None
    t: Count | None = None
    digest: Digest | None = None
    data: dict[str, Any]


class McpReadReply(Told):
    """Reply to any other MCP request."""

    sid: Sid
    q: RequestId
    type: Literal["mcp"]
    data: dict[str, Any]


class Forked(Recorded):
    """Reply to fork."""

    type: Literal["forked"]
    data: ForkedData


class Closed(Recorded):
    """Reply to close."""

    type: Literal["closed"]
    data: dict[str, Any]


class StateReply(Told):
    """The environment's own state."""

    sid: Sid
    q: RequestId
    type: Literal["state"]
    data: dict[str, Any]


class StateAtReply(Told):
    """The payload of one delivery, unchanged."""

    sid: Sid
    q: RequestId
    type: Literal["state_at"]
    eid: Eid
    t: Count
    kind: Kind
    digest: Digest
    data: dict[str, Any]


class CapabilitiesReply(Told):
    """What the server can do."""

    q: RequestId
    type: Literal["capabilities"]
    data: Capabilities


class RewardsReply(Told):
    """An episode's late rewards in order of ``seq``."""

    sid: Sid
    q: RequestId
    type: Literal["rewards"]
    data: list[RewardData]


class GroupClosed(Told):
    """Reply to close_group."""

    q: RequestId
    type: Literal["group_closed"]
    data: ClosedCount


class Reward(Told):
    """Push: a late reward."""

    sid: Sid
    seq: RequestId
    type: Literal["reward"]
    data: RewardData


class Detached(Told):
    """Push: this socket no longer speaks for the session."""

    sid: Sid
    type: Literal["detached"]
    data: DetachedData


class GoAway(Told):
    """Push: finish what is in flight and connect again."""

    type: Literal["goaway"]
    data: GoAwayData


class Error(Told):
    """Answer to a request, or to what could not be read (``sid`` null)."""

    sid: Sid | None
    id: RequestId | None = None
    q: RequestId | None = None
    index: Count | None = None
    request: Digest | None = None
    type: Literal["error"]
    data: ErrorData


CLIENT_MESSAGES: tuple[type[BaseModel], ...] = (
    *(Open, Resume, Reset, Step, McpCall, McpRead, Fork, Close, State, CapabilitiesRequest, Rewards),
    *(CloseGroup, Cancel, Ack, Part),
)
SERVER_MESSAGES: tuple[type[BaseModel], ...] = (
    *(Opened, Resumed, Observation, McpReply, McpReadReply, Forked, Closed, StateReply, StateAtReply),
    *(CapabilitiesReply, RewardsReply, GroupClosed, Reward, Detached, GoAway, Error, Part),
)
"""Every message by direction; `schemas` and the golden files go through these."""

MUTATING = frozenset({"reset", "step", "mcp", "fork", "close"})
READS = frozenset({"state", "capabilities", "rewards", "mcp", "close_group"})

OPEN_DATA = TypeAdapter(OpenData)
RESUME_DATA = TypeAdapter(list[ResumeEntry])
FORK_DATA = TypeAdapter(ForkData)
GROUP_DATA = TypeAdapter(GroupData)
STATE_DATA = TypeAdapter(StateData)
REWARDS_DATA = TypeAdapter(RewardsData)
ACK_DATA = TypeAdapter(AckData)
PART_DATA = TypeAdapter(PartData)
POSITION_DATA = TypeAdapter(PositionData)

T = TypeVar("T")


def read_data(adapter: TypeAdapter[T], data: bytes) -> T:
    """Read the ``data`` of a control message strictly: typed, no unknown field, no key twice.

    Raises:
        InvalidEnvelope: It is not of that type; the message names the first field at fault.
    """
    try:
        found = adapter.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(["data", *map(str, first["loc"])])
        raise InvalidEnvelope(f"{place}: {first['msg']}") from None  # the input may hold a key
    if data.count(b":") != _fields_set(found):
        refuse_duplicate_keys(data)
    return found


def _fields_set(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_fields_set, value))
    if not isinstance(value, BaseModel):
        return 0
    return sum(1 + _fields_set(getattr(value, name)) for name in value.model_fields_set)


def injected_fork(data: dict[str, Any]) -> tuple[str, int] | None:
    """Return (eid, t) where a reset's arguments ask for a fork: exactly ``{episode_id, t}`` (PROTOCOL D11)."""
    injected = data.get("injected_state")
    if not isinstance(injected, dict) or injected.keys() != {"episode_id", "t"}:
        return None
    eid, t = injected["episode_id"], injected["t"]
    return (eid, t) if isinstance(eid, str) and type(t) is int and 0 <= t <= MAX_ID else None


def schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file name without suffix, JSON Schema 2020-12) of every message."""
    for side, messages in (("client", CLIENT_MESSAGES), ("server", SERVER_MESSAGES)):
        for model in messages:
            schema = model.model_json_schema(by_alias=True, mode="validation")
            yield f"{side}.{model.__name__}", {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
