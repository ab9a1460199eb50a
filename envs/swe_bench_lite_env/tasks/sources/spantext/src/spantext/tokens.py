"""Cuts a span into numbers and units."""

import re
from dataclasses import dataclass

_TOKEN = re.compile(r"\s*(?:(?P<number>[+-]?\d+)|(?P<unit>[a-z]+)|(?P<sign>[:.]))")


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    at: int


def tokens(text):
    """Yield the tokens of a text; what is none comes as kind `unknown`."""
    at = 0
    text = text.rstrip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            yield Token("unknown", text[at:], at)
            return
        yield Token(found.lastgroup, found[found.lastgroup], found.start(found.lastgroup))
        at = found.end()
