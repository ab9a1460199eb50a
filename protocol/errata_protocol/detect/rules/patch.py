"""Rules for edits that did not apply: patches, merges, replacements."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from errata_protocol.detect.benign import git_subcommand
from errata_protocol.detect.place import Span, relative_file, site
from errata_protocol.detect.rules.rule import Finding, Rule
from errata_protocol.detect.shell_tree import Word
from errata_protocol.detect.turn import Turn
from errata_protocol.markers import ErrorKind, ErrorSite

_GIT_HUNK = re.compile(r"^error: patch failed: (?P<file>.+):(?P<line>\d+)$")
_GIT_FILE = re.compile(
    r"^error: (?P<file>[^:]+): (?:patch does not apply|already exists in (?:working directory|index)|"
    r"does not exist in index|"
    r"does not match index|wrong type|has type \d+, expected)"
)
_GIT_NO_FILE = re.compile(r"^error: (?!can't open patch )(?P<file>[^:]+): No such file or directory$")
_PATCH_TEXT = re.compile(
    r"(?:corrupt patch at (?:(?P<file>[^:\s]+):|line )(?P<line>\d+))|(?:malformed patch at line (?P<malformed>\d+))|"
    r"(?:patch fragment without header at (?:line |\S+:)(?P<fragment>\d+))|No valid patches|"
    r"Only garbage was found in the patch|"
    r"patch unexpectedly ends|git diff header lacks filename .*\(line (?P<header>\d+)\)|git diff header lacks filename|"
    r"unable to find filename in patch at (?:line |\S+:)(?P<unnamed>\d+)|Patch format detection failed|"
    r"unrecognized input$|cannot apply binary patch"
)
_PATCHING = re.compile(r"^(?:patching|checking) file '?(?P<file>.+?)'?(?: \(.*\))?$")
_HUNK = re.compile(r"^Hunk #\d+ (?:FAILED|ignored|NOT MERGED) at (?P<line>\d+)|^Hunk #\d+ (?:FAILED|ignored)")
_HUNKS = re.compile(r"^\d+ out of \d+ hunks? (?:FAILED|ignored)")
_REVERSED = re.compile(r"^(?:Reversed \(or previously applied\)|Unreversed) patch detected")
_NO_TARGET = re.compile(r"^can't find file to patch at input line (?P<line>\d+)")
_OLD_NAME = re.compile(r"^\|(?:---|\+\+\+) (?P<file>[^\t]+)")
_CONFLICT = re.compile(r"^CONFLICT \((?P<type>[^)]*)\): (?:Merge conflict in (?P<file>.+)|(?P<first>\S+) )")
_WITH_CONFLICTS = re.compile(r"^Applied patch to '?(?P<file>.+?)'? with conflicts")
_NOT_APPLIED = re.compile(
    r"could not apply [0-9a-f]{4,40}|^Patch failed at \d+|^error: could not (?:apply|revert)|^Automatic merge failed"
)
_REPLACEMENT = re.compile(
    r"No replacement was performed|old_str(?:ing)? .*(?:not found|not unique|did not appear)|"
    r"no match(?:es)? for (?:old|search) (?:string|block)",
    re.IGNORECASE,
)
_IN_FILE = re.compile(r"\bin (?:the )?(?:file )?[`'\"]?(?P<file>[\w./~-]*\w\.\w+|/[\w./-]+)[`'\"]?(?=[\s.,:;)]|$)")


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of a program that take a value.

    Args:
        short: Letters of the short options.
        long: The long options whose value may be the next word.
        file: Those of all options whose value is the patch file.
    """

    short: str
    long: frozenset[str]
    file: frozenset[str] = frozenset()


_PATCH_OPTIONS = _Options(
    short="BDFVYdgioprxz",
    long=frozenset(
        (
            *("--strip", "--fuzz", "--input", "--output", "--reject-file", "--ifdef", "--version-control", "--prefix"),
            *("--basename-prefix", "--suffix", "--get", "--directory", "--quoting-style", "--reject-format"),
            *("--read-only", "--debug"),
        )
    ),
    file=frozenset(("-i", "--input")),
)
_GIT_OPTIONS = _Options(
    short="Cp",
    long=frozenset(
        (
            *("--exclude", "--include", "--directory", "--whitespace", "--build-fake-ancestor", "--patch-format"),
            *("--quoted-cr", "--empty"),
        )
    ),
)


def _patch(turn: Turn) -> Finding | None:
    if not turn.mentions(
        "patch",
        "hunk",
        "conflict (",
        "could not apply",
        "could not revert",
        "replacement",
        "old_str",
        "already exists in",
        "merge failed",
        "index",
        "no such file",
        "search",
        "wrong type",
    ):
        return None
    found: list[ErrorSite] = []
    fired = False
    file: str | None = None
    applies = any(c.program == "git" and git_subcommand(c)[0] in ("apply", "am") for c in turn.action.invocations)
    lines = turn.reported
    for index, line in enumerate(lines):
        match = _PATCHING.match(line)
        if match:
            file = match.group("file")
            continue
        sites = _sites(turn, line, file, lines[index : index + 12], applies=applies)
        if sites is not None:
            fired = True
            found.extend(sites)
    if not fired:
        return None
    return Finding(tuple(dict.fromkeys(found))[:20])


