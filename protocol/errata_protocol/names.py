"""Names that others send and that become a part of a path or an address: none of them is a path.

Every such name has a `Kind`, whose grammar has no separator, no ``.`` or ``..`` alone, nothing but ASCII, and a longest
length. A boundary calls `Kind.check` before it uses the name. `member_path` is for the names in archives, which are
paths below a root. The broker of containers, which imports nothing of Errata, has its own in `errata_sandboxd.names`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

__all__ = [
    "BASE",
    "BASE_ID",
    "DIGEST_ID",
    "ENVIRONMENT",
    "EPISODE",
    "INSTANCE",
    "LAYER",
    "PACKAGE_FILE",
    "PROJECT",
    "REPOSITORY",
    "SESSION",
    "SHARD",
    "InvalidName",
    "Kind",
    "member_path",
    "shown",
]

_SHOWN = 80
_MEMBER_BYTES, _PART_BYTES = 4095, 255
"""PATH_MAX without its NUL, and NAME_MAX."""


class InvalidName(ValueError):
    """A name is not of its kind; the message says what is allowed."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of names.

    Args:
        what: What such a name names, as in "the name of a base tree".
        allowed: Characters and length that a name may have, for messages.
        pattern: Regular expression that all of a name matches.
    """

    what: str
    allowed: str
    pattern: re.Pattern[str]

    def matches(self, value: object) -> bool:
        """Return whether a value is a name of this kind."""
        return isinstance(value, str) and self.pattern.fullmatch(value) is not None

    def check(self, value: object) -> str:
        """Return a value if it is a name of this kind.

        Raises:
            InvalidName: It is not.
        """
        if not isinstance(value, str) or self.pattern.fullmatch(value) is None:
            raise InvalidName(f"{shown(value)} cannot be {self.what}: use {self.allowed}")
        return value


def _kind(what: str, allowed: str, pattern: str) -> Kind:
    return Kind(what, allowed, re.compile(pattern, re.ASCII))


BASE = _kind(
    "the name of a base tree",
    "letters, digits, '.', '_' and '-', at most 100, with a letter or digit first",
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
)
BASE_ID = _kind(
    "the name or id of a base tree",
    "letters, digits, '.', '_' and '-', at most 128, with a letter or digit first",
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
)
LAYER = _kind("the id of a layer", "letters and digits, at most 64", r"[A-Za-z0-9]{1,64}")
DIGEST_ID = _kind("the digest of an image or a file", "64 hexadecimal digits, lowercase", r"[0-9a-f]{64}")
EPISODE = _kind(
    "the id of an episode",
    "letters, digits, '_', '-', '.' and '~', at most 200",
    r"(?![.~]{1,2}\Z)[A-Za-z0-9_.~-]{1,200}",
)
SESSION = _kind("the id or key of a session", "21 to 128 letters, digits, '_' and '-'", r"[A-Za-z0-9_-]{21,128}")
SHARD = _kind("the name of a shard", "12 lowercase letters and digits", r"[a-z0-9]{12}")
ENVIRONMENT = _kind(
    "the name of an environment in a path",
    "letters, digits, '.', '_' and '-', at most 100, with a letter or digit first",
    r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}",
)
INSTANCE = _kind(
    "the id of an instance",
    "letters, digits and . _ + - only, at most 200, with a letter or digit first",
    r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}",
)
REPOSITORY = _kind(
    "a repository",
    "owner/name of letters, digits and . _ + -, neither of them '.' or '..'",
    r"(?!\.{1,2}/)[A-Za-z0-9._+-]{1,100}/(?!\.{1,2}\Z)[A-Za-z0-9._+-]{1,100}",
)
PROJECT = _kind(
    "the name of a project on a package index",
    "letters, digits and . _ -, at most 200, with a letter or digit at both ends",
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,198}[A-Za-z0-9])?",
)
PACKAGE_FILE = _kind(
    "the name of a package's file",
    "letters, digits and . _ + ! -, at most 255, with a letter or digit first",
    r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,254}",
)


def shown(value: object) -> str:
    """Return a value for a message: quoted, ASCII and short, whatever it is."""
    if not isinstance(value, str):
        return f"a value of type {type(value).__name__}"
    text = ascii(value[: _SHOWN + 1])
    return text if len(text) <= _SHOWN + 2 else text[:_SHOWN] + "...'"


def member_path(name: str) -> PurePosixPath:
    """Return the path, below the archive's root, that the name of an archive's member is.

    A leading ``/`` is dropped, as tar does.

    Args:
        name: The name; bytes that are not UTF-8 are surrogates, as `os.fsdecode` makes them.

    Returns:
        The path; empty for the root itself.

    Raises:
        InvalidName: It has ``..`` or NUL, is longer than a path can be, or cannot be encoded.
    """
    try:
        size = len(name.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise InvalidName(f"the archive has a path that cannot be encoded: {shown(name)}") from None
    if "\0" in name or size > _MEMBER_BYTES:
        raise InvalidName(f"the archive has a path with NUL or more than {_MEMBER_BYTES} bytes: {shown(name)}")
    path = PurePosixPath(*(part for part in name.split("/") if part not in ("", ".")))
    if ".." in path.parts:
        raise InvalidName(f"the archive has a path with '..': {shown(name)}")
    if any(len(part.encode("utf-8", "surrogateescape")) > _PART_BYTES for part in path.parts):
        raise InvalidName(f"the archive has a name of more than {_PART_BYTES} bytes: {shown(name)}")
    return path
