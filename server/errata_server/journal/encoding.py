"""Encodes waiting commits as the body of one frame; leaves out commits that conflict with earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from errata_protocol.errors import EnvironmentOutputInvalid, ErrataError

from .base import DeliveryRow, Record
from .claims import Claims, Keys, check, of_step
from .codec import MAX_BODY_BYTES, encode_record


@dataclass(slots=True)
class Encoded:
    """What one frame is made of.

    Args:
        records: Of all groups that can be written, in order.
        parts: Their bytes, one by one.
        errors: One entry per group: None, or the error of that group.
    """

    records: list[Record] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    errors: list[ErrataError | None] = field(default_factory=list)


def encoded(groups: Sequence[Sequence[Record]], keys: Keys) -> Encoded:
    """Check and encode ``groups`` as one transaction on a store that holds ``keys``."""
    found, size = Encoded(), 0
    claims: Claims = set()
    for group in groups:
        try:
            claimed = _step_claims(group, keys, claims) or check(group, keys, claims)
            parts = [encode_record(record) for record in group]
            more = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
            if size + more > MAX_BODY_BYTES:
                raise EnvironmentOutputInvalid("these records are too large for one commit")
        except ErrataError as error:
            found.errors.append(error)
            continue
        found.errors.append(None)
        claims.update(claimed)
        size += more
        found.records += group
        found.parts += parts
    return found


def _step_claims(
    group: Sequence[Record], keys: Keys, claims: Claims
) -> tuple[tuple[object, ...], tuple[object, ...]] | None:
    """Return what a commit of one step claims, or None if it conflicts or is no step: a fast `check`."""
    if len(group) != 1 or type(d := group[0]) is not DeliveryRow or d.t is None or d.id is None:
        return None
    claimed = of_step(d)
    if (
        claimed[0] in claims
        or claimed[1] in claims
        or not keys.has_episode(d.eid)
        or keys.has_delivery(d.eid, d.t)
        or keys.has_id(d.sid, d.id)
    ):
        return None
    return claimed
