"""From the groups that wait to the body of one frame: what stands against a group leaves only that group out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from errata_protocol.errors import EnvironmentOutputInvalid, ErrataError

from .base import Record
from .claims import Claims, Keys, check
from .codec import MAX_BODY_BYTES, encode_record


@dataclass(slots=True)
class Encoded:
    """What one frame is made of.

    Args:
        records: Of all groups that can be written, in order.
        parts: Their bytes, one by one.
        errors: One entry per group: None, or what stands against it.
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
            claimed = check(group, keys, claims)
            parts = [encode_record(record) for record in group]
            more = sum(map(len, parts))
            if size + more > MAX_BODY_BYTES:
                raise EnvironmentOutputInvalid("these records are too large for one commit")
        except ErrataError as error:
            found.errors.append(error)
            continue
        found.errors.append(None)
        claims |= claimed
        size += more
        found.records += group
        found.parts += parts
    return found
