"""What a recipe is: a command, the files it needs and the answer a person gave to it."""

from __future__ import annotations

from dataclasses import dataclass, field

Span = str | tuple[str, int]
"""Text of the command, or that text and which of its occurrences (0-based) is meant."""

WHOLE = "<the whole action>"
"""The span of an error that belongs to no single word."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where the error is, in texts; the recorder turns them into numbers, so a span cannot be off by one."""

    span: Span | None = None
    file: str | None = None
    line: int | None = None
    at: str | None = None
    """Text of the only line of ``file`` that is meant, instead of ``line``."""
    test: str | None = None
    where: str | None = None
    """Path of the file below the cwd when it differs from the name that the output prints."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Files that several recipes start from."""

    files: dict[str, str] = field(default_factory=dict)
    setup: str = ""
    """Shell commands run in the cwd, as the unprivileged user, before the recipe's own set-up."""
    root: str = ""
    """Name of a root file system in the recorder's ``--roots``, whose ``/testbed`` is the repository to begin with."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One command and its label."""

    command: str
    kind: str | None
    sites: tuple[Site, ...] = ()
    """The first is the expected site, the others are also right. Empty: the site is not measured."""
    tree: str = "shop"
    files: dict[str, str] = field(default_factory=dict)
    setup: str = ""
    cwd: str = "/workspace"
    limit_s: float = 30
    also: tuple[str, ...] = ()
    ambiguous: bool = False


def row(
    command: str,
    kind: str | None,
    *sites: Site,
    tree: str = "shop",
    files: dict[str, str] | None = None,
    setup: str = "",
    cwd: str = "/workspace",
    limit_s: float = 30,
    also: tuple[str, ...] = (),
    ambiguous: bool = False,
) -> Recipe:
    """Build a recipe with its sites as positional arguments, the way the lists beside this file read best."""
    return Recipe(command, kind, sites, tree, files or {}, setup, cwd, limit_s, also, ambiguous)
