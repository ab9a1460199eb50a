"""A rule: a named, documented function that finds one kind of error, and its sites, in a turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from errata_protocol.detect.turn import Turn
from errata_protocol.markers import ErrorKind, ErrorSite, Severity


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found: the sites, the failing one first, and the severity."""

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
        find: Returns a finding, or None if it does not fire.
        last_resort: Whether the rule reads no text; such rules are tried after all others, on standard output too.
    """

    name: str
    kind: ErrorKind
    fires: str
    place: str
    find: Callable[[Turn], Finding | None]
    last_resort: bool = False
