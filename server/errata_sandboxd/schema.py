"""Argument schemas of the broker's requests; anything else is refused before it reaches the engine.

The method ``check`` of each rule raises `Refused` (``invalid``) unless a value fits it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .names import CONTAINER, LAYER, Reference

PATH = r"/[^\0]{0,4095}"


class Refused(Exception):
    """The broker refuses a request or cannot carry it out.

    Args:
        code: ``invalid``, ``unknown``, ``image_missing``, ``image_refused``, ``not_running``, ``conflict``,
            ``too_large``, ``busy``, ``engine_away``, ``engine_failed`` or ``deadline``.
        message: What happened and what to do.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def _is_text(value: Any) -> bool:
    """Return whether a value is a string without NUL that can be encoded: JSON allows half a surrogate pair."""
    return isinstance(value, str) and "\0" not in value and re.search(r"[\ud800-\udfff]", value) is None


@dataclass(frozen=True, slots=True)
class Text:
    """A string that fully matches a regular expression."""

    pattern: str

    def check(self, name: str, value: Any) -> None:
        if not _is_text(value) or not re.fullmatch(self.pattern, value, re.DOTALL | re.ASCII):
            raise Refused("invalid", f"{name}: a string of the form {self.pattern} is required")


@dataclass(frozen=True, slots=True)
class Image:
    """The id of an image or layer, or a reference by the engine's grammar."""

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, str):
            raise Refused("invalid", f"{name}: a string is required")
        if re.fullmatch(LAYER, value):
            return
        try:
            Reference.parse(value)
        except ValueError as error:
            raise Refused("invalid", f"{name}: {error}") from None


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
            if not _is_text(text) or len(text) > self.longest:
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
            if not _is_text(text) or len(text) > self.longest:
                raise Refused("invalid", f"{name} {key}: a string of at most {self.longest} characters is required")


Rule = Text | Image | Number | Flag | Texts | Sizes | Facts
MIB = 1024**2
_ONE = {"container": Text(CONTAINER)}

VERBS: Mapping[str, tuple[Mapping[str, Rule], Mapping[str, Rule]]] = {
    # verb: (required arguments, optional arguments)
    "ping": ({}, {}),
    "create": (
        {"image": Image()},
        {
            "memory_bytes": Number(16 * MIB, 1024**4),
            "pids": Number(4, 32_768),
            "read_only": Flag(),
            "tmpfs": Sizes(8, 64 * 1024 * MIB),
            "part": Number(0, 9999),
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
