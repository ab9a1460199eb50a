"""Canonical form of shell commands that differ only in blanks, quoting, comments and a redundant ``cd``.

A command line is split into words and operators by the detectors' reader (`errata_protocol.detect.shell`). For each
character of a word it is known whether it is literal or active, and the words are written in one form. ``shlex`` is not
enough: it drops the quotes, so that ``echo $x`` and ``echo '$x'`` come out equal. Two commands are equal if the shell
receives the same words; flags are not sorted, and expansions are compared as they are written.

A text that is incomplete or ambiguous is refused. Then two forms of one command may differ, which costs a vote, but two
different commands are never equal.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from errata_protocol.detect.shell import ShellReader
from errata_protocol.detect.shell_words import BLANK, LIST_OPERATORS, REDIRECTIONS, Piece

_OPERATORS = (*sorted((*LIST_OPERATORS, *REDIRECTIONS), key=len, reverse=True), "(", ")")
_REDIRECTIONS = frozenset(REDIRECTIONS)
_SPECIAL = frozenset("|&;()<>")
_RESERVED = frozenset(
    "if then else elif fi for while until do done case esac select function time coproc { } ! [[ ]]".split()  # noqa: SIM905
)
_ENDS_COMMAND = frozenset({"fi", "done", "esac", "}", "[["})
_ALONE = frozenset({"!", "time", "coproc"})
_SAFE = re.compile(r"[A-Za-z0-9_./:+@%^,\-]+")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_DESCRIPTOR = re.compile(r"[0-9]+|\{[A-Za-z_][A-Za-z0-9_]*\}")
_HOME = re.compile(r"~[\w.+-]*")


class Unreadable(ValueError):
    """The text is not a complete command, or uses quotes in a construct that this lexer does not know."""


Mode = Literal["literal", "active", "quoted"]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a word: literal characters, or active ones, outside or inside double quotes."""

    mode: Mode
    text: str


@dataclass(frozen=True, slots=True)
class _Word:
    parts: tuple[_Part, ...]

    @property
    def literal(self) -> str | None:
        """The literal value of the word; None if a part is active."""
        if all(part.mode == "literal" for part in self.parts):
            return "".join(part.text for part in self.parts)
        return None

    def __str__(self) -> str:
        written = []
        for number, part in enumerate(self.parts):
            if part.mode == "active":
                written.append(part.text)
            elif part.mode == "quoted":
                written.append(f'"{part.text}"')
            elif number == 0 and _SAFE.fullmatch(part.text) and part.text not in _RESERVED:
                written.append(part.text)
            else:
                written.append("'" + part.text.replace("'", "'\\''") + "'")
        return "".join(written) or "''"


@dataclass(frozen=True, slots=True)
class _Operator:
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class _HereDocument:
    body: str
    delimiter: str

    def __str__(self) -> str:
        return f"\n{self.body}{self.delimiter}\n"


_Token = _Word | _Operator | _HereDocument

_END_OF_DOCUMENT = _Operator("")
"""What ends the command behind a here-document: the document's own last line does."""


def canonical_shell(command: str, *, cwd: str | None = None) -> str:
    """Return the canonical form of a Bash command. It is for comparison, not for execution, and is its own canonical
    form.

    Args:
        command: Bash text, possibly several lines.
        cwd: The shell's absolute directory: a leading ``cd`` into it that is joined by ``&&`` is left out. None where
            it is not known.

    Raises:
        Unreadable: Nothing is known about such a text but its bytes.
    """
    tokens = _Lexer(command).tokens()
    while tokens and tokens[-1] in (_Operator(";"), _END_OF_DOCUMENT):
        tokens.pop()
    while cwd is not None and len(tokens) > 3 and _stays(tokens[:3], cwd):
        del tokens[:3]
    written: list[str] = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        on_a_line = before is not None and not isinstance(before, _HereDocument) and before != _END_OF_DOCUMENT
        written.append(f" {token}" if on_a_line and not isinstance(token, _HereDocument) else str(token))
    return "".join(written)


