"""Builds journal rows of deliveries: observations, tools/call results, errors, other replies, forks. Used by sessions,
episodes and doors."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from openenv.core.env_server.serialization import serialize_observation
from openenv.core.env_server.types import Observation

from errata_protocol import error_info
from errata_protocol.environment import Snapshot
from errata_protocol.errors import EnvironmentOutputInvalid, ErrataError
from errata_protocol.json_text import well_formed
from errata_protocol.markers import NOTHING_WRONG, Detection, ErrorMarkers
from errata_protocol.payload import DIGEST_PREFIX, encode_payload
from errata_protocol.rollouts import informed_marker

from ..ids import MULTIPLEXED
from ..journal.base import DeliveryRow, RecordKind

log = logging.getLogger("errata.delivery")


class Admitted(Struct, frozen=True, gc=False):
    """What is known of a mutating request before it ran."""

    eid: str
    t: int
    sid: str
    id: int | None
    kind: RecordKind
    request: bytes
    created: float
    request_sha: bytes = b""
    """sha256 of the request as received, where that is not ``request``."""

    @property
    def multiplexed(self) -> bool:
        """Whether its session is one of multiplexed sockets, whose replies never hold NaN or an infinity."""
        return self.sid.startswith(MULTIPLEXED)


def encode_output(data: Mapping[str, Any], *, finite: bool = False) -> bytes:
    """Return what an environment returned as JSON; see `encode_payload`.

    Raises:
        EnvironmentOutputInvalid: It has no JSON form.
    """
    try:
        return encode_payload(data, finite=finite)
    except ValueError as error:
        raise EnvironmentOutputInvalid(str(error)) from error


def observation_row(
    admitted: Admitted, observation: Observation, snapshot: Snapshot | None, volatile_fields: tuple[str, ...] = ()
) -> DeliveryRow:
    """Build the row of a delivered observation; its payload is P_t.

    Args:
        admitted: The request.
        observation: What the environment returned.
        snapshot: What a row needs to continue from here.
        volatile_fields: Fields that two runs of one request may differ in (PROTOCOL C2).

    Raises:
        EnvironmentOutputInvalid: The observation has no JSON form.
    """
    cls = type(observation)
    marks = _MARKS.get(cls)
    if marks is None:  # asking an abstract class costs as much as a digest
        marks = _MARKS[cls] = issubclass(cls, ErrorMarkers)
    if marks:
        observation = observation.with_site_t(admitted.t)
    payload = encode_output(serialize_observation(observation), finite=admitted.multiplexed)
    reward, metadata = observation.reward, observation.metadata
    finite = float(reward) if isinstance(reward, (int, float)) and math.isfinite(reward) else None
    if reward is not None and finite is None:
        log.warning("reward %r of a %s has no JSON form and is sent as null", reward, admitted.kind)
    marker = hint = None
    if metadata and isinstance(metadata, dict):
        marker, hint = metadata.get("error_kind"), metadata.get("hint_template_key")
        if error_info.KEY in metadata and not isinstance(marker, str):
            told = informed_marker(metadata)
            marker, hint = (told.error_kind, told.hint_template_key) if told is not None else (marker, hint)
    return _row(
        admitted,
        payload,
        snapshot,
        volatile_fields,
        finite,
        bool(observation.done),
        well_formed(marker) if isinstance(marker, str) else None,  # as it stands in the payload
        well_formed(hint) if isinstance(hint, str) else None,
    )


def mcp_row(
    admitted: Admitted,
    response: dict[str, Any],
    snapshot: Snapshot | None,
    volatile_fields: tuple[str, ...] = (),
    detection: Detection = NOTHING_WRONG,
) -> DeliveryRow:
    """Build the row of a tools/call; its payload is the JSON-RPC response.

    Args:
        admitted: The request.
        response: The JSON-RPC response, with its markers.
        snapshot: As in `observation_row`.
        volatile_fields: Likewise.
        detection: What its markers say.
    """
    payload = encode_output(response, finite=admitted.multiplexed)
    return _row(
        admitted,
        payload,
        snapshot,
        volatile_fields,
        error_kind=detection.error_kind,
        hint_template_key=detection.hint_template_key,
    )


def error_row(admitted: Admitted, error: ErrataError) -> DeliveryRow:
    """Build the row of a recorded error: no t, no payload of an episode."""
    return _without_t(admitted, encode_payload(error.to_wire()), error.code)


def _without_t(admitted: Admitted, payload: bytes, status: str) -> DeliveryRow:
    return DeliveryRow(
        eid=admitted.eid,
        t=None,
        sid=admitted.sid,
        id=admitted.id,
        kind=admitted.kind,
        request=admitted.request,
        request_sha=admitted.request_sha or hashlib.sha256(admitted.request).digest(),
        status=status,
        payload=payload,
        digest=hashlib.sha256(payload).digest(),
        semantic_digest=None,
        state=None,
        refs=(),
        created=admitted.created,
    )


def replied_row(admitted: Admitted, payload: bytes) -> DeliveryRow:
    """Build the row of a reply that is no delivery and no error: to a fork, a close, or a tools/call without a tool."""
    return _without_t(admitted, payload, "ok")


def refused_row(admitted: Admitted, payload: bytes, code: str) -> DeliveryRow:
    """Build the row of a recorded error whose wire form is at hand."""
    return _without_t(admitted, payload, code)


def forked_row(parent: DeliveryRow, admitted: Admitted) -> DeliveryRow:
    """Build a child's t=0: the parent's bytes, digests and snapshot under the child's own key."""
    return DeliveryRow(
        eid=admitted.eid,
        t=admitted.t,
        sid=admitted.sid,
        id=admitted.id,
        kind="fork",
        request=admitted.request,
        request_sha=admitted.request_sha or hashlib.sha256(admitted.request).digest(),
        status="ok",
        payload=parent.payload,
        digest=parent.digest,
        semantic_digest=parent.semantic_digest,
        volatile=parent.volatile,
        state=parent.state,
        refs=parent.refs,
        created=admitted.created,
        reward=None,
        done=parent.done,
        error_kind=parent.error_kind,
        hint_template_key=parent.hint_template_key,
    )


def wire_digest(raw: bytes) -> str:
    """Return the journal's 32 digest bytes as they stand on the wire."""
    return DIGEST_PREFIX + raw.hex()


def _row(
    admitted: Admitted,
    payload: bytes,
    snapshot: Snapshot | None,
    volatile: tuple[str, ...],
    reward: float | None = None,
    done: bool = False,
    error_kind: str | None = None,
    hint_template_key: str | None = None,
) -> DeliveryRow:
    return DeliveryRow(  # by position, in half the time: this is on the path of every step
        admitted.eid,
        admitted.t,
        admitted.sid,
        admitted.id,
        admitted.kind,
        admitted.request,
        admitted.request_sha or hashlib.sha256(admitted.request).digest(),
        "ok",
        payload,
        hashlib.sha256(payload).digest(),
        None,
        snapshot.state if snapshot is not None else None,
        snapshot.refs if snapshot is not None else (),
        admitted.created,
        reward,
        done,
        error_kind,
        hint_template_key,
        volatile,
    )


_MARKS: dict[type, bool] = {}
"""Whether an observation class mixes `ErrorMarkers` in."""
