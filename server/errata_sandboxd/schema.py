"""Argument schemas of the broker's requests; anything else is refused before it reaches the engine.

The method ``check`` of each rule raises `Refused` (``invalid``) unless a value fits it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONTAINER = r"[0-9a-f]{64}"
LAYER = r"sha256:[0-9a-f]{64}"
IMAGE = r"[a-z0-9][A-Za-z0-9._/:@-]{0,254}"
PATH = r"/[^\0]{0,4095}"


class Refused(Exception):
    """The broker refuses a request or cannot carry it out.

    Args:
        code: ``invalid``, ``unknown``, ``image_missing``, ``image_refused``, ``not_running``, ``conflict``,
            ``too_large``, ``engine_away``, ``engine_failed`` or ``deadline``.
        message: What happened and what to do.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Text:
    """A string that fully matches a regular expression."""

    pattern: str

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value, re.DOTALL):
            raise Refused("invalid", f"{name}: a string of the form {self.pattern} is required")


@dataclass(frozen=True, slots=True)
class Number:
    """A number between two bounds, both included; an integer if ``whole``."""

    low: float
    high: float
    whole: bool = True

    def check(self, name: str, value: Any) -> None:
        kind = int if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not self.low <= value <= self.high:
            raise Refused("invalid", f"{name}: a number from {self.low} to {self.high} is required")


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise Refused("invalid", f"{name}: true or false is required")


@dataclass(frozen=True, slots=True)
class Texts:
    """A list of 1 to ``most`` strings of at most ``longest`` characters, without NUL."""

    most: int
    longest: int

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, list) or not 1 <= len(value) <= self.most:
            raise Refused("invalid", f"{name}: a list of 1 to {self.most} strings is required")
        for text in value:
            if not isinstance(text, str) or "\0" in text or len(text) > self.longest:
                raise Refused(
                    "invalid", f"{name}: strings without NUL of at most {self.longest} characters are required"
                )


@dataclass(frozen=True, slots=True)
class Sizes:
    """A mapping of up to ``most`` absolute paths to sizes of 4096 to ``largest`` bytes."""

    most: int
    largest: int

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, dict) or len(value) > self.most:
            raise Refused("invalid", f"{name}: at most {self.most} paths with sizes are required")
        for path, size in value.items():
            Text(r"(/[A-Za-z0-9._-]+)+").check(f"{name} path", path)
            parts = path.split("/")[1:]
            if not {".", ".."}.isdisjoint(parts) or parts[0] in ("proc", "sys", "dev"):
                raise Refused("invalid", f"{name}: {path} cannot hold files")
            Number(4096, self.largest).check(f"{name} {path}", size)


@dataclass(frozen=True, slots=True)
class Facts:
    """A mapping of up to ``most`` short names to strings of at most ``longest`` characters."""

    most: int
    longest: int

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, dict) or len(value) > self.most:
            raise Refused("invalid", f"{name}: at most {self.most} names are required")
        for key, text in value.items():
            Text(r"[a-z][a-z_]{0,31}").check(f"{name} name", key)
            if not isinstance(text, str) or len(text) > self.longest or "\0" in text:
                raise Refused("invalid", f"{name} {key}: a string of at most {self.longest} characters is required")


Rule = Text | Number | Flag | Texts | Sizes | Facts
MIB = 1024**2
_ONE = {"container": Text(CONTAINER)}

VERBS: Mapping[str, tuple[Mapping[str, Rule], Mapping[str, Rule]]] = {
    # verb: (required arguments, optional arguments)
    "ping": ({}, {}),
    "create": (
        {"image": Text(f"{LAYER}|{IMAGE}")},
        {
            "memory_bytes": Number(16 * MIB, 1024**4),
            "pids": Number(4, 32_768),
            "read_only": Flag(),
            "tmpfs": Sizes(8, 64 * 1024 * MIB),
        },
    ),
    "start": (_ONE, {}),
    "restart": (_ONE, {}),
    "exec": (
        {**_ONE, "argv": Texts(32, 131_072), "timeout_s": Number(0.01, 86_400, whole=False)},
        {"root": Flag(), "output_bytes": Number(0, 2**50)},
    ),
    "copy_in": (_ONE, {}),
    "copy_out": ({**_ONE, "path": Text(PATH), "max_bytes": Number(0, 2**40)}, {}),
    "inspect": (_ONE, {"size": Flag(), "changes": Flag()}),
    "list": ({}, {}),
    "pause": (_ONE, {}),
    "unpause": (_ONE, {}),
    "commit": ({**_ONE, "facts": Facts(8, 4096)}, {}),
    "remove": (_ONE, {}),
    "remove_image": ({"image": Text(LAYER)}, {}),
}
"""All requests that the broker knows, with the rules for their required and optional arguments."""


def check_request(request: Any) -> tuple[str, dict[str, Any]]:
    """Return verb and arguments of a request.

    Raises:
        Refused: ``invalid``: it is not of the form of one of `VERBS`.
    """
    if not isinstance(request, dict) or not isinstance(request.get("do"), str):
        raise Refused("invalid", 'a request is an object with "do" and the arguments of that verb')
    arguments = dict(request)
    verb = arguments.pop("do")
    if verb not in VERBS:
        raise Refused("invalid", f"no verb {verb[:40]!r}; there are: {', '.join(VERBS)}")
    required, optional = VERBS[verb]
    for name in required:
        if name not in arguments:
            raise Refused("invalid", f"{verb} needs {name}")
    for name, value in arguments.items():
        rule = required.get(name) or optional.get(name)
        if rule is None:
            raise Refused("invalid", f"{verb} takes no {name[:40]!r}")
        rule.check(name, value)
    return verb, arguments
