"""Every message of the multiplexed socket as a Pydantic model (PROTOCOL D, G), for schemas and for control messages.

The hot path (reset, step and their replies) uses `envelope.Envelope` and none of these models. They decode the ``data``
of control messages (open, resume, fork, ...).

The module is long because there are thirty-one messages, each a few lines.

Decisions that PROTOCOL D states:

- The content of a message is in ``data``; its address, ``sid``, ``id`` and ``q``, is in the envelope. ``resume`` and
  ``close_group`` have no ``sid``, because they address no single session; ``cancel`` has the ``id`` that it cancels.
- open is answered by ``opened``, with the same content as ``resumed``; fork by ``forked``, close by ``closed``;
  close_group, a read that may be repeated, by ``group_closed``; reset and step by ``observation``, as upstream.
- ``fence`` orders the attaches of a session: a client increments it with each open and resume that it sends. An attach
  that a dead socket delivers late is therefore refused (NOT_ATTACHED, with the number to exceed), and does not take the
  session from the socket that has resumed it since. An attach without a fence always succeeds, and increments the
  session's fence, at most to the highest number.
- ``ack`` acknowledges without a resume, so that replies can be forgotten though a client never loses its socket.
- ``part`` has a piece of the *text of the whole envelope*, so that any message can be split.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from ..capabilities import Capabilities
from ..errors import InvalidEnvelope
from ..payload import DIGEST_PREFIX
from ..replay import Kind, LabelsData, Origin
from .envelope import MAX_ID, refuse_duplicate_keys

Sid = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{21,128}$")]
Eid = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.~-]{1,128}$")]
RequestId = Annotated[int, Field(ge=1, le=MAX_ID)]
Count = Annotated[int, Field(ge=0, le=MAX_ID)]
Digest = Annotated[str, Field(pattern=rf"^{DIGEST_PREFIX}[0-9a-f]{{64}}$")]


class ClientModel(BaseModel):
    """Base of what a client sends: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ServerModel(BaseModel):
    """Base of what a server sends: unknown fields are allowed, because a newer server may add some."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


# -- data of client messages ---------------------------------------------------------------------------------


class OpenData(ClientModel):
    """Names a new session, or attaches the one of that sid and key."""

    key: Sid
    group: Sid | None = None
    fence: RequestId | None = None


class ResumeEntry(ClientModel):
    """One session to attach; ``last`` and ``last_seq`` acknowledge everything up to them."""

    sid: Sid
    key: Sid
    last: Count = 0
    last_seq: Count = 0
    fence: RequestId | None = None


class Child(ClientModel):
    """Address and key of a fork, picked by the client."""

    sid: Sid
    key: Sid


class ForkData(ClientModel):
    """Which state to continue from; ``eid`` is the current episode where it is left out."""

    t: Count
    child: Child
    eid: Eid | None = None


class StateData(ClientModel):
    """Empty for the environment's own state; with ``t`` for state(t)."""

    model_config = ConfigDict(json_schema_extra={"dependentRequired": {"eid": ["t"]}})

    t: Count | None = None
    eid: Eid | None = None

    @model_validator(mode="after")
    def _names_a_delivery(self) -> Self:
        if self.eid is not None and self.t is None:
            raise ValueError("state with `eid` needs `t`")
        return self


class RewardsData(ClientModel):
    """Whose rewards to list; the current episode's where ``eid`` is left out."""

    eid: Eid | None = None


class GroupData(ClientModel):
    """Sessions that were opened with this group."""

    group: Sid


class AckData(ClientModel):
    """Everything up to these was received."""

    last: Count = 0
    last_seq: Count = 0


class PartData(ClientModel):
    """Piece ``n`` (from 1) of ``of``; the pieces' texts together are one envelope."""

    n: RequestId
    of: RequestId
    text: str


class If(ClientModel):
    """Where the session has to stand when the request's turn comes."""

    t: Count
    eid: Eid | None = None


class Nothing(ClientModel):
    """No fields."""


