"""Paths of fields in a payload, such as ``$.observation.result.execution_time``: parsed, formatted and applied."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

Token = str | int | None
"""A key, an index, or None for ``[*]``, every item of a list."""

Path = tuple[Token, ...]

_PART = re.compile(
    r"""\.?(?P<name>[^\s.\[\]"'$]+)|\[(?P<index>\d+)\]|\[(?P<every>\*)\]|\[(?P<key>"(?:[^"\\]|\\.)*")\]""", re.VERBOSE
)


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Path:
    """Return the parts of a path; a leading ``$`` is optional.

    Raises:
        ValueError: It is not a valid path.
    """
    at = 1 if text.startswith("$") else 0
    parts: list[Token] = []
    while at < len(text):
        found = _PART.match(text, at)
        if found is None or (found["name"] and text[at] != "." and at > 0):
            raise ValueError(f"{text!r} is no path of a field, such as $.observation.items[*].took_s")
        if found["name"]:
            parts.append(None if found["name"] == "*" else found["name"])
        elif found["index"]:
            parts.append(int(found["index"]))
        else:
            parts.append(json.loads(found["key"]) if found["key"] else None)
        at = found.end()
    return tuple(parts)


def written(path: Path) -> str:
    """Return a path as text that `parse` reads, with a leading ``$``."""
    return "$" + "".join(map(_written, path))


def _written(part: Token) -> str:
    if part is None:
        return "[*]"
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if part.isidentifier() else f"[{json.dumps(part)}]"


def every_item(path: Path) -> Path:
    """Return the path with each index replaced by ``[*]``."""
    return tuple(None if isinstance(part, int) else part for part in path)


def without(value: Any, path: Path) -> Any:
    """Return a decoded JSON value without the values at ``path``; ``value`` itself is not changed.

    A key is removed with its value. An item of a list becomes null, so that the list keeps its length.
    """
    if not path:
        return None
    part, rest = path[0], path[1:]
    if isinstance(value, dict):
        if part is None:
            return {k: without(v, rest) for k, v in value.items()} if rest else dict.fromkeys(value)
        if part not in value:
            return value
        if not rest:
            return {k: v for k, v in value.items() if k != part}
        return {k: without(v, rest) if k == part else v for k, v in value.items()}
    if isinstance(value, list) and not isinstance(part, str):
        return [without(v, rest) if part is None or part == i else v for i, v in enumerate(value)]
    return value
