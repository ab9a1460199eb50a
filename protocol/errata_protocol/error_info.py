"""Error information in an observation's metadata: how and where an action failed, in the form that is proposed to
OpenEnv (rfcs/proposals/b-error-information.md, PROTOCOL B5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

KEY = "error_info"
"""Key of an observation's ``metadata`` under which error information stands."""

MAX_MESSAGE = 300
"""Most code points of a message; a longer one is cut."""

MAX_TEXT = 1000
"""Most code points of a kind, which is cut, and of a name in a site, which is left out."""

MAX_SITES = 16
"""Most sites; those behind them are left out."""

_MAX_LINE = 2**53
"""Largest integer that every reader of JSON has."""


class InfoSite(BaseModel):
    """Place where an action failed. What cannot be right is left out: a wrong place is worse than none.

    Attributes:
        action_field: Name of the action's field that is wrong.
        action_span: Half-open ``[start, end)`` in Unicode code points of that field.
        file: A file as the agent names it.
        line: 1-based line in ``file``.
        test_id: Failing test, as its runner prints it.
    """

    model_config = ConfigDict(frozen=True)

    action_field: str | None = None
    action_span: tuple[int, int] | None = None
    file: str | None = None
    line: int | None = None
    test_id: str | None = None

    @field_validator("action_field", "file", "test_id", mode="before")
    @classmethod
    def _name(cls, value: Any) -> str | None:
        return _text(value) if isinstance(value, str) and len(value) <= MAX_TEXT else None

    @field_validator("action_span", mode="before")
    @classmethod
    def _span(cls, value: Any) -> tuple[int, int] | None:
        if not isinstance(value, list | tuple) or len(value) != 2:
            return None
        start, end = value
        return (start, end) if _integer(start) and _integer(end) and 0 <= start <= end else None

    @field_validator("line", mode="before")
    @classmethod
    def _line(cls, value: Any) -> int | None:
        return value if _integer(value) and value >= 1 else None


class ErrorInfo(BaseModel):
    """How and where an action failed. What is too long is cut, never refused: it comes from output.

    Attributes:
        kind: A word of the proposal where one fits, else one of the environment's own; not empty.
        message: What says so, from the output that the agent was shown.
        sites: Places in the order of the output; one of which nothing is left is none.
    """

    model_config = ConfigDict(frozen=True)

    kind: str = Field(min_length=1)
    message: str = ""
    sites: tuple[InfoSite, ...] = Field(default=())

    @field_validator("kind", mode="before")
    @classmethod
    def _cut_kind(cls, kind: Any) -> Any:
        return _text(kind[:MAX_TEXT]) if isinstance(kind, str) else kind

    @field_validator("message", mode="before")
    @classmethod
    def _cut_message(cls, message: Any) -> str:
        if not isinstance(message, str):
            return ""
        return _text(message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "\u2026")

    @field_validator("sites", mode="before")
    @classmethod
    def _certain(cls, sites: Any) -> tuple[InfoSite, ...]:
        given = sites[:MAX_SITES] if isinstance(sites, list | tuple) else ()
        read = (InfoSite.model_validate(site) for site in given if isinstance(site, Mapping | InfoSite))
        return tuple(site for site in read if site != InfoSite())

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, without the fields that have their default."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def read(cls, metadata: Any) -> Self | None:
        """Return the error information in an observation's metadata, without what is not in this form; None where
        there is no kind or an empty one.

        Args:
            metadata: Metadata of an observation, decoded; any other value has none.
        """
        if not isinstance(metadata, Mapping):
            return None
        try:
            return cls.model_validate(metadata.get(KEY))
        except ValidationError:
            return None


def _text(value: str) -> str:
    return value.encode("utf-8", "replace").decode()  # a lone surrogate, as in the name of a file, has no JSON


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_LINE
