"""Rows of a rollout export: what a trainer or an analyst reads of whole episodes (docs/export.md).

``action_t`` is the request that delivery t answered, and ``state_t`` what that delivery sent. So the state in which an
action was chosen is ``state_t`` of the row before, and an `ErrorSite.action_span` lies in ``action_t`` of its own row.

A field may be added in version 1; a reader ignores what it does not know.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from .markers import ErrorSite
from .replay import Kind

SCHEMA_VERSION = 1

_META_KEY = "openenv/error_markers"


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore")


class ErrorMarker(_Row):
    """How a turn failed, as its observation says.

    Attributes:
        error_kind: One of `errata_protocol.ErrorKind`, or the environment's own.
        hint_template_key: Which hint fits, None for a warning.
        severity: ``error``, or ``warning`` where the detector was not sure.
        error_site: Where.
    """

    error_kind: str
    hint_template_key: str | None = None
    severity: str | None = None
    error_site: ErrorSite | None = None


class LateReward(_Row):
    """A reward that came after its step."""

    value: float
    source: str
    reward_id: str


class FailedRequest(_Row):
    """A request after this delivery that delivered nothing.

    Attributes:
        action: The request; None where it is no text.
        code: Row of `errata_protocol.CODES`.
        message: What was answered.
    """

    kind: Kind
    action: str | None
    code: str
    message: str


class Turn(_Row):
    """One delivery.

    Attributes:
        t: Delivery index: 0 is reset's.
        kind: What was delivered.
        state_t: P_t, the exact text that was sent; None where payloads were left out.
        agent_text_t: What the agent read of it; None where it was not asked for, cannot be made, or t is a tools/call.
        action_t: The request that this delivery answered; None where it is no text.
        reward_t: As the environment gave it with the step.
        late_rewards_t: What came later, in the order of their commits.
        late_reward_t: Their sum, None without any.
        error_marker_t: None for a turn that did not fail.
        done: It ended the episode.
        digest: sha256 of P_t.
        semantic_digest: The same without volatile fields, None where there is no such form.
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
    """One row a turn.

    Attributes:
        schema_version: Of these rows.
        eid: Episode.
        episode_id: The client's alias.
        environment: Its name.
        session: sha256 of the session id, first 12 hex digits.
        origin_eid: Parent of a fork.
        origin_t: Where it was forked.
        agent_text_version: Version of ``agent_text`` when it was delivered.
    """


class RolloutEpisode(_OfEpisode):
    """One row an episode; the fields of `RolloutTurn`, and:

    Attributes:
        created: Seconds since the epoch.
        done: A turn ended it.
        reward: Sum of the turns' rewards.
        late_reward: Sum of the late ones, None without any.
        turns: In order of t.
    """

    created: float
    done: bool
    reward: float
    late_reward: float | None
    turns: list[Turn]


def marker_of(payload: Any) -> ErrorMarker | None:
    """Return the marker in a decoded payload, wherever its kind of environment puts it (PROTOCOL B1, B2)."""
    observation = _at(payload, "observation")
    places = [
        observation,
        _at(observation, "metadata"),
        _at(payload, "metadata"),
        _at(payload, "result", "_meta", _META_KEY),
        _at(payload, "error", "data", _META_KEY),
    ]
    for place in places:
        if isinstance(place, dict) and isinstance(place.get("error_kind"), str):
            try:
                return ErrorMarker.model_validate(place)
            except ValueError:  # a foreign environment's own fields of these names
                return ErrorMarker(error_kind=place["error_kind"])
    return None


def _at(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value
