"""The syntax tree of a shell action: words, simple commands, pipelines and lists, with spans in code points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Word:
    """One shell word.

    Args:
        start: First code point in the action.
        end: One past the last code point, quotes included.
        value: The word after quote removal; expansions are kept as written.
        literal: Whether nothing in the word is expanded.
        inner: Span without the quotes if the word is one quoted string, else of the whole word.
    """

    start: int
    end: int
    value: str
    literal: bool
    inner: tuple[int, int]


@dataclass(slots=True)
class Redirect:
    """One redirection. ``target`` is the file, delimiter or string; ``body`` the span of a here-document's lines.

    Not frozen, because the body of a here-document is only known after the rest of its line was read.
    """

    operator: str
    target: Word | None
    body: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Simple:
    """A simple command, also ``[[ ]]`` and ``(( ))``. ``inside`` has its command substitutions, in order."""

    start: int
    end: int
    words: tuple[Word, ...]
    assignments: tuple[Word, ...] = ()
    redirects: tuple[Redirect, ...] = ()
    inside: tuple[Sequence, ...] = ()


@dataclass(frozen=True, slots=True)
class Compound:
    """A compound command. ``keyword`` is one of ``( { if for while until case select``, or ``function``, which has a
    ``name``.

    ``conditions`` are the lists that are tested, ``bodies`` the lists that may run last.
    """

    start: int
    end: int
    keyword: str
    bodies: tuple[Sequence, ...]
    conditions: tuple[Sequence, ...] = ()
    redirects: tuple[Redirect, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by ``|``; ``negated`` after ``!``."""

    commands: tuple[Simple | Compound, ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One pipeline of a list, and the connector before it: ``""`` for the first, else ``; & && ||`` or a newline."""

    connector: str
    pipeline: Pipeline


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list of pipelines."""

    steps: tuple[Step, ...] = ()


def simples(node: Sequence | Simple | Compound) -> Iterator[Simple]:
    """Yield all simple commands in the order written; those in substitutions come before the command that contains
    them."""
    if isinstance(node, Simple):
        for inner in node.inside:
            yield from simples(inner)
        yield node
        return
    if isinstance(node, Compound):
        for inner in (*node.conditions, *node.bodies):
            yield from simples(inner)
        return
    for step in node.steps:
        for command in step.pipeline.commands:
            yield from simples(command)
