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

MAX_SITES = 16
"""Most sites; those behind them are left out."""


class InfoSite(BaseModel):
    """Place where an action failed. Every field may be left out.

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


class ErrorInfo(BaseModel):
    """How and where an action failed. What is too long is cut, never refused: it comes from output.

    Attributes:
        kind: A word of the proposal where one fits, else one of the environment's own.
        message: What says so, from the output that the agent was shown.
        sites: Places in the order of the output.
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    message: str = ""
    sites: list[InfoSite] = Field(default_factory=list)

    @field_validator("message", mode="before")
    @classmethod
    def _cut_message(cls, message: Any) -> Any:
        if not isinstance(message, str):
            return message
        text = message.encode("utf-8", "replace").decode()  # Pydantic refuses lone surrogates
        return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "\u2026"

    @field_validator("sites", mode="before")
    @classmethod
    def _cut_sites(cls, sites: Any) -> Any:
        return list(sites)[:MAX_SITES] if isinstance(sites, list | tuple) else sites

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, without the fields that have their default."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def read(cls, metadata: Any) -> Self | None:
        """Return the error information in an observation's metadata; None where there is none, or none in this form.

        Args:
            metadata: Metadata of an observation, decoded; any other value has none.
        """
        if not isinstance(metadata, Mapping):
            return None
        try:
            return cls.model_validate(metadata.get(KEY))
        except ValidationError:
            return None
