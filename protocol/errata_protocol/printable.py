"""Makes text of another party safe to print: a terminal acts on control characters, and a reader on direction marks."""

from __future__ import annotations

import re

MAX_CHARACTERS = 4000
"""Default of the longest text that `printable` returns, in characters, without the note on what was left out."""

_COMMON = re.compile(r"[\x20-\x7e]*")


def printable(text: object, limit: int = MAX_CHARACTERS) -> str:
    r"""Return text as one line without control characters.

    Every character that is not printable is written as a backslash escape: control characters, line breaks, marks that
    change the direction or hide text, halves of surrogate pairs, and code points that Unicode does not assign.

    Args:
        text: The text; another object is converted by ``str``.
        limit: Most characters kept of the text. The result ends with the number of those that were left out.
    """
    given = str(text)
    kept = given[:limit]
    if not _COMMON.fullmatch(kept):
        kept = "".join(map(_escaped, kept))
    return kept if len(given) <= limit else f"{kept}... ({len(given) - limit:,} more characters)"


def printable_lines(text: str, limit: int | None = None) -> str:
    """Return text as `printable` does, but with its line feeds and tabs.

    Args:
        text: The text.
        limit: Most characters kept of the text; None for all.
    """
    return re.sub(r"[^\n\t]+", lambda run: printable(run[0], len(run[0])), text[:limit])


def _escaped(character: str) -> str:
    # `isprintable` is false for controls, format characters, surrogates, separators but the space, and the unassigned.
    return character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
