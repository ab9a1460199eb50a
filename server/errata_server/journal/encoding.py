"""Builds the body of one frame from waiting commits; leaves out commits that conflict with earlier ones. The bytes of a
record are `codec`'s."""

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
    steps: list[DeliveryRow] = []  # whose claims are not in `claims`: few transactions need them
    touched: set[str | None] = set()  # episodes and sessions that have records in this transaction
    for group in groups:
        d = group[0] if len(group) == 1 else None
        is_step = (
            type(d) is DeliveryRow
            and d.t is not None
            and d.id is not None
            and d.eid not in touched
            and d.sid not in touched
            and keys.accepts(d)
        )
        try:
            if not is_step:
                for step in steps:
                    claims.update(of_step(step))
                steps.clear()
                claimed = check(group, keys, claims)
            parts = [encode_record(record) for record in group]
            more = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
            if size + more > MAX_BODY_BYTES:
                raise EnvironmentOutputInvalid("these records are too large for one commit")
        except ErrataError as error:
            found.errors.append(error)
            continue
        if is_step:
            assert type(d) is DeliveryRow
            steps.append(d)
            touched.add(d.eid)
            touched.add(d.sid)
        else:
            claims.update(claimed)
            for record in group:
                touched.add(getattr(record, "eid", None))
                touched.add(getattr(record, "sid", None))
        found.errors.append(None)
        size += more
        found.records += group
        found.parts += parts
    return found
