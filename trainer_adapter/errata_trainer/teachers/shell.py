"""One spelling for shell commands that differ only in blanks, quoting, comments and a needless ``cd``.

A lexer for Bash, not a parser: a command line becomes words and operators, each character of a word is known to be
literal or active, and the words are written back in one way. ``shlex`` cannot do this: it drops the quotes, so that
``echo $x`` and ``echo '$x'`` come out equal. What two spellings must share here is not their effect but what the shell
is told; flags are not sorted, and expansions are compared as they are written.

Whatever the lexer is not sure of it leaves as it stands: then two spellings of one command are different, which costs
a vote, and two commands are never the same.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

_OPERATORS = (
    "&>>", "<<-", "<<<", ";;&",
    "&&", "||", ";;", ";&", "|&", "&>", ">>", "<<", "<&", ">&", "<>", ">|",
    "|", "&", ";", "(", ")", "<", ">",
)  # fmt: skip
_REDIRECTIONS = frozenset({"&>>", "<<-", "<<<", "&>", ">>", "<<", "<&", ">&", "<>", ">|", "<", ">"})
_SPECIAL = frozenset("|&;()<>")
_RESERVED = frozenset(
    "if then else elif fi for while until do done case esac select function time coproc { } ! [[ ]]".split()  # noqa: SIM905
)
_ENDS_COMMAND = frozenset({"fi", "done", "esac", "}", "[["})
_ALONE = frozenset({"!", "time", "coproc"})
_BLANK = frozenset(" \t")
_SAFE = re.compile(r"[A-Za-z0-9_./:+@%^,\-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_DESCRIPTOR = re.compile(r"[0-9]+|\{[A-Za-z_][A-Za-z0-9_]*\}")
_EXPANSION_IN_DOUBLE = frozenset('$`"\\\n')


class Unreadable(ValueError):
    """The text is no complete command, or has a construct in which this lexer does not know what quotes mean."""


Mode = Literal["literal", "active", "quoted"]


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a word: literal characters, or what the shell acts on, outside or inside double quotes."""

    mode: Mode
    text: str


