"""Named normalisers replace text that differs between equal runs (times, paths, pids) before the semantic digest.

An observation class lists them in ``VOLATILE_FIELDS`` together with fields, with a leading ``~``:
``"~test_durations"``. The rest of the text is unchanged: a test that fails instead of passing changes the digest.
Journaled bytes are never normalised, only the values that are compared.
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
    """Replace durations in summaries of pytest, unittest and SymPy, with the ``=`` that fill the rest of the line.

    pytest's list of the slowest tests is sorted by name, because its own order is by duration.
    """
    del seen
    text = _SUMMARY.sub(lambda found: f"== {found['counts']} in # ==", text) if " in " in text else text
    text = _TOOK.sub(r"\1# seconds", _RAN.sub(r"\1#", text))
    text = _SLOWEST.sub("# ", text)
    return _SLOWEST_LIST.sub(lambda found: "".join(sorted(found[0].splitlines(keepends=True))), text)


def _seeds(text: str, seen: dict[str, int]) -> str:
    """Replace random seeds that SymPy's runner, pytest-randomly and pytest-random-order print at their start."""
    del seen
    return _SEED.sub(r"\1#", text)


def _temporary(text: str, seen: dict[str, int]) -> str:
    """Replace the random names of directories below ``/tmp`` by numbers, in order of appearance."""
    if "tmp/" not in text:
        return text
    return _TEMPORARY.sub(lambda found: f"/tmp/#{seen.setdefault(found[0], len(seen) + 1)}", text)


def _pids(text: str, seen: dict[str, int]) -> str:
    """Replace process ids by ``#1``, ``#2`` and so on, in order of first appearance.

    A process id is the number in ``pid 123`` or ``pid=123``, and the one in a shell's message about a process that a
    signal ended, such as ``line 3: 123 Killed``. ``seen`` keeps the numbers given so far and is added to.
    """

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
    """Check that ``name``, with its leading ``~``, is a normaliser.

    Raises:
        ValueError: It is not; the message lists the normalisers.
    """
    if name.removeprefix(PREFIX) not in NORMALISERS:
        known = ", ".join(PREFIX + one for one in NORMALISERS)
        raise ValueError(f"{name} is no normaliser: there are {known}")


def texts_normalised(data: Any, names: Collection[str]) -> Any:
    """Return decoded JSON with the normalisers ``names`` (without ``~``) applied to all texts, in order of keys.

    Unknown names are ignored, because a journal may be older or newer than this list.
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
