"""Messages of the ``/episodes`` routes: episodes, turns, state(t), forks, late rewards (PROTOCOL A2, A5, G)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from .errors import UnknownEpisode
from .labels import MAX_LABEL, MAX_STEP, Labels
from .markers import ErrorSite
from .names import EPISODE

Kind = Literal["reset", "step", "mcp"]
Label = Annotated[str, Field(min_length=1, max_length=MAX_LABEL, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]


@dataclass(frozen=True, slots=True)
class StateAt:
    """The exact bytes that the agent got in one delivery.

    Args:
        eid: Episode key made by the server; the client's own key if the server has none.
        t: Delivery index: 0 is reset's, k the k-th after it.
        kind: Kind of the request: reset, step or mcp.
        payload: P_t, the UTF-8 bytes of the ``data`` value as first sent.
        digest: ``sha256:<hex>`` of ``payload``.
        source: ``"server"`` if read from its journal, ``"history"`` if this client recorded it itself.
    """

    eid: str
    t: int
    kind: Kind
    payload: bytes = field(repr=False)
    digest: str
    source: Literal["server", "history"] = "server"


class StateAtRequest(BaseModel):
    """``data`` of a state(t) request on ``/ws``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    t: int = Field(ge=0, lt=2**53)
    eid: str | None = Field(default=None, min_length=1, max_length=128)


class DeliveryRequest(BaseModel):
    """``data`` of a ``delivery`` request on ``/ws``: a reply of the session's current episode."""

    model_config = ConfigDict(extra="forbid", strict=True)

    t: int = Field(ge=0, lt=2**53)


class LabelsData(BaseModel):
    """Labels of episodes (`errata_protocol.labels.Labels`)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    group: Label | None = None
    step: Annotated[int, Field(ge=0, le=MAX_STEP)] | None = None
    run: Label | None = None

    def labels(self) -> Labels:
        """Return them as `Labels`."""
        return Labels(group=self.group, step=self.step, run=self.run)


class ForkRequest(BaseModel):
    """Body of ``POST /episodes/{eid}/fork``. The same ``request_id`` always names the same child.

    Attributes:
        t: Delivery to continue from.
        request_id: Name of the request, chosen by the client.
        labels: All labels of the child, so none where it is empty; None gives it the parent's.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    t: int = Field(ge=0, lt=2**53)
    request_id: str = Field(min_length=1, max_length=255)
    labels: LabelsData | None = None


class Origin(BaseModel):
    """Where a forked episode comes from."""

    eid: str
    t: int


