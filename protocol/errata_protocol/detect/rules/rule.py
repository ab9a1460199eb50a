"""What a rule is: a named, documented function from a turn to the sites of one kind of error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from errata_protocol.detect.turn import Turn
from errata_protocol.markers import ErrorKind, ErrorSite, Severity


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found: its sites, the failing one first, and how sure it is."""

    sites: tuple[ErrorSite, ...] = ()
    severity: Severity = "error"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Args:
        name: Stable dotted name, used in the documentation.
        kind: The kind it reports.
        fires: What makes it fire, in one sentence.
        place: What its site is, in one sentence.
        find: Returns a finding, or None when it does not fire.
        last_resort: True for rules that read no text; they wait until standard output has been asked too.
    """

    name: str
    kind: ErrorKind
    fires: str
    place: str
    find: Callable[[Turn], Finding | None]
    last_resort: bool = False