# -- client messages -----------------------------------------------------------------------------------------


class MutatingRequest(ClientModel):
    """A request that is recorded under its id."""

    sid: Sid
    id: RequestId
    condition: If | None = Field(default=None, alias="if")
    deadline_ms: Count | None = None


class Open(ClientModel):
    """Make a session, or attach to it: ``opened``, or an error."""

    sid: Sid
    type: Literal["open"]
    labels: LabelsData | None = None
    data: OpenData


class Resume(ClientModel):
    """Attach many sessions: for each ``resumed`` or an error, then missed replies and pushes."""

    sid: None = None
    type: Literal["resume"]
    data: list[ResumeEntry]


class Reset(MutatingRequest):
    """Begin an episode; ``data`` holds the environment's arguments."""

    type: Literal["reset"]
    labels: LabelsData | None = None
    data: dict[str, Any] = Field(default_factory=dict)


class Step(MutatingRequest):
    """Act; ``data`` is the action."""

    type: Literal["step"]
    data: dict[str, Any]


class McpCall(MutatingRequest):
    """An MCP tools/call; ``data`` is the JSON-RPC request."""

    type: Literal["mcp"]
    data: dict[str, Any]


class McpRead(ClientModel):
    """Any other MCP request."""

    sid: Sid
    q: RequestId
    type: Literal["mcp"]
    data: dict[str, Any]


class Fork(MutatingRequest):
    """Make a session that stands at one of this session's states."""

    type: Literal["fork"]
    labels: LabelsData | None = None
    data: ForkData


class Close(MutatingRequest):
    """End the session; its episodes stay readable."""

    type: Literal["close"]
    data: Nothing = Nothing()


class State(ClientModel):
    """Read the environment's state, or the payload of one delivery."""

    sid: Sid
    q: RequestId
    type: Literal["state"]
    data: StateData = StateData()


class CapabilitiesRequest(ClientModel):
    """Ask what the server can do."""

    sid: Sid | None = None
    q: RequestId
    type: Literal["capabilities"]
    data: Nothing = Nothing()


class Rewards(ClientModel):
    """Read an episode's late rewards."""

    sid: Sid
    q: RequestId
    type: Literal["rewards"]
    data: RewardsData = RewardsData()


class CloseGroup(ClientModel):
    """End all sessions of a group, attached anywhere or nowhere."""

    sid: None = None
    q: RequestId
    type: Literal["close_group"]
    data: GroupData


class Cancel(ClientModel):
    """Take back a request that has not started; never answered itself."""

    sid: Sid
    id: RequestId
    type: Literal["cancel"]


class Ack(ClientModel):
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


# -- server messages -----------------------------------------------------------------------------------------


class PositionData(ServerModel):
    """Where a session stands: the id it takes next, its last committed delivery and push, its recovery class."""

    next_id: RequestId
    eid: Eid | None
    t: Count | None
    seq: Count
    recovery: Literal["snapshot", "reexecute", "none"]
    fence: RequestId


class ForkedData(ServerModel):
    """The child stands at its own t=0; resume it to attach it."""

    sid: Sid
    eid: Eid
    t: Literal[0]
    origin: Origin


class RewardData(ServerModel):
    """A reward that came after its step (PROTOCOL F4)."""

    eid: Eid
    t: Count
    value: float
    source: str
    reward_id: str


class ClosedCount(ServerModel):
    """How many sessions of the group were ended."""

    closed: Count


class DetachedData(ServerModel):
    """Why this socket no longer speaks for the session."""

    reason: Literal["taken_over", "closed", "expired", "lost"]


class GoAwayData(ServerModel):
    """Seconds after which to connect again."""

    retry_after: float


class ErrorData(ServerModel):
    """``code`` is a row of `errata_protocol.errors.CODES`; further fields belong to the code."""

    message: str
    code: str


class Opened(ServerModel):
    """Answer to open."""

    sid: Sid
    type: Literal["opened"]
    data: PositionData


