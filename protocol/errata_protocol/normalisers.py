"""Named normalisers: what of a text differs between two equal runs, and is replaced before the semantic digest.

An observation class names them in ``VOLATILE_FIELDS`` beside its fields, with ``~`` in front: ``"~test_durations"``.
The text around stays as it is: a test that fails instead of passing changes the digest.
Journaled bytes are never normalised, only what is compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from .differences import addresses_numbered

PREFIX = "~"
"""In front of a normaliser's name where it stands among the names of fields."""

_SUMMARY = re.compile(
    r"^=* ?(?P<counts>(?:tests finished: )?(?:no tests ran|\d+ [a-z]+(?:, \d+ [a-z]+)*),?) in "
    r"\d+(?:\.\d+)?(?:s| seconds)"
    r"(?: \(\d+:\d\d:\d\d\))? ?=*$",
    re.MULTILINE,
)
_RAN = re.compile(r"^(Ran \d+ tests? in )\d+(?:\.\d+)?s$", re.MULTILINE)
_SLOWEST = re.compile(r"^\d+(?:\.\d+)?s (?=(?:call|setup|teardown) +\S)", re.MULTILINE)
_SLOWEST_LIST = re.compile(r"(?:^# (?:call|setup|teardown) .*\n){2,}", re.MULTILINE)
_TOOK = re.compile(r"^(\S+ - Took )\d+(?:\.\d+)? seconds$", re.MULTILINE)
_SEED = re.compile(
    r"^(random seed: +|hash randomization: on \(PYTHONHASHSEED=|Using --randomly-seed=|Using --random-order-seed=)\d+",
    re.MULTILINE,
)
_TEMPORARY = re.compile(
    r"(?<![\w/.-])/(?:var/)?tmp/(?:pytest-of-[\w-]+/pytest-\d+|tmp[a-z0-9_]{8}|tmp\.[A-Za-z0-9]{10}|"
    r"django_[a-z0-9_]{8}|pymp-[a-z0-9_]{8})(?![\w-])"
)
_PID = re.compile(r"\b(pid(?: |=|: ?))\d{1,10}\b", re.IGNORECASE)
_KILLED = re.compile(
    r"^((?:\S+: )?line \d+: +)\d+(?= +(?:Killed|Terminated|Aborted|Segmentation fault|Bus error|Hangup|Quit)\b)",
    re.MULTILINE,
)


def _durations(text: str, seen: dict[str, int]) -> str:
    """Durations in summaries of pytest, unittest and SymPy; the rule of ``=`` fills the rest of its line.

    pytest's list of the slowest comes in the order of names, because its own order is that of the durations.
    """
    del seen
    text = _SUMMARY.sub(lambda found: f"== {found['counts']} in # ==", text) if " in " in text else text
    text = _TOOK.sub(r"\1# seconds", _RAN.sub(r"\1#", text))
    text = _SLOWEST.sub("# ", text)
    return _SLOWEST_LIST.sub(lambda found: "".join(sorted(found[0].splitlines(keepends=True))), text)


def _seeds(text: str, seen: dict[str, int]) -> str:
    """Seeds that SymPy's runner, pytest-randomly and pytest-random-order draw and print at their start."""
    del seen
    return _SEED.sub(r"\1#", text)


def _temporary(text: str, seen: dict[str, int]) -> str:
    """Directories below ``/tmp`` with a drawn name: each becomes its number in order of appearance."""
    if "tmp/" not in text:
        return text
    return _TEMPORARY.sub(lambda found: f"/tmp/#{seen.setdefault(found[0], len(seen) + 1)}", text)


def _pids(text: str, seen: dict[str, int]) -> str:
    """``pid 123``, and the process that a shell names when a signal ends it: numbered likewise."""

    def number(found: re.Match[str]) -> str:
        return f"{found[1]}#{seen.setdefault(found[0].removeprefix(found[1]), len(seen) + 1)}"

    return _KILLED.sub(number, _PID.sub(number, text))


NORMALISERS: dict[str, Callable[[str, dict[str, int]], str]] = {
    "test_durations": _durations,
    "test_seeds": _seeds,
    "addresses": addresses_numbered,
    "temporary_paths": _temporary,
    "pids": _pids,
}
"""By name. Each takes a text and what it has numbered so far in this payload."""


def check(name: str) -> None:
    """Raise where ``name``, with its ``~``, is no normaliser.

    Raises:
        ValueError: It is none; the message lists them.
    """
    if name.removeprefix(PREFIX) not in NORMALISERS:
        known = ", ".join(PREFIX + one for one in NORMALISERS)
        raise ValueError(f"{name} is no normaliser: there are {known}")


def texts_normalised(data: Any, names: Collection[str]) -> Any:
    """Return decoded JSON whose texts went through the normalisers ``names`` (without ``~``), in the order of keys.

    An unknown name changes nothing: a journal may be older or newer than this list.
    """
    chosen = [(NORMALISERS[name], dict[str, int]()) for name in sorted(set(names) & set(NORMALISERS))]
    return _walk(data, chosen) if chosen else data


def _walk(value: Any, chosen: list[tuple[Callable[[str, dict[str, int]], str], dict[str, int]]]) -> Any:
    if isinstance(value, str):
        for normalise, seen in chosen:
            value = normalise(value, seen)
        return value
    if isinstance(value, list):
        return [_walk(item, chosen) for item in value]
    if isinstance(value, dict):
        return {key: _walk(value[key], chosen) for key in sorted(value)}
    return value
