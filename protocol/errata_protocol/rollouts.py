"""Rows of a rollout export, for trainers and analysts: turns and whole episodes (docs/export.md).

In the row of delivery t, ``action_t`` is the request that it answered and ``state_t`` its payload. So an action was
chosen in the ``state_t`` of the row before, and an `ErrorSite.action_span` is a span of ``action_t`` of its own row.

Fields may be added in version 1; a reader ignores those that it does not know.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from .error_info import ErrorInfo, InfoSite
from .markers import HINT_TEMPLATE_KEYS, ErrorKind, ErrorSite
from .replay import Kind

SCHEMA_VERSION = 1

META_KEY = "openenv/error_markers"


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore")


class ErrorMarker(_Row):
    """How a turn failed, from its observation.

    Attributes:
        error_kind: An `errata_protocol.ErrorKind`, or a kind of the environment's own.
        hint_template_key: Key of the hint that fits, None for a warning.
        severity: ``error``, or ``warning`` if the detector was not sure.
        error_site: Where it failed.
    """

    error_kind: str
    hint_template_key: str | None = None
    severity: str | None = None
    error_site: ErrorSite | None = None


class LateReward(_Row):
    """A reward that was posted after its step."""

    value: float
    source: str
    reward_id: str


class FailedRequest(_Row):
    """A request after this delivery that failed and has no delivery.

    Attributes:
        action: The request; None if it is not text.
        code: A key of `errata_protocol.CODES`.
        message: Text of the error.
    """

    kind: Kind
    action: str | None
    code: str
    message: str


class Turn(_Row):
    """One delivery.

    Attributes:
        t: Delivery index: 0 is reset's.
        kind: Kind of the request: reset, step or mcp.
        state_t: P_t, the exact text that was sent; None if payloads were left out.
        agent_text_t: What the agent read of it; None if it was not asked for, cannot be made, or t is a tools/call.
        action_t: The request that this delivery answered; None if it is not text.
        reward_t: The environment's reward for the step.
        late_rewards_t: Rewards that were posted later, in order of their commits.
        late_reward_t: Their sum, None if there are none.
        error_marker_t: None for a turn that did not fail.
        done: Whether it ended the episode.
        digest: sha256 of P_t.
        semantic_digest: sha256 of P_t without volatile fields, None if it has no canonical form.
        errors_t: Requests that failed between this delivery and the next.
        created: Seconds since the epoch.
    """

    t: int
    kind: Kind
    state_t: str | None = None
    agent_text_t: str | None = None
    action_t: str | None = None
    reward_t: float | None = None
    late_rewards_t: list[LateReward] = Field(default_factory=list)
    late_reward_t: float | None = None
    error_marker_t: ErrorMarker | None = None
    done: bool = False
    digest: str
    semantic_digest: str | None = None
    errors_t: list[FailedRequest] = Field(default_factory=list)
    created: float


class _OfEpisode(_Row):
    schema_version: int = SCHEMA_VERSION
    eid: str
    episode_id: str | None = None
    environment: str
    session: str
    origin_eid: str | None = None
    origin_t: int | None = None
    agent_text_version: str | None = None


class RolloutTurn(Turn, _OfEpisode):
    """A row for one turn.

    Attributes:
        schema_version: Version of these rows.
        eid: Episode key.
        episode_id: The client's own id of the episode.
        environment: Name of the environment.
        session: sha256 of the session id, first 12 hex digits.
        origin_eid: Parent of a fork.
        origin_t: Delivery of the parent from which it was forked.
        agent_text_version: Version of ``agent_text`` when it was delivered.
    """


class RolloutEpisode(_OfEpisode):
    """A row for one episode: the fields of `RolloutTurn`, and these.

    Attributes:
        created: Seconds since the epoch.
        done: Whether a turn ended it.
        reward: Sum of the turns' rewards.
        late_reward: Sum of the late rewards, None if there are none.
        turns: Its turns in order of t.
    """

    created: float
    done: bool
    reward: float
    late_reward: float | None
    turns: list[Turn]


def marker_of(answer: Any) -> ErrorMarker | None:
    """Return how an action failed, wherever its kind of environment says so; None for one that did not fail.

    Markers are looked for first (PROTOCOL B1, B2), then the ``error_info`` of others (PROTOCOL B5).

    Args:
        answer: A decoded payload, or a client's ``StepResult`` with an observation of any form. What has another form
            than it should have is no marker.
    """
    observation = _at(answer, "observation")
    metadata = (_at(observation, "metadata"), _at(answer, "metadata"))
    places = [
        observation,
        *metadata,
        _at(answer, "result", "_meta", META_KEY),
        _at(answer, "error", "data", META_KEY),
    ]
    for place in places:
        if isinstance(kind := _at(place, "error_kind"), str):
            try:
                return ErrorMarker.model_validate(place, from_attributes=True)
            except ValueError:  # a foreign environment's own fields of these names
                return ErrorMarker(error_kind=kind)
    return next((marker for one in metadata if (marker := informed_marker(one)) is not None), None)


def informed_marker(metadata: Any) -> ErrorMarker | None:
    """Return the marker that says what the ``error_info`` of an observation's metadata says (PROTOCOL B5).

    Args:
        metadata: Metadata of an observation, decoded.

    Returns:
        A marker with the hint key of its kind, whose site is the first; None where there is no ``error_info``, or none
        with a kind.
    """
    info = ErrorInfo.read(metadata)
    if info is None:
        return None
    kind = _KINDS.get(info.kind, info.kind)
    return ErrorMarker(
        error_kind=kind,
        hint_template_key=_HINT_KEYS.get(kind),
        severity="error",
        error_site=_site(info.sites[0] if info.sites else None, info.message),
    )


_KINDS = {"invalid_args": ErrorKind.INVALID_ARGUMENTS.value}
_HINT_KEYS = {kind.value: key for kind, key in HINT_TEMPLATE_KEYS.items()}


def _site(place: InfoSite | None, message: str) -> ErrorSite | None:
    if place is None:
        return ErrorSite(source="message", message=message) if message else None
    return ErrorSite(**dict(place), message=message or None)


def _at(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value
