"""Names that somebody sends in order to reach what they do not name: paths, encodings, look-alikes, lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator

PIECES = (
    "..", "../", "/../", "..\\", "./", "/./", "//", "/", "\\", "....//", "..;/", "%2e%2e%2f", "%2e%2e/", "..%2f",
    "%252e%252e%252f", "%00", "%c0%ae%c0%ae/", "\0", "\n", "\r\n", "\r\nX-Owner: two\r\n", "\t", " ", "\x7f",
    "\x1b[2J", "~", "~root/", "$HOME", "${PATH}", "$(id)", "`id`", "*", "?", "?all=1", "#", "#x", "&", "=", ":",
    "::", "@", ",", ";", "|", "'", '"', "-", "--", "-rf", "\u2024\u2024/", "\u2025/", "\uff0e\uff0e\uff0f",
    "\u2215", "\u2044", "\u29f8", "\u0430", "\u0435", "\u0661", "\u00ad", "\u200b", "\u202e", "\ufeff", "e\u0301",
    "\u0130", "\ud800", "\udc80", "\U0001f4a9", "\u212a", "\u017f",
)  # fmt: skip
WHOLE = (
    "", ".", "..", "/", "//", "~", "-", "--help", "/etc/passwd", "//localhost/etc/passwd", "\\\\host\\share",
    "C:\\x", "file:///etc/passwd", "http://127.0.0.1:1/x", "/proc/self/environ", "/dev/zero",
    "../../../../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "CON", "NUL", ".hidden", "base.json", "__init__",
    "__class__", "None", "null", "true", "0", "-1", "1e999", "\0", "\ud800",
)  # fmt: skip
LONG = 100_000


def hostile(draw: random.Random, valid: str) -> str:
    """Return a hostile name.

    Args:
        draw: Source of randomness.
        valid: A name that is right, of which some of them are made.
    """
    kind = draw.randrange(8)
    if kind == 0:
        return draw.choice(WHOLE)
    if kind == 1:
        piece = draw.choice(PIECES)
        return (piece * (LONG // len(piece) + 1))[:LONG] if draw.random() < 0.2 else piece * draw.randrange(1, 40)
    if kind == 2:
        return valid + draw.choice(("a", "0", "f", "z")) * draw.choice((1, 300, LONG))
    if kind == 3:
        return draw.choice(PIECES).join(draw.choice((*PIECES, valid)) for _ in range(draw.randrange(2, 8)))
    made = valid
    for _ in range(draw.randrange(1, 4)):
        at = draw.choice((0, len(made), draw.randrange(len(made) + 1)))
        made = made[:at] + draw.choice(PIECES) + made[at + draw.choice((0, 0, 1)) :]
    return made.upper() if kind == 4 else made


def hostile_values(draw: random.Random, valid: str) -> Iterator[object]:
    """Yield what JSON allows in the place of a name: hostile names for ever, and now and then something else."""
    others = (None, True, 0, -1, 2**70, 1.5, [], [valid], {}, {"$ne": valid}, [[[valid]]])
    while True:
        yield draw.choice(others) if draw.random() < 0.05 else hostile(draw, valid)