class ForkReply(BaseModel):
    """Answer to a fork: a given-out session that stands at the parent's t as its own t=0.

    Attributes:
        session_id: Session of the child.
        eid: Episode of the child session.
        t: Where it stands.
        origin: Episode and t that were forked.
        read_key: Opens the child's episodes outside of its session, as a bearer token; left out where the server has
            tokens.
    """

    session_id: str
    eid: str
    t: int = 0
    origin: Origin
    read_key: str | None = None

    @model_serializer(mode="wrap")
    def _without_key(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        if values.get("read_key") is None:
            values.pop("read_key", None)
        return values


class TurnRecord(BaseModel):
    """One delivery in an episode's listing; its payload is fetched by state(t)."""

    t: int
    kind: Kind
    reward: float | None = None
    done: bool = False
    error_kind: str | None = None
    hint_template_key: str | None = None
    digest: str
    semantic_digest: str | None = None


class PlayedTurn(TurnRecord):
    """One delivery in ``GET /episodes/{eid}/turns``: its record, and what its request and payload say of it.

    Attributes:
        created: When its request began to run, seconds since the epoch.
        since_s: Time from the beginning of the delivery before to that of this one, in seconds: that call and the
            agent's own time. None of the first delivery of an episode.
        duration_s: Time that the call took, in seconds, if the observation has it under this name.
        action: The request: decoded JSON, in which long texts are cut; a text of its beginning where it is longer than
            that, or no JSON.
        action_cut: Whether ``action`` is less than the whole request.
        action_bytes: Size of the whole request, in bytes.
        tool: Name of the tool that the action calls, if it names one.
        exit_code: Exit code of the command that ran, if the observation has one.
        error: Why the request failed apart from an exit code, at most 300 characters.
        severity: ``error`` or ``warning`` of a marked turn.
        error_site: Where a marked turn failed. Its span counts code points in a field of the whole action.
        late_rewards: Number of rewards that came after the delivery.
    """

    created: float
    since_s: float | None = None
    duration_s: float | None = None
    action: Any = None
    action_cut: bool = False
    action_bytes: int = 0
    tool: str | None = None
    exit_code: int | None = None
    error: str | None = None
    severity: str | None = None
    error_site: ErrorSite | None = None
    late_rewards: int = 0


class TurnPage(BaseModel):
    """``GET /episodes/{eid}/turns``.

    Attributes:
        turns: Turns in order of t.
        next: Cursor of the following page, None on the last: t of the last turn, as text.
        deliveries: Number of all deliveries of the episode.
    """

    turns: list[PlayedTurn]
    next: str | None = None
    deliveries: int = 0


class AgentText(BaseModel):
    """What an agent read of a delivery, in ``GET /episodes/{eid}/states/{t}/agent_text`` (PROTOCOL B4).

    Attributes:
        t: Delivery that the agent read.
        kind: Kind of the request.
        agent_text: The text.
        agent_text_version: Version of the environment's function that made it; None for JSON of the observation.
        as_read: Whether the agent read this text. False where the environment is not installed in the version that
            was played, or cannot read the payload: the text is then JSON of the observation.
    """

    t: int
    kind: Kind
    agent_text: str
    agent_text_version: str | None = None
    as_read: bool = True


class RewardRecord(BaseModel):
    """One reward that came after its delivery, in ``GET /episodes/{eid}/rewards`` (PROTOCOL F4, G).

    Attributes:
        t: Delivery that the reward is for.
        value: Finite.
        source: Who says so; ``environment`` is the environment itself.
        reward_id: Unique in its episode: posting it again changes nothing.
    """

    t: int
    value: float
    source: str
    reward_id: str


class RewardPost(RewardRecord):
    """Body of ``POST /episodes/{eid}/rewards``, or one element of it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    t: int = Field(ge=0, lt=2**53)
    value: float = Field(allow_inf_nan=False)
    source: str = Field(min_length=1, max_length=255)
    reward_id: str = Field(min_length=1, max_length=255)


class EpisodeSummary(BaseModel):
    """One episode in ``GET /episodes``.

    Attributes:
        eid: Key minted by the server.
        episode_id: The client's own alias, may repeat or be None.
        environment: Name of the environment.
        session: sha256 of the session id, first 12 hex digits: ids themselves are capabilities.
        created: Seconds since the epoch.
        done: The last delivery ended the episode.
        deliveries: Number of deliveries; t runs from 0 to deliveries - 1.
        reward: Sum of the finite rewards.
        error_kinds: Marked turns by kind.
        origin: Parent and t of a fork.
        task: Task that its first observation names, or the arguments of its reset; None if neither does.
        status: ``done``, or the status of its session: ``open`` with a connection, ``detached`` without one,
            ``closed``, ``lost`` or ``expired``. Where nobody serves the session, ``open`` stands for both.
        last: Time of its newest delivery, seconds since the epoch.
        hint_keys: Turns by the key of their hint's template.
        group: Label of the rollouts that it is compared with, such as those of one prompt in one training step.
        step: Label of the training step.
        run: Label of the training run.
    """

    eid: str
    episode_id: str | None = None
    environment: str
    session: str
    created: float
    done: bool = False
    deliveries: int = 0
    reward: float = 0.0
    error_kinds: dict[str, int] = Field(default_factory=dict)
    origin: Origin | None = None
    task: str | None = None
    status: str | None = None
    last: float | None = None
    hint_keys: dict[str, int] = Field(default_factory=dict)
    group: str | None = None
    step: int | None = None
    run: str | None = None


class EpisodeDetail(EpisodeSummary):
    """``GET /episodes/{eid}``: the summary and its turns."""

    turns: list[TurnRecord] = Field(default_factory=list)
    agent_text_version: str | None = None


Happened = Literal["created", "delivered", "marked", "ended", "rewarded", "session", "deleted"]


class LateValue(BaseModel):
    """A late reward in an event: the t that it is for, and its value."""

    t: int
    value: float


class EpisodeEvent(BaseModel):
    """What happened to an episode, in ``GET /episodes/events`` (PROTOCOL G): all since the event before it.

    Attributes:
        eid: The episode; None for a session without one.
        session: sha256 of its session's id, first 12 hex digits, as in `EpisodeSummary`.
        environment: Name of the environment.
        what: What happened: it was ``created``, something was ``delivered``, a turn of it was ``marked`` with an error,
            it ``ended``, late rewards came (``rewarded``), the status of its ``session`` changed, it was ``deleted``.
        t: Its newest delivery, None where none was made since the server began to look.
        reward: Finite reward of that delivery.
        done: Whether a delivery has ended it, None where ``t`` is.
        error_kind: Kind of the newest marked turn among what happened, at most 200 characters.
        error_t: The t of that turn.
        late_t: The t of the newest late reward among what happened.
        late_reward: Value of that late reward.
        late_rewards: All late rewards among what happened, oldest first; None where there are more than the server
            keeps, at least 16: ``GET /episodes/{eid}/rewards`` has them.
        status: New status of the session: ``detached``, ``open`` where it has a connection again, ``closed``, ``lost``
            or ``expired``. It is that of all its episodes that are not done.
    """

    eid: str | None
    session: str
    environment: str
    what: list[Happened]
    t: int | None = None
    reward: float | None = None
    done: bool | None = None
    error_kind: str | None = None
    error_t: int | None = None
    late_t: int | None = None
    late_reward: float | None = None
    late_rewards: list[LateValue] | None = None
    status: str | None = None


class DeleteRequest(BaseModel):
    """Body of ``POST /episodes/delete``; ``unused_only`` keeps what open sessions stand on or forks come from."""

    model_config = ConfigDict(extra="forbid", strict=True)

    eids: list[str] = Field(max_length=1000)
    unused_only: bool = False


class DeletedEpisodes(BaseModel):
    """Answer to it: deliveries that went, by eid, what was not there or is somebody else's, and what was kept."""

    deleted: dict[str, int]
    unknown: list[str]
    in_use: list[str] = Field(default_factory=list)


class EpisodePage(BaseModel):
    """``GET /episodes``; ``next`` is the cursor of the following page, None on the last."""

    episodes: list[EpisodeSummary]
    next: str | None = None


class EpisodeBucket(BaseModel):
    """What the episodes add up to that began in one span of time.

    Attributes:
        start: Its beginning, seconds since the epoch: a multiple of its length.
        episodes: How many began in it.
        done: How many of them ended.
        deliveries: Sum of their deliveries.
        reward: Sum of their rewards; the mean is this by ``episodes``.
        error_kinds: Marked turns by kind.
        hint_keys: Turns by the key of their hint's template.
    """

    start: int
    episodes: int = 0
    done: int = 0
    deliveries: int = 0
    reward: float = 0.0
    error_kinds: dict[str, int] = Field(default_factory=dict)
    hint_keys: dict[str, int] = Field(default_factory=dict)


class EpisodeAggregates(BaseModel):
    """``GET /episodes/aggregates``: spans in which episodes began, earliest first, each of ``bucket_s`` seconds."""

    bucket_s: int
    buckets: list[EpisodeBucket]


def episode_path(eid: str) -> str:
    """Return the URL path of an episode.

    Raises:
        UnknownEpisode: ``eid`` has characters that no id has, with which the path could lead elsewhere.
    """
    if not EPISODE.matches(eid):
        raise UnknownEpisode(eid)
    return f"/episodes/{eid}"


def observation_of(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the observation of a decoded payload, with the payload's ``reward`` and ``done`` added if it
    lacks them."""
    observation = dict(payload.get("observation") or {})
    observation.setdefault("reward", payload.get("reward"))
    observation.setdefault("done", payload.get("done", False))
    return observation
