"""Hint templates by hint template key, read from TOML files, with variants; and `TemplateHinter`, which fills them.

A file has a table for each key. ``texts`` are variants in order of preference: the first whose slots can all be filled
is used. The last one has no slots, so there is always a text::

    ["fs.missing"]
    texts = ["`{file}` does not exist. List its directory first.", "List the directory before you name a file in it."]

Files directly in a directory are for all environments. Files in a subdirectory are for the environment of that name,
and their variants are tried first. Later directories take precedence over earlier ones.
"""

from __future__ import annotations

import hashlib
import json
import string
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from errata_protocol.markers import HINT_TEMPLATE_KEYS, ErrorKind

from .hint import FailedTurn, Hint
from .leaks import leaks, secrets_of
from .neutral import Count, approximate_tokens, neutral
from .slots import slots_of

GROUP = "errata.hints"
"""Entry points of packages that bring templates: a directory as a path or `Traversable`, or a function returning it."""

FRAME = "Hint for your next action: {hint}"
"""How every hint begins, so that a teacher tells it from a user's wish."""


@dataclass(frozen=True, slots=True)
class HintPack:
    """Templates of one version.

    Attributes:
        templates: Variants by environment (``""`` is for all) and key.
        version: Number of the format and a hash of all texts, so that other texts have another version.
    """

    templates: Mapping[str, Mapping[str, tuple[str, ...]]]
    version: str

    @classmethod
    def load(cls, *directories: Traversable, installed: bool = True) -> HintPack:
        """Load the shipped templates, those of installed packages, and further directories.

        Args:
            *directories: Further directories, e.g. of type `pathlib.Path`. Each takes precedence over those before it.
            installed: Whether to load also the templates that packages offer under the entry point group `GROUP`.

        Raises:
            ValueError: A file is not of the form above; the message names it.
            OSError: A directory is not there or cannot be read.
        """
        found: list[Traversable] = [files(__package__) / "templates"]
        if installed:
            for point in sorted(entry_points(group=GROUP), key=lambda one: one.name):
                value = point.load()
                found.append(value() if callable(value) else value)
        templates: dict[str, dict[str, tuple[str, ...]]] = {}
        for directory in [*found, *directories]:
            for environment, key, texts in _read(directory):
                table = templates.setdefault(environment, {})
                table[key] = (*texts, *(text for text in table.get(key, ()) if text not in texts))
        digest = hashlib.sha256(json.dumps(templates, sort_keys=True).encode()).hexdigest()
        return cls(templates, f"1+{digest[:12]}")

    def variants(self, key: str, environment: str | None = None) -> tuple[str, ...]:
        """Return the variants for a key in order of preference; empty if the key is unknown."""
        own = self.templates.get(environment or "", {}).get(key, ()) if environment else ()
        return (*own, *self.templates.get("", {}).get(key, ()))


@dataclass(slots=True)
class TemplateHinter:
    """Writes hints from templates.

    Args:
        pack: Templates to fill.
        max_tokens: Most tokens of a hint, the frame included.
        count: Returns the number of tokens of a text; the default counts rather too many. `HintRenderer.count` is
            exact.
        secrets: Returns the texts of a task that a hint must not reveal; by default those of fields that hold solutions
            or tests.

    Attributes:
        counts: Number of hints by key, and of turns without one by reason (``none:no_error``, ``none:no_template``,
            ``none:leak``, ``none:over_budget``).
    """

    pack: HintPack = field(default_factory=HintPack.load)
    max_tokens: int = 160
    count: Count = approximate_tokens
    secrets: Callable[[Mapping[str, Any]], Iterable[str]] = secrets_of
    counts: Counter[str] = field(default_factory=Counter)

    def hint(self, failed: FailedTurn) -> Hint | None:
        """Return the first variant that can be filled, fits the budget and reveals no secret."""
        key = key_of(failed)
        if key is None:
            self.counts["none:no_error"] += 1
            return None
        variants = self.pack.variants(key, failed.rollout.environment)
        why = "no_template"
        values, secrets = slots_of(failed), list(self.secrets(failed.rollout.task))
        for text in variants:
            if not slots_in(text) <= values.keys():
                continue
            shown = FRAME.format(hint=text.format_map(values))
            if leaks(shown, secrets):
                why = "leak"
            elif self.count(shown) > self.max_tokens:
                why = "over_budget"
            else:
                self.counts[key] += 1
                return Hint(shown, key, self.pack.version, "template")
        self.counts[f"none:{why}"] += 1
        return None


def key_of(failed: FailedTurn) -> str | None:
    """Return the hint template key of a failing turn; None if nothing failed."""
    marker = failed.marker
    if marker is None:
        return None
    if marker.hint_template_key:
        return marker.hint_template_key
    kinds: Sequence[str] = tuple(ErrorKind)
    if marker.error_kind in kinds:
        return HINT_TEMPLATE_KEYS[ErrorKind(marker.error_kind)]
    return marker.error_kind


def slots_in(text: str) -> set[str]:
    """Return the names of the slots in a template.

    Raises:
        ValueError: Braces that do not match, or a slot with a conversion or a format.
    """
    names = set()
    for _, name, form, conversion in string.Formatter().parse(text):
        if name is not None:
            if form or conversion or not name.isidentifier():
                raise ValueError(f"a slot is a name in braces, not {{{name}!{conversion}:{form}}}, in {text!r}")
            names.add(name)
    return names


def _read(directory: Traversable) -> Iterable[tuple[str, str, tuple[str, ...]]]:
    for entry in sorted(directory.iterdir(), key=lambda one: one.name):
        if entry.is_dir():
            for inner in sorted(entry.iterdir(), key=lambda one: one.name):
                if inner.name.endswith(".toml"):
                    yield from _read_file(inner, entry.name)
        elif entry.name.endswith(".toml"):
            yield from _read_file(entry, "")


def _read_file(file: Traversable, environment: str) -> Iterable[tuple[str, str, tuple[str, ...]]]:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        for key, table in tables.items():
            texts = table["texts"]
            listed = isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)
            if table.keys() != {"texts"} or not listed:
                raise ValueError(f'["{key}"] has a list of strings, texts, and nothing else')
            for text in texts:
                slots_in(text)
            yield environment, key, tuple(texts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {error}") from error


def framed(text: str, max_chars: int) -> str:
    """Return a text of another origin in the frame of template hints, made safe by `neutral`."""
    return FRAME.format(hint=neutral(text, max_chars, lines=True))
