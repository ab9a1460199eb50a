"""`Labels`: what a trainer calls an episode, so that lists can have those of one prompt, one training step or one run.

They travel beside a reset's arguments and never among them (PROTOCOL D14, A8): the environment does not see them.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from msgspec import Struct

from .errors import InvalidRequest

HEADER = "X-Errata-Labels"
"""Header of a handshake or request that makes a plain session; its value is `Labels` as JSON."""

EXTENSION = "labels"
"""Name in ``extensions`` of a server that takes labels."""

VERSION = 2
"""Version of that extension. Since 2 a fork takes labels, too; a server with version 1 ignores those on a socket."""

MAX_LABEL = 128
"""Longest text of a label, in characters."""

MAX_HEADER = 4096
"""Longest value of the header, in bytes."""

MAX_STEP = 2**53 - 1

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class Labels(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, gc=False):
    """Labels of an episode; None leaves one out.

    Args:
        group: Rollouts that are compared with each other, such as those of one prompt in one training step: 1 to
            `MAX_LABEL` characters, none of them a control character.
        step: Training step, from 0.
        run: Training run, with the same characters as ``group``.

    Raises:
        ValueError: A label is not of this form.
    """

    group: str | None = None
    step: int | None = None
    run: str | None = None

    def __post_init__(self) -> None:
        """Check them; also called for those that were decoded."""
        for name, text in (("group", self.group), ("run", self.run)):
            if text is None:
                continue
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_LABEL or _CONTROL.search(text):
                raise ValueError(
                    f"the label {name} is a text of 1 to {MAX_LABEL} characters without control characters"
                )
        if self.step is not None and (type(self.step) is not int or not 0 <= self.step <= MAX_STEP):
            raise ValueError("the label step is an integer from 0 to 2^53 - 1")

    def updated(self, by: Labels) -> Labels:
        """Return these labels, with each one that ``by`` has in the place of the one here."""
        if not by:
            return self
        return Labels(
            group=self.group if by.group is None else by.group,
            step=self.step if by.step is None else by.step,
            run=self.run if by.run is None else by.run,
        )

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self.group is not None or self.step is not None or self.run is not None

    def header(self) -> str:
        """Return the value of the header: JSON in ASCII."""
        return json.dumps(msgspec.to_builtins(self), separators=(",", ":"))


NO_LABELS = Labels()


def labels_of(given: dict[str, Any]) -> Labels:
    """Return the labels in a decoded object.

    Raises:
        InvalidRequest: It is no object of labels.
    """
    try:
        return msgspec.convert(given, Labels)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"not the labels of an episode: {error}") from error