def _sites(turn: Turn, line: str, file: str | None, ahead: tuple[str, ...], *, applies: bool) -> list[ErrorSite] | None:
    """Return the sites of one line, None if it does not report a failed edit."""
    if match := _GIT_HUNK.match(line):
        return [site(line, file=relative_file(turn, match.group("file")), number=int(match.group("line")))]
    if match := _GIT_FILE.match(line) or (_GIT_NO_FILE.match(line) if applies else None):
        return [site(line, file=relative_file(turn, match.group("file")))]
    if match := _PATCH_TEXT.search(line):
        groups = ("line", "malformed", "fragment", "header", "unnamed")
        number = next((match.group(group) for group in groups if match.group(group)), None)
        span = _patch_argument(turn)
        return [site(line, span=span, number=int(number) if number else None)] if span or number else []
    if match := _WITH_CONFLICTS.match(line):
        return [site(line, file=relative_file(turn, match.group("file")))]
    if match := _HUNK.match(line):
        number = match.group("line")
        return [site(line, file=relative_file(turn, file), number=int(number) if number else None)] if file else []
    if _HUNKS.match(line) or _REVERSED.match(line):
        return [site(line, file=relative_file(turn, file))] if file else []
    if _NO_TARGET.match(line):
        names = [m.group("file").strip() for item in ahead if (m := _OLD_NAME.match(item))]
        name = next((n for n in names if n != "/dev/null"), None)
        return [site(line, file=_stripped(turn, name))] if name else []
    if match := _CONFLICT.match(line):
        return [site(line, file=match.group("file") or match.group("first"))]
    if _NOT_APPLIED.search(line):
        return []
    if _REPLACEMENT.search(line):
        where = list(_IN_FILE.finditer(line))
        return [site(line, file=relative_file(turn, where[-1].group("file")))] if where else []
    return None


def _stripped(turn: Turn, name: str) -> str:
    """Return a patch's file name without as many leading parts as the action's ``-p`` removes."""
    for call in turn.action.invocations:
        for value in call.arguments if call.program == "patch" else ():
            match = re.match(r"(?:-p|--strip=)(\d)$", value)
            if match:
                return "/".join(name.split("/")[int(match.group(1)) :]) or name
    return name


def _patch_argument(turn: Turn) -> Span | None:
    """Return the span of the argument that names the patch file in the last call of ``patch``, ``git apply`` or
    ``git am``; None if there is no such call, or if it reads the patch from a pipe or a here-document.

    It is the value of ``-i`` (``patch`` only), else the operand, else the file of a redirection ``<``. The operand of
    ``patch`` is the second one, as the first is the file to change; of several patches of ``git`` it is the last.
    """
    for call in reversed(turn.action.invocations):
        subcommand, arguments = git_subcommand(call) if call.program == "git" else ("", call.arguments)
        if subcommand not in ("apply", "am") and call.program != "patch":
            continue
        words = call.words[len(call.words) - len(arguments) :]
        operands, given = _read_options(turn, words, _PATCH_OPTIONS if call.program == "patch" else _GIT_OPTIONS)
        if call.program == "patch":
            given = given or (operands[1].inner if len(operands) > 1 and operands[1].value != "-" else None)
        elif operands and operands[-1].value != "-":
            given = operands[-1].inner
        if given is not None:
            return given
        files = (r.target for r in call.simple.redirects if r.operator == "<" and r.target is not None)
        return next((target.inner for target in files), None)
    return None


def _read_options(turn: Turn, words: Sequence[Word], options: _Options) -> tuple[list[Word], Span | None]:
    """Return the words that are neither options nor values of options, and the span of the value of ``options.file``.

    The value of an option may be in the same word (``-p1``, ``--input=FILE``) or in the next one. All words after
    ``--`` are operands. The span is None if the option is missing, has no value, or has the value ``-``.
    """
    operands: list[Word] = []
    given: Span | None = None
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word.value == "--":
            operands.extend(words[index:])
            break
        if not word.value.startswith("-") or word.value == "-":
            operands.append(word)
            continue
        name, value = _split_option(word.value, options)
        span = word.inner
        if value is None and index < len(words):
            value, span = words[index].value, words[index].inner
            index += 1
        elif value and (at := turn.command.rfind(value, *word.inner)) >= 0:
            span = at, at + len(value)
        if name in options.file:
            given = span if value and value != "-" else None
    return operands, given


def _split_option(text: str, options: _Options) -> tuple[str, str | None]:
    """Return the name of an option and its value, which is empty if it has none; None if the next word is the value.

    Of several short options in one word (``-Nsi FILE``) this is the first that takes a value.
    """
    if text.startswith("--"):
        name, equals, value = text.partition("=")
        return name, None if not equals and name in options.long else value
    for at, letter in enumerate(text[1:], start=1):
        if letter in options.short:
            return f"-{letter}", text[at + 1 :] or None
    return text, ""


RULES = (
    Rule(
        "patch.failed",
        ErrorKind.PATCH_FAILED,
        "A hunk or file that git apply, patch, merge, cherry-pick, rebase, revert or stash pop could not apply; a "
        "patch that is no patch; an edit tool that performed no replacement.",
        "File and line of the hunk, the conflicting file, or the argument that names the corrupt patch and its line.",
        _patch,
    ),
)