def _stays(tokens: list[_Token], cwd: str) -> bool:
    """Return whether three tokens are ``cd PATH &&`` and PATH is the working directory ``cwd``.

    PATH may be relative to ``cwd``, such as ``.``.
    """
    cd, target, joined = tokens
    if joined != _Operator("&&") or not isinstance(cd, _Word) or cd.literal != "cd" or not isinstance(target, _Word):
        return False
    path = target.literal
    return bool(path) and path != "-" and normal_path(str(path), cwd) == normal_path(cwd)


def normal_path(path: str, cwd: str | None = None) -> str:
    """Return ``path`` without ``.``, ``..`` and double slashes, absolute if ``cwd`` is known. Links are not followed.

    Args:
        path: POSIX path; an empty one stays empty.
        cwd: Absolute directory that relative paths start from.
    """
    if not path:
        return path
    joined = posixpath.join(cwd, path) if cwd else path
    return re.sub(r"\A//+", "/", posixpath.normpath(joined))


class _Lexer(ShellReader):
    """The reader of one text. It refuses what `ShellReader` accepts although it is incomplete."""

    def __init__(self, text: str) -> None:
        if "\0" in text:
            raise Unreadable("a NUL character cannot stand in a command")
        super().__init__(text, 0, len(text))
        self._tokens: list[_Token] = []
        self._documents: list[tuple[str, bool]] = []  # those whose bodies begin at the next line: delimiter, tabs cut
        self._command_starts = True  # the next word can be reserved or an assignment
        self._command_is_open = False  # a newline would end it

    def doubt(self, why: str) -> None:
        if self.depth == 0 or "continued" not in why:  # a nested command is compared as it is written
            raise Unreadable(why)

    def tokens(self) -> list[_Token]:
        text = self.text
        while self.pos < self.end:
            char = text[self.pos]
            if char in BLANK:
                self.pos += 1
            elif char == "#":
                end = text.find("\n", self.pos)
                self.pos = len(text) if end < 0 else end
            elif text.startswith("\\\n", self.pos):
                if text[self.pos - 1 : self.pos] in _SPECIAL and text[self.pos + 2 : self.pos + 3] in _SPECIAL:
                    raise Unreadable("a line is continued within an operator")
                self.pos += 2
            elif char == "\n":
                self._newline()
            elif char in _SPECIAL and not self._substitutes_process():
                self._operator()
            else:
                self._word()
        if self._documents:
            raise Unreadable(f"the here-document {self._documents[0][0]!r} has no body")
        return self._tokens

    def _newline(self) -> None:
        self.pos += 1
        if self._tokens and _redirects(self._tokens[-1]):
            raise Unreadable("a redirection has no target")
        if self._tokens and str(self._tokens[-1]) in _ALONE:
            raise Unreadable("a line ends in a word that means something else in front of a command")
        end = _END_OF_DOCUMENT if self._documents else _Operator(";")
        for delimiter, tabs_cut in self._documents:
            self._tokens.append(self._here_document(delimiter, tabs_cut))
        self._documents.clear()
        if self._command_is_open:
            self._tokens.append(end)
        self._command_starts, self._command_is_open = True, False

    def _here_document(self, delimiter: str, tabs_cut: bool) -> _HereDocument:
        lines: list[str] = []
        while self.pos < len(self.text):
            end = self.text.find("\n", self.pos)
            line = self.text[self.pos : end if end >= 0 else len(self.text)]
            self.pos = end + 1 if end >= 0 else len(self.text)
            line = line.lstrip("\t") if tabs_cut else line
            if line == delimiter:
                return _HereDocument("".join(f"{line}\n" for line in lines), delimiter)
            lines.append(line)
        raise Unreadable(f"the here-document {delimiter!r} does not end")

    def _operator(self, descriptor: str = "") -> None:
        if self._command_starts and not descriptor and self.text.startswith("((", self.pos):
            operator = "(("  # arithmetic, which "( (" is not
        else:
            operator = next(o for o in _OPERATORS if self.text.startswith(o, self.pos))
        self.pos += len(operator)
        self._tokens.append(_Operator(descriptor + operator))
        if operator in ("<<", "<<-"):
            self.blanks(newlines=False)
            start = self.pos
            self._word()
            word = self._tokens[-1]
            if not isinstance(word, _Word) or word.literal is None or self.pos == start or "\n" in word.literal:
                raise Unreadable("a here-document has no plain delimiter")
            if "'" in word.literal:
                raise Unreadable("a here-document's delimiter has a quote in it")
            quoted = self.text[start : self.pos] != word.literal  # then nothing expands in the body
            self._tokens[-1] = _Word((_Part("active", f"'{word.literal}'" if quoted else word.literal),))
            self._documents.append((word.literal, operator == "<<-"))
        elif operator not in _REDIRECTIONS:
            self._command_starts, self._command_is_open = True, operator == ")"

    def _word(self) -> None:
        text, start = self.text, self.pos
        pieces = self.pieces([])
        source = text[start : self.pos]
        if self.pos < len(text) and text[self.pos] in "<>" and _DESCRIPTOR.fullmatch(source):
            self._operator(source)
            return
        if source == "=~":
            raise Unreadable("in a regular expression quotes have a meaning of their own")
        if self._command_starts and source in _RESERVED:
            self._tokens.append(_Word((_Part("active", source),)))
            self._command_is_open = source in _ENDS_COMMAND  # behind the others another command starts
            self._command_starts = not self._command_is_open
            return
        self._command_is_open = True
        self._tokens.append(_Word(self._parts(pieces, source)))
        follows_redirection = len(self._tokens) > 1 and _redirects(self._tokens[-2])
        if self._command_starts and not follows_redirection and not _ASSIGNMENT.match(source):
            self._command_starts = False

    def _substitutes_process(self) -> bool:
        return self.text.startswith(("<(", ">("), self.pos)

    def _parts(self, pieces: list[Piece], source: str) -> tuple[_Part, ...]:
        """Return what a word is made of, as one active part where quoting one character changes what others mean."""
        plain = [piece for piece in pieces if piece.kind == "plain"]
        assigned = _ASSIGNMENT.match(source)
        if (source not in ("[", "[[", "{", "{}") and any("[" in p.value or "{" in p.value for p in plain)) or (
            assigned and any("~" in piece.value for piece in plain)
        ):
            return (_Part("active", source),)
        parts: list[_Part] = []
        if assigned and self._command_starts:
            parts.append(_Part("active", assigned.group()))
            first = pieces[0]
            pieces[0] = first._replace(value=first.value[assigned.end() :])
        for piece in pieces:
            written = self.text[piece.start : piece.end]
            if piece.kind == "plain":
                text = piece.value
                if not parts and (home := _HOME.match(text)):
                    parts.append(_Part("active", home.group()))
                    text = text[home.end() :]
                parts += [_Part("active" if run in "*?" else "literal", run) for run in re.split("([*?])", text) if run]
            elif piece.kind == "literal":
                parts.append(_Part("literal", piece.value))
            elif piece.kind == "quoted":
                parts.append(_Part("quoted", written))
            elif piece.kind != "continued":
                parts.append(_Part("literal", "$") if written == "$" else _Part("active", written))
        return _joined(parts)


def _redirects(token: _Token) -> bool:
    return isinstance(token, _Operator) and token.text.lstrip("0123456789") in _REDIRECTIONS


def _joined(parts: list[_Part]) -> tuple[_Part, ...]:
    """Join adjacent literal parts.

    Empty quotes are kept beside a bare expansion only: ``$x''`` is a word even where ``$x`` is none.
    """
    has_active = any(part.mode == "active" for part in parts)
    joined: list[_Part] = []
    for mode, neighbours in groupby(parts, key=lambda part: part.mode):
        if mode != "literal":
            joined += neighbours
        else:
            joined.append(_Part("literal", "".join(part.text for part in neighbours)))
    around = [None, *(part.mode for part in joined), None]
    return tuple(
        part
        for part, left, right in zip(joined, around, around[2:], strict=False)
        if part.text or (has_active and "quoted" not in (left, right))
    )