class Resumed(ServerModel):
    """Answer to one entry of resume; what was missed follows."""

    sid: Sid
    type: Literal["resumed"]
    data: PositionData


class RecordedReply(ServerModel):
    """A reply that the journal has; of what was asked before this attach, ``request`` says the digest."""

    sid: Sid
    id: RequestId
    request: Digest | None = None


class DeliveryReply(RecordedReply):
    """A recorded reply with its payload and place."""

    eid: Eid
    t: Count
    digest: Digest
    data: dict[str, Any]


class Observation(DeliveryReply):
    """Reply to reset and step."""

    type: Literal["observation"]


class McpReply(RecordedReply):
    """Reply to an MCP tools/call; one that reached no tool is no delivery, and has neither place nor digest."""

    type: Literal["mcp"]
    eid: Eid | None = None
    t: Count | None = None
    digest: Digest | None = None
    data: dict[str, Any]


class McpReadReply(ServerModel):
    """Reply to any other MCP request."""

    sid: Sid
    q: RequestId
    type: Literal["mcp"]
    data: dict[str, Any]


class Forked(RecordedReply):
    """Reply to fork."""

    type: Literal["forked"]
    data: ForkedData


class Closed(RecordedReply):
    """Reply to close."""

    type: Literal["closed"]
    data: dict[str, Any]


class StateReply(ServerModel):
    """The environment's own state."""

    sid: Sid
    q: RequestId
    type: Literal["state"]
    data: dict[str, Any]


class StateAtReply(ServerModel):
    """The payload of one delivery, unchanged."""

    sid: Sid
    q: RequestId
    type: Literal["state_at"]
    eid: Eid
    t: Count
    kind: Kind
    digest: Digest
    data: dict[str, Any]


class CapabilitiesReply(ServerModel):
    """What the server can do."""

    q: RequestId
    type: Literal["capabilities"]
    data: Capabilities


class RewardsReply(ServerModel):
    """An episode's late rewards in order of ``seq``."""

    sid: Sid
    q: RequestId
    type: Literal["rewards"]
    data: list[RewardData]


class GroupClosed(ServerModel):
    """Reply to close_group."""

    q: RequestId
    type: Literal["group_closed"]
    data: ClosedCount


class Reward(ServerModel):
    """Push: a late reward."""

    sid: Sid
    seq: RequestId
    type: Literal["reward"]
    data: RewardData


class Detached(ServerModel):
    """Push: this socket no longer speaks for the session."""

    sid: Sid
    type: Literal["detached"]
    data: DetachedData


class GoAway(ServerModel):
    """Push: finish what is in flight and connect again."""

    type: Literal["goaway"]
    data: GoAwayData


class Error(ServerModel):
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
"""All messages by direction, for `schemas` and the golden files."""

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
    """Decode the ``data`` of a control message, refusing wrong types, unknown fields and duplicate keys.

    Raises:
        InvalidEnvelope: It is not valid; the message names the first field at fault.
    """
    try:
        found = adapter.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(["data", *map(str, first["loc"])])
        # Not chained, because the validation error may contain a session's key.
        raise InvalidEnvelope(f"{place}: {first['msg']}") from None
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
    """Return (eid, t) if a reset's arguments ask for a fork in place, None otherwise (PROTOCOL D11).

    They do if their ``injected_state`` has exactly the keys ``episode_id`` and ``t``, with valid values.
    """
    injected = data.get("injected_state")
    if not isinstance(injected, dict) or injected.keys() != {"episode_id", "t"}:
        return None
    eid, t = injected["episode_id"], injected["t"]
    return (eid, t) if isinstance(eid, str) and type(t) is int and 0 <= t <= MAX_ID else None


def schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file name without suffix, JSON Schema 2020-12) for each message."""
    for side, messages in (("client", CLIENT_MESSAGES), ("server", SERVER_MESSAGES)):
        for model in messages:
            schema = model.model_json_schema(by_alias=True, mode="validation")
            yield f"{side}.{model.__name__}", {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
