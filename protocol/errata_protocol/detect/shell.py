"""Parses a shell action into simple commands, pipelines and lists, with spans in code points of the action.

The detectors need to know which word a message is about and which command decided the exit status. A regular expression
on the action's text cannot distinguish `grep` in a quoted string from `grep` at the end of a pipeline. This parser
accepts the part of bash that agents write. It never raises, not even for half a script, and reads the text once.

Left out on purpose: aliases, arithmetic, and the results of expansions. A word keeps its expansions as written, and is
then not ``literal``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from errata_protocol.detect.shell_tree import Compound, Pipeline, Redirect, Sequence, Simple, Step, Word
from errata_protocol.detect.shell_words import BLANK, LIST_OPERATORS, MAX_DEPTH, OPERATORS, REDIRECTIONS, WordReader

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}(?:\[[^\]\s]{0,255}\])?\+?=")
_LIST_STOPS = frozenset({"then", "do", "done", "fi", "else", "elif", "esac", "}"})


def parse(text: str, start: int = 0, end: int | None = None) -> Sequence:
    """Parse a script, or the part ``[start, end)`` of one; spans count from the beginning of ``text`` either way.

    Args:
        text: The action.
        start: First code point to read.
        end: One past the last one; None for the end of the text.

    Returns:
        The list of pipelines; empty for an empty text.
    """
    return ShellReader(text, start, len(text) if end is None else end).script()


@dataclass(slots=True)
class _Parts:
    """The parts of a simple command that were read so far."""

    words: list[Word] = field(default_factory=list)
    assignments: list[Word] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)
    inside: list[Sequence] = field(default_factory=list)


class ShellReader(WordReader):
    """A recursive-descent parser of one text. ``pos`` only grows, which makes the time linear."""

    def __init__(self, text: str, start: int, end: int) -> None:
        super().__init__(text, start, end)
        self.pending: list[Redirect] = []

    def script(self) -> Sequence:
        steps: list[Step] = []
        while self.pos < self.end:
            steps.extend(self.sequence(frozenset(), "").steps)
            if self.pos < self.end:  # a stray terminator: `)`, `}` or `done` without its opening
                self.pos += 1
        return Sequence(tuple(steps))

    # Lists and pipelines

    def sequence(self, stops: frozenset[str], closing: str) -> Sequence:
        """Read up to a reserved word of ``stops`` or to the character ``closing`` (neither is consumed)."""
        steps: list[Step] = []
        connector = ""
        while True:
            self.blanks(newlines=False)
            if self.pos >= self.end:
                break
            char = self.text[self.pos]
            if char == "\n":
                self.newline()
                connector = connector if connector in ("&&", "||") else "\n"
                continue
            if char == ")" or (closing and char == closing):
                break
            operator = self.operator_text() if char in ";&|" else ""  # `&>` starts a redirection, not a connector
            if operator:
                if operator in (";;", ";&", ";;&"):
                    break
                self.pos += len(operator)
                connector = operator
                continue
            if stops and self.reserved() in stops:
                break
            before = self.pos
            pipeline = self.pipeline(stops)
            if pipeline.commands:
                steps.append(Step(connector if steps else "", pipeline))
                connector = "\n"
            if self.pos == before:
                if self.reserved() in _LIST_STOPS and stops:
                    break
                self.pos += 1
        return Sequence(tuple(steps))

    def pipeline(self, stops: frozenset[str]) -> Pipeline:
        commands: list[Simple | Compound] = []
        negated = False
        while True:
            self.blanks(newlines=bool(commands))
            if self.pos >= self.end:
                break
            if not commands and self.reserved() == "!":
                negated = not negated
                self.pos += 1
                continue
            command = self.command(stops)
            if command is None:
                break
            commands.append(command)
            self.blanks(newlines=False)
            if self.operator_text() not in ("|", "|&"):
                break
            self.pos += len(self.operator_text())
        return Pipeline(tuple(commands), negated)

    def operator_text(self) -> str:
        for operator in LIST_OPERATORS:
            if self.text.startswith(operator, self.pos) and self.pos + len(operator) <= self.end:
                return "" if operator == "&" and self.text.startswith("&>", self.pos) else operator
        return ""

    def reserved(self) -> str:
        """Return the bare word at ``pos``, at most 8 characters; empty if it is quoted or longer, or if there is no
        word."""
        stop = self.pos
        while stop < self.end and stop - self.pos < 9 and (self.text[stop].isalpha() or self.text[stop] in "{}![("):
            stop += 1
        word = self.text[self.pos : stop]
        follows = self.text[stop : min(stop + 1, self.end)]
        return word if len(word) < 9 and (not follows or follows in BLANK + OPERATORS) else ""

    # Commands

    def command(self, stops: frozenset[str]) -> Simple | Compound | None:
        start, text = self.pos, self.text
        if text.startswith("((", start):
            return self.arithmetic(start)
        word = self.reserved()
        if self.depth < MAX_DEPTH:
            self.depth += 1
            try:
                if text[start] == "(":
                    self.pos += 1
                    return self.group(start, "(", ")")
                if word == "{":
                    self.pos += 1
                    return self.group(start, "{", "}")
                if word == "if":
                    return self.branches(start)
                if word in ("while", "until"):
                    self.pos += len(word)
                    condition = self.sequence(frozenset({"do"}), "")
                    return self.loop(start, word, (condition,))
                if word in ("for", "select"):
                    return self.iteration(start, word)
                if word == "case":
                    return self.case(start)
                if word == "function":
                    self.pos += len(word)
                    self.blanks(newlines=False)
                    name = self.word([]).value
                    return self.function(start, name)
            finally:
                self.depth -= 1
        if word in _LIST_STOPS and (stops or word != "}"):
            return None
        return self.simple(start)

    def simple(self, start: int) -> Simple | Compound | None:
        parts = _Parts()
        while True:
            self.blanks(newlines=False)
            if self.pos >= self.end:
                break
            char = self.text[self.pos]
            if char in "<>" or self.text.startswith("&>", self.pos) or self.digit_redirect():
                if char in "<>" and self.text.startswith("(", self.pos + 1) and self.depth < MAX_DEPTH:
                    parts.words.append(self.word(parts.inside))
                    continue
                self.redirect(parts.redirects, parts.inside)
                continue
            if char == "(" and len(parts.words) == 1 and not parts.assignments and self.depth < MAX_DEPTH:
                close = self.pos + 1
                while close < self.end and self.text[close] in BLANK:
                    close += 1
                if self.text.startswith(")", close):
                    self.pos = close + 1
                    return self.function(start, parts.words[0].value)
            if char in OPERATORS:
                break
            word = self.word(parts.inside)
            if not parts.words and _is_assignment(word, self.text):
                parts.assignments.append(word)
                if self.text.startswith("(", self.pos) and self.text[self.pos - 1] == "=":
                    self.balanced()
            else:
                parts.words.append(word)
                if word.value == "[[" and len(parts.words) == 1:
                    self.conditional(parts)
        if not (parts.words or parts.assignments or parts.redirects):
            return None
        ends = [w.end for w in (*parts.words, *parts.assignments)] + [r.target.end for r in parts.redirects if r.target]
        end = max(ends, default=self.pos)
        return Simple(
            start, end, tuple(parts.words), tuple(parts.assignments), tuple(parts.redirects), tuple(parts.inside)
        )

    def conditional(self, parts: _Parts) -> None:
        """Read everything up to ``]]`` as words: ``&& || ( ) < >`` have no special meaning inside ``[[ ]]``."""
        while self.pos < self.end and self.text[self.pos] != "\n":
            self.blanks(newlines=False)
            if self.pos >= self.end or self.text[self.pos] == "\n":
                break
            if self.text[self.pos] in OPERATORS:
                parts.words.append(self.plain(self.pos, self.pos + 1))
                self.pos += 1
                continue
            word = self.word(parts.inside)
            parts.words.append(word)
            if word.value == "]]":
                break

    def arithmetic(self, start: int) -> Simple:
        self.balanced()
        return Simple(start, self.pos, (self.plain(start, start + 2), self.plain(start, self.pos)))

    def plain(self, start: int, end: int) -> Word:
        return Word(start, end, self.text[start:end], True, (start, end))

    def group(self, start: int, keyword: str, closing: str) -> Compound:
        body = self.sequence(frozenset({"}"}) if keyword == "{" else frozenset(), closing if keyword == "(" else "")
        if self.text.startswith(closing, self.pos) and self.pos < self.end:
            self.pos += 1
        return self.finish(start, keyword, (body,))

    def branches(self, start: int) -> Compound:
        conditions: list[Sequence] = []
        bodies: list[Sequence] = []
        while True:
            word = self.reserved()
            if word in ("if", "elif"):
                self.pos += len(word)
                conditions.append(self.sequence(frozenset({"then"}), ""))
            elif word in ("then", "else"):
                self.pos += len(word)
                bodies.append(self.sequence(frozenset({"elif", "else", "fi"}), ""))
            else:
                self.pos += len(word) if word == "fi" else 0
                return self.finish(start, "if", tuple(bodies), tuple(conditions))

    def iteration(self, start: int, keyword: str) -> Compound:
        self.pos += len(keyword)
        parts = _Parts()
        self.blanks(newlines=False)
        if self.text.startswith("((", self.pos):
            self.balanced()
        while self.pos < self.end and self.text[self.pos] not in ";\n&|)":
            if self.text[self.pos] in "<>(":
                self.pos += 1
            else:
                parts.words.append(self.word(parts.inside))
            self.blanks(newlines=False)
        head = Sequence((Step("", Pipeline((Simple(start, start, tuple(parts.words), inside=tuple(parts.inside)),))),))
        self.sequence(frozenset({"do"}), "")
        return self.loop(start, keyword, (head,) if parts.inside else ())

    def loop(self, start: int, keyword: str, conditions: tuple[Sequence, ...]) -> Compound:
        if self.reserved() == "do":
            self.pos += 2
        body = self.sequence(frozenset({"done"}), "")
        if self.reserved() == "done":
            self.pos += 4
        return self.finish(start, keyword, (body,), conditions)

    def case(self, start: int) -> Compound:
        self.pos += 4
        parts = _Parts()
        bodies: list[Sequence] = []
        self.blanks(newlines=False)
        if self.pos < self.end and self.text[self.pos] not in OPERATORS:
            self.word(parts.inside)
        self.blanks(newlines=True)
        if self.reserved() == "in":
            self.pos += 2
        while self.pos < self.end:
            self.blanks(newlines=True)
            if self.reserved() == "esac":
                self.pos += 4
                break
            while self.pos < self.end and self.text[self.pos] not in ")\n":
                if self.text[self.pos] in OPERATORS + BLANK:
                    self.pos += 1
                else:
                    self.word(parts.inside)
            self.pos = min(self.pos + 1, self.end)
            bodies.append(self.sequence(frozenset({"esac"}), ""))
            self.pos += len(self.operator_text())
        return self.finish(start, "case", tuple(bodies), tuple(parts.inside))

    def function(self, start: int, name: str) -> Compound:
        self.blanks(newlines=True)
        if self.text.startswith("()", self.pos):
            self.pos += 2
            self.blanks(newlines=True)
        body = self.command(frozenset()) if self.pos < self.end and self.text[self.pos] in "{(" else None
        bodies = (Sequence((Step("", Pipeline((body,))),)),) if body else ()
        return Compound(start, self.pos, "function", bodies, name=name)

    def finish(
        self, start: int, keyword: str, bodies: tuple[Sequence, ...], conditions: tuple[Sequence, ...] = ()
    ) -> Compound:
        redirects: list[Redirect] = []
        inside: list[Sequence] = []
        self.blanks(newlines=False)
        while self.pos < self.end and (
            self.text[self.pos] in "<>" or self.text.startswith("&>", self.pos) or self.digit_redirect()
        ):
            self.redirect(redirects, inside)
            self.blanks(newlines=False)
        return Compound(start, self.pos, keyword, bodies, (*conditions, *inside), tuple(redirects))

    # Redirections and here-documents

    def digit_redirect(self) -> bool:
        stop = self.pos
        while stop < self.end and stop - self.pos < 4 and self.text[stop].isdigit():
            stop += 1
        return self.pos < stop < self.end and self.text[stop] in "<>"

    def redirect(self, out: list[Redirect], inside: list[Sequence]) -> None:
        start = self.pos
        while self.pos < self.end and self.text[self.pos].isdigit():
            self.pos += 1
        for operator in REDIRECTIONS:
            if self.text.startswith(operator, self.pos):
                self.pos = min(self.pos + len(operator), self.end)
                break
        operator = self.text[start : self.pos]
        self.blanks(newlines=False)
        target = None
        if self.pos < self.end and (self.text[self.pos] not in OPERATORS or self.text[self.pos] in "<>"):
            before = self.pos
            target = (
                self.word(inside)
                if self.text[self.pos] not in "<>" or self.text.startswith("(", self.pos + 1)
                else None
            )
            self.pos = max(self.pos, before)
        out.append(Redirect(operator, target))
        if target is not None and operator.lstrip("0123456789") in ("<<", "<<-"):
            self.pending.append(out[-1])

    def newline(self) -> None:
        """Skip a newline and the here-documents that were announced before it."""
        self.pos += 1
        pending, self.pending = self.pending, []
        for document in pending:
            delimiter = document.target.value if document.target else ""
            start = self.pos
            while True:
                stop = self.text.find("\n", self.pos, self.end)
                line_end = self.end if stop < 0 else stop
                line = self.text[self.pos : line_end]
                found = (line.lstrip("\t") if document.operator.endswith("-") else line) == delimiter
                body_end = self.pos
                self.pos = self.end if stop < 0 else stop + 1
                if found or self.pos >= self.end:
                    document.body = (start, body_end if found else self.end)
                    break


def _is_assignment(word: Word, text: str) -> bool:
    return _ASSIGNMENT.match(text, word.start, word.end) is not None