@dataclass(frozen=True, slots=True)
class _Word:
    parts: tuple[_Part, ...]

    @property
    def literal(self) -> str | None:
        """What the word is, None if the shell acts on a part of it."""
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
    """Return the one spelling of a Bash command. It is its own spelling, and is for comparing, not for running.

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
    """Tell whether three tokens are ``cd CWD &&``."""
    cd, target, joined = tokens
    if joined != _Operator("&&") or not isinstance(cd, _Word) or cd.literal != "cd" or not isinstance(target, _Word):
        return False
    path = target.literal
    return bool(path) and path != "-" and normal_path(str(path), cwd) == normal_path(cwd)


def normal_path(path: str, cwd: str | None = None) -> str:
    """Return ``path`` without ``.``, ``..`` and double slashes, absolute where ``cwd`` is known. Follows no link.

    Args:
        path: POSIX path; an empty one stays empty.
        cwd: Absolute directory that relative paths start from.
    """
    if not path:
        return path
    joined = posixpath.join(cwd, path) if cwd else path
    return re.sub(r"\A//+", "/", posixpath.normpath(joined))


class _Lexer:
    """Reads one text, once."""

    def __init__(self, text: str) -> None:
        if "\0" in text:
            raise Unreadable("a NUL character cannot stand in a command")
        self._text = text
        self._at = 0
        self._tokens: list[_Token] = []
        self._documents: list[tuple[str, bool]] = []  # those whose bodies begin at the next line: delimiter, tabs cut
        self._command_starts = True  # the next word can be reserved or an assignment
        self._command_is_open = False  # a newline would end it

    def tokens(self) -> list[_Token]:
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if char in _BLANK:
                self._at += 1
            elif text.startswith("\\\n", self._at):
                if text[self._at - 1 : self._at] in _SPECIAL and text[self._at + 2 : self._at + 3] in _SPECIAL:
                    raise Unreadable("a line is continued within an operator")
                self._at += 2
            elif char == "\n":
                self._newline()
            elif char == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif char in _SPECIAL and not self._substitutes_process():
                self._operator()
            else:
                self._word()
        if self._documents:
            raise Unreadable(f"the here-document {self._documents[0][0]!r} has no body")
        return self._tokens

    def _newline(self) -> None:
        self._at += 1
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
        while self._at < len(self._text):
            end = self._text.find("\n", self._at)
            line = self._text[self._at : end if end >= 0 else len(self._text)]
            self._at = end + 1 if end >= 0 else len(self._text)
            line = line.lstrip("\t") if tabs_cut else line
            if line == delimiter:
                return _HereDocument("".join(f"{line}\n" for line in lines), delimiter)
            lines.append(line)
        raise Unreadable(f"the here-document {delimiter!r} does not end")

    def _operator(self, descriptor: str = "") -> None:
        if self._command_starts and not descriptor and self._text.startswith("((", self._at):
            operator = "(("  # arithmetic, which "( (" is not
        else:
            operator = next(o for o in _OPERATORS if self._text.startswith(o, self._at))
        self._at += len(operator)
        self._tokens.append(_Operator(descriptor + operator))
        if operator in ("<<", "<<-"):
            self._skip_blanks()
            start = self._at
            self._word()
            word = self._tokens[-1]
            if not isinstance(word, _Word) or word.literal is None or self._at == start or "\n" in word.literal:
                raise Unreadable("a here-document has no plain delimiter")
            if "'" in word.literal:
                raise Unreadable("a here-document's delimiter has a quote in it")
            quoted = self._text[start : self._at] != word.literal  # then nothing expands in the body
            self._tokens[-1] = _Word((_Part("active", f"'{word.literal}'" if quoted else word.literal),))
            self._documents.append((word.literal, operator == "<<-"))
        elif operator not in _REDIRECTIONS:
            self._command_starts, self._command_is_open = True, operator == ")"

    def _skip_blanks(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in _BLANK:
            self._at += 1

    def _word(self) -> None:
        text, start = self._text, self._at
        parts: list[_Part] = []
        verbatim = False  # brackets, braces, homes: which characters are quoted decides what the others mean
        while self._at < len(text):
            char = text[self._at]
            if char in _BLANK or char == "\n" or (char in _SPECIAL and not self._substitutes_process()):
                break
            if text.startswith("\\\n", self._at):
                if text[self._at + 2 : self._at + 3] not in ("", " ", "\t", "\n"):
                    raise Unreadable("a line is continued within a word")
                break
            if not verbatim and (
                (char in "[{" and self._is_pattern(start)) or (char == "~" and _ASSIGNMENT.match(text, start, self._at))
            ):
                verbatim = True
            parts += self._part(start, bool(parts))
        source = text[start : self._at]
        if self._at < len(text) and text[self._at] in "<>" and _DESCRIPTOR.fullmatch(source):
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
        if verbatim:
            self._tokens.append(_Word((_Part("active", source),)))
        else:
            self._tokens.append(_Word(_joined(parts)))
        follows_redirection = len(self._tokens) > 1 and _redirects(self._tokens[-2])
        if self._command_starts and not follows_redirection and not _ASSIGNMENT.match(source):
            self._command_starts = False

    def _substitutes_process(self) -> bool:
        return self._text.startswith(("<(", ">("), self._at)

    def _is_pattern(self, start: int) -> bool:
        """Tell whether the bracket here makes a pattern of its word; ``[`` and ``{}`` alone are plain words."""
        rest = re.match(r"[^\s|&;()<>]*", self._text[self._at :])
        word = self._text[start : self._at] + (rest.group() if rest else "")
        return word not in ("[", "[[", "{", "{}")

    def _part(self, start: int, follows: bool) -> list[_Part]:
        """Read the piece of a word that begins here."""
        text, at = self._text, self._at
        char = text[at]
        if char == "\\":
            if at + 1 >= len(text):
                raise Unreadable("the text ends in a backslash")
            self._at += 2
            return [_Part("literal", text[at + 1])]
        if char == "'":
            end = text.find("'", at + 1)
            if end < 0:
                raise Unreadable("a single quote is not closed")
            self._at = end + 1
            return [_Part("literal", text[at + 1 : end])]
        if char == '"':
            return self._double_quoted()
        end = _closed(text, at + 2, ")", False) if char in "<>" else _expansion_end(text, at, in_double=False)
        if end > at:
            self._at = end
            return [_Part("active", text[at:end])]
        if char == "~" and not follows:
            end = at + 1
            while end < len(text) and (text[end].isalnum() or text[end] in "_-.+"):
                end += 1
            self._at = end
            return [_Part("active", text[at:end])]
        self._at += 1
        if char in "*?":
            return [_Part("active", char)]
        if char == "=" and self._command_starts and _ASSIGNMENT.fullmatch(text, start, self._at):
            return [_Part("active", text[start : self._at])]  # `_joined` drops the name, which is written twice then
        return [_Part("literal", char)]

    def _double_quoted(self) -> list[_Part]:
        text, at = self._text, self._at + 1
        parts = [_Part("literal", "")]
        while at < len(text):
            char = text[at]
            if char == '"':
                self._at = at + 1
                return parts
            if char == "\\" and at + 1 < len(text) and text[at + 1] in _EXPANSION_IN_DOUBLE:
                if text[at + 1] == "\n":
                    raise Unreadable("a line is continued within a word")
                parts.append(_Part("literal", text[at + 1]))
                at += 2
            elif (end := _expansion_end(text, at, in_double=True)) > at:
                parts.append(_Part("quoted", text[at:end]))
                at = end
            else:
                parts.append(_Part("literal", char))
                at += 1
        raise Unreadable("a double quote is not closed")


def _redirects(token: _Token) -> bool:
    return isinstance(token, _Operator) and token.text.lstrip("0123456789") in _REDIRECTIONS


def _joined(parts: list[_Part]) -> tuple[_Part, ...]:
    """Join neighbouring literal parts, and put an assignment's name in front of its ``=`` only once.

    Empty quotes are kept beside a bare expansion only: ``$x''`` is a word even where ``$x`` is none.
    """
    for number, part in enumerate(parts):
        if part.mode == "active" and _ASSIGNMENT.fullmatch(part.text):
            parts = parts[number:]
            break
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


_CLOSES = {"(": ")", "{": "}"}


def _expansion_end(text: str, at: int, *, in_double: bool) -> int:
    """Return where the expansion that begins at ``at`` ends; ``at`` itself where none begins.

    Raises:
        Unreadable: It does not end.
    """
    if text[at] == "`":
        return _closed(text, at + 1, "`", in_double)
    if text[at] != "$" or at + 1 >= len(text):
        return at
    following = text[at + 1]
    if following in _CLOSES:
        return _closed(text, at + 2, _CLOSES[following], in_double)
    if following == "'" and not in_double:
        return _closed(text, at + 2, "$'", in_double)
    if following == '"' and not in_double:
        return _closed(text, at + 2, '"', in_double)
    if name := _NAME.match(text, at + 1):
        return name.end()
    return at + 2 if following in "0123456789@*#?$!-" else at


def _closed(text: str, at: int, first: str, in_double: bool) -> int:
    """Return the position behind the closer of an opened expansion; quotes and nested expansions are stepped over."""
    open_: list[str] = [first]
    while at < len(text):
        char, closer = text[at], open_[-1]
        step = 1
        if char == "\\":
            step = 2
        elif closer == "$'":
            if char == "'":
                open_.pop()
        elif char == closer:
            open_.pop()
        elif closer == "`":
            pass
        elif char == "$" and text[at + 1 : at + 2] in _CLOSES:
            open_.append(_CLOSES[text[at + 1]])
            step = 2
        elif text.startswith("$'", at) and not _quote_is_plain(open_, in_double):
            open_.append("$'")
            step = 2
        elif char == "`":
            open_.append("`")
        elif closer == '"':
            pass
        elif char == '"':
            open_.append('"')
        elif char == "'" and not _quote_is_plain(open_, in_double):
            end = text.find("'", at + 1)
            if end < 0:
                break
            step = end + 1 - at
        elif char == "(" and closer == ")":
            open_.append(")")
        at += step
        if not open_:
            return min(at, len(text))
    raise Unreadable("an expansion is not closed")


def _quote_is_plain(open_: list[str], in_double: bool) -> bool:
    """Tell whether a single quote is a character like others: within ``"${…}"``."""
    for closer in reversed(open_):
        if closer == ")":
            return False
        if closer == '"':
            return True
    return in_double
