"""Text of a server or client on its way to a terminal."""

from __future__ import annotations

import re


def printable(text: str) -> str:
    """Return text with backslash escapes for control characters but line feeds, direction marks and surrogates."""
    return re.sub(r"[^\n\x20-\x7e]", _escaped, text)


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    return character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
