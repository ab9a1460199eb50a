"""Rules for code that does not parse and for modules that do not exist."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from errata_protocol.detect.action import Invocation, language
from errata_protocol.detect.image_builds import failed_instruction
from errata_protocol.detect.place import (
    Span,
    argument_span,
    frame_site,
    is_own,
    last_own_frame,
    relative_file,
    site,
    stdin_code,
)
from errata_protocol.detect.python_traceback import Frame, Traceback
from errata_protocol.detect.rules.rule import Finding, Rule
from errata_protocol.detect.rules.shell_message import read_message
from errata_protocol.detect.stacks import Crash
from errata_protocol.detect.test_report import FailedTest
from errata_protocol.detect.text import quoted
from errata_protocol.detect.turn import Turn
from errata_protocol.markers import ErrorKind, ErrorSite

_SYNTAX_NAMES = ("SyntaxError", "IndentationError", "TabError")
_IMPORT_NAMES = ("ImportError", "ModuleNotFoundError")
_SHELL_SYNTAX = re.compile(
    r"syntax error|unexpected EOF while looking|unexpected end of file|Bad for loop variable|parse error near",
    re.IGNORECASE,
)
_NAMED_LINE = re.compile(
    r"(?:SyntaxError|IndentationError|TabError|invalid syntax)\b.*\((?P<file>[^(),]{1,300}), line (?P<line>\d+)\)"
)
_LINT_SYNTAX = re.compile(
    r"^(?P<file>[^\s:][^:]{0,300}):(?P<line>\d+):(?:(?P<column>\d+):)? .*(?:SyntaxError|invalid-syntax|E999|"
    r"\[syntax\]|invalid syntax|syntax error)",
    re.IGNORECASE,
)
_FORMATTER = re.compile(
    r"cannot (?:format|parse) (?P<file>[^\s:]+): (?:Cannot parse[^:]*|.*?): (?P<line>\d+):(?P<column>\d+)",
    re.IGNORECASE,
)
_RUFF_PARSE = re.compile(r"Failed to parse (?P<file>[^\s:]+):(?P<line>\d+):(?P<column>\d+)")
_JSON = re.compile(
    r"^(?:[\w./-]+: )?(?:.*?)(?:Expecting|Extra data|Invalid|Unterminated|Illegal|parse error|"
    r"Exceeds)\b.*\bline (?P<line>\d+),? column (?P<column>\d+)"
)
_PARSER_LINE = re.compile(
    r"^(?P<file>[^\s:][^:]{0,300}):(?P<line>\d+)(?::(?P<column>\d+))?: ?(?:parser error|syntax error|parse error|"
    r"\S+: (?:syntax|parse) error)"
)
_YAML = re.compile(
    r"yaml: (?:line (?P<line>\d+)|.*(?:did not find|could not find|mapping values|found ))", re.IGNORECASE
)
_SED = re.compile(r"^sed: (?:(?:-e )?expression #\d+, char \d+|file (?P<file>\S+) line (?P<line>\d+)|\d+: )")
_AWK = re.compile(
    r"^(?:g|m|n)?awk: .*(?:syntax error|line \d+|line:\d+: error: (?:Unmatched|Invalid|Trailing)|"
    r"unterminated|unexpected|newline)|^awk: .*(?:near|missing)",
    re.IGNORECASE,
)
_AWK_FILE = re.compile(r"^\w{0,2}awk: (?P<file>[^\s:]{1,300}):(?P<line>\d{1,9}): ")
_JQ = re.compile(
    r"^jq: (?:error: )?.*(?:syntax error|compile error|is not defined at|unterminated)|^jq: \d+ compile error"
)
_SQL = re.compile(
    r"^(?:Parse error|Error): (?:near|in prepare|incomplete input)|^Parse error near line (?P<line>\d+)|"
    r"near line (?P<near>\d+): .*syntax error|"
    r"near \"[^\"]*\": syntax error|ERROR:  syntax error at|You have an error in your SQL syntax|"
    r"unrecognized token:|incomplete input$"
)
_PERL_TEXT = re.compile(
    r"^syntax error at|^Can't find string terminator|^Missing right curly|^Unmatched right|^Global symbol|^Bareword \"|"
    r"^Unrecognized character|^Number found where|^Substitution (?:pattern|replacement) not terminated|"
    r"^Search pattern not terminated|"
    r"^String found where|^Unknown regexp modifier|aborted due to compilation errors|"
    r"in regex; marked by <-- HERE in m/"
)
_RUBY_SYNTAX = re.compile(
    r"^(?:ruby: )?(?P<file>[^\s:][^:]{0,300}):(?P<line>\d+): (?:.*syntax errors? |syntax error|.*unterminated|"
    r".*\(SyntaxError\))"
)
_ELIXIR_SYNTAX = re.compile(
    r"^\*\* \((?:SyntaxError|TokenMissingError|MismatchedDelimiterError|EEx\.SyntaxError)\) (?:.{1,200}? on )?"
    r"(?P<file>[^\s:]{1,300}):(?P<line>\d+):(?:(?P<column>\d+):)?"
)
_DENO_SYNTAX = re.compile(
    r"^error: [^:]*could not be parsed: .* at (?P<file>(?:file://)?[^\s:]{1,300}):(?P<line>\d+):(?P<column>\d+)"
)
_DOCKERFILE = re.compile(r"dockerfile parse error (?:on )?line (?P<line>\d+)", re.IGNORECASE)
_GO_SYNTAX = re.compile(r"^(?P<file>\S+\.go):(?P<line>\d+):(?P<column>\d+): (?:syntax error|expected )")
_NOT_SYNTAX = re.compile(
    r"regex parse error|invalid value|for flag|error parsing regexp|_bash_|date: invalid", re.IGNORECASE
)


_PLACED_SYNTAX = (
    *(_ELIXIR_SYNTAX, _DENO_SYNTAX, _NAMED_LINE, _LINT_SYNTAX, _FORMATTER, _RUFF_PARSE, _GO_SYNTAX, _PARSER_LINE),
    _RUBY_SYNTAX,
)


def _syntax(turn: Turn) -> Finding | None:
    if turn.report is not None and (broken := turn.report.collection_failure) and broken.exception in _SYNTAX_NAMES:
        return Finding((_collected(turn, broken),))
    for traceback in turn.final_tracebacks:
        if traceback.name in _SYNTAX_NAMES:
            return Finding(_traceback_sites(turn, traceback))
    crash = turn.crash
    if crash is not None and _is_parse_failure(crash):
        return Finding(_crash_sites(turn, crash))
    if not turn.mentions(
        "syntax",
        "parse",
        "unexpected",
        "line ",
        "near",
        "terminat",
        "sed:",
        "awk:",
        "jq:",
        "yaml",
        "compil",
        "incomplete",
        "symbol",
        "prepare",
    ):
        return None
    for line in turn.messages:
        if _NOT_SYNTAX.search(line):
            continue
        found = _syntax_message(turn, line)
        if found is not None:
            return Finding(found)
    return None


def _syntax_message(turn: Turn, line: str) -> tuple[ErrorSite, ...] | None:
    """Return the sites of a message about code that does not parse, None if ``line`` is no such message."""
    for pattern in _PLACED_SYNTAX:
        match = pattern.search(line)
        if match:
            groups = match.groupdict()
            frame = Frame(groups["file"], int(groups["line"]))
            column = int(groups["column"]) if groups.get("column") else None
            return (frame_site(turn, frame, line, source="message").model_copy(update={"column": column or None}),)
    match = _SED.match(line)
    if match and match.group("file"):
        return (site(line, file=relative_file(turn, match.group("file")), number=int(match.group("line"))),)
    awk = _AWK_FILE.match(line)
    if awk and _AWK.match(line):
        return (site(line, file=relative_file(turn, awk.group("file")), number=int(awk.group("line"))),)
    if match or _AWK.match(line) or _JQ.match(line):
        return _inline_program(turn, line)
    match = _SQL.search(line)
    if match:
        return _sql_script(turn, line, int(match.group("line") or match.group("near") or 0))
    match = _DOCKERFILE.search(line)
    if match:
        instruction = failed_instruction(turn.lines)
        number = int(match.group("line"))
        return (site(line, file=relative_file(turn, instruction.file), number=number),) if instruction else ()
    match = _JSON.match(line)
    if match and _is_data_tool(turn, line):
        return (_document(turn, line, int(match.group("line")), int(match.group("column"))),)
    match = _YAML.search(line)
    if match:
        return (_document(turn, line, int(match.group("line") or 0), 0),)
    message = read_message(line)
    if message.from_shell and _SHELL_SYNTAX.search(message.rest):
        if message.script is not None:
            return (site(line, file=relative_file(turn, message.script), number=message.line),)
        span = _shell_line(turn, message.line) if "near unexpected token" in message.rest else None
        return (site(line, span=span),) if span else ()
    if _PERL_TEXT.search(line) and any(language(c.program) == "perl" for c in turn.action.invocations):
        where = re.search(r" at (?P<file>\S+) line (?P<line>\d+)", line)
        return (
            (frame_site(turn, Frame(where.group("file"), int(where.group("line"))), line, source="message"),)
            if where
            else ()
        )
    if re.match(r"(?:\S+: )?(?:.*\b)?(?:syntax error|parse error)\b", line, re.IGNORECASE) and not line.startswith(
        (" ", "\t")
    ):
        return ()
    return None


def _is_data_tool(turn: Turn, line: str) -> bool:
    """Return whether a JSON message comes from a tool that checks JSON, not from a program that happens to
    read some."""
    del turn
    return not re.match(r"^[\w.]*(?:Error|Exception)\b", line)


def _document(turn: Turn, line: str, number: int, column: int) -> ErrorSite:
    """Return the site in a document that the message does not name: its line, and the argument that names
    the document."""
    names = quoted(line)
    span = argument_span(turn, names, in_code=False) if names else None
    if span is None:
        words = [
            w for c in turn.action.deciders[:1] for w in c.words[1:] if re.search(r"\.\w{1,5}$", w.value) and w.literal
        ]
        targets = [
            r.target
            for c in turn.action.deciders[:1]
            for r in c.simple.redirects
            if r.operator == "<" and r.target is not None
        ]
        documents = words or targets
        span = documents[-1].inner if documents else None
    return site(line, span=span, number=number, column=column)


def _inline_program(turn: Turn, line: str) -> tuple[ErrorSite, ...]:
    """Return the argument of a sed, awk or jq call that is the program, or that names the program's file."""
    program = line.split(":", 1)[0].strip()
    calls = [c for c in turn.action.invocations if c.program == program]
    if len(calls) != 1:
        return ()
    words = calls[0].words[1:]
    files = [b for a, b in pairwise(words) if a.value in ("-f", "--file", "--from-file")]
    if files:
        number = re.search(r"\bline (\d{1,9})\b", line)
        return (site(line, span=files[0].inner, number=int(number.group(1)) if number else None),)
    span = _first_operand(calls[0], ("-F", "-v", "--arg", "--argjson"))
    return (site(line, span=span),) if span else ()


_SQL_CLIENTS = frozenset({"sqlite3", "sqlite", "psql", "mysql", "mariadb", "duckdb"})


def _sql_script(turn: Turn, line: str, number: int) -> tuple[ErrorSite, ...]:
    """Return the site in the SQL that the only call of a client reads: its line of a file or of what is piped in, or
    the argument with the words that the message quotes."""
    calls = [c for c in turn.action.invocations if c.program in _SQL_CLIENTS]
    scripts = [r.target for c in turn.action.invocations for r in c.simple.redirects if r.operator == "<" and r.target]
    if number and len(scripts) == 1:
        return (site(line, span=scripts[0].inner, number=number),)
    if len(calls) != 1 or scripts:
        return ()
    names = quoted(line)
    words = [w for w in calls[0].words[1:] if " " in w.value.strip() and all(name in w.value for name in names)]
    spans = [span for body in stdin_code(turn, calls[0]) if number and (span := turn.action.line_span(*body, number))]
    found = spans[-1:] or [w.inner for w in words if len(words) == 1]
    return (site(line, span=found[0], number=number if spans else None),) if found else ()


def _first_operand(call: Invocation, with_value: tuple[str, ...]) -> Span | None:
    skip = False
    for word in call.words[1:]:
        if skip:
            skip = False
        elif word.value in with_value:
            skip = True
        elif not word.value.startswith("-"):
            return word.inner
    return None


def _shell_line(turn: Turn, line: int | None) -> Span | None:
    return turn.action.line_span(0, len(turn.command), line) if line else None


def _traceback_sites(turn: Turn, traceback: Traceback) -> tuple[ErrorSite, ...]:
    if traceback.frames and not traceback.frames[-1].in_code and is_own(turn, traceback.frames[-1].file):
        frame: Frame | None = traceback.frames[-1]
    else:
        frame = last_own_frame(turn, traceback.frames)
    return (frame_site(turn, frame, traceback.line, traceback.text),) if frame else ()


def _is_parse_failure(crash: Crash) -> bool:
    if crash.language == "node":
        ran = any(not f.file.startswith("node:") for f in crash.frames)  # code that does not parse has no frame
        parsed_data = any("JSON" in f.file for f in crash.frames) or "JSON" in crash.text
        return crash.exception == "SyntaxError" and not parsed_data and not (ran and "regular expression" in crash.text)
    if crash.language == "perl":
        return _PERL_TEXT.search(crash.text) is not None or _PERL_TEXT.search(crash.line) is not None
    if crash.language == "ruby":
        return crash.exception == "SyntaxError"
    return crash.language == "php" and crash.exception == "Parse error"


def _crash_sites(turn: Turn, crash: Crash) -> tuple[ErrorSite, ...]:
    frame = crash.head or last_own_frame(turn, crash.frames)
    return (frame_site(turn, frame, crash.line, crash.text),) if frame and is_own(turn, frame.file) else ()


def _test_id(broken: FailedTest) -> str | None:
    return broken.test_id if broken.test_id and not broken.collection else None


def _collected(turn: Turn, broken: FailedTest) -> ErrorSite:
    frame = last_own_frame(turn, broken.frames)
    if frame is not None:
        return frame_site(turn, frame, broken.line)
    names = quoted(broken.text)
    conftest = re.search(r"conftest '([^']+)'", broken.line)
    if conftest:
        return site(broken.line, "traceback", file=relative_file(turn, conftest.group(1)))
    if broken.test_id and "_FailedTest" not in broken.test_id:
        return site(broken.line, "message", file=relative_file(turn, broken.test_id))
    return site(broken.line, "message", span=argument_span(turn, names, in_code=False))


# Imports

_NO_MODULE = re.compile(
    r"^(?:\S*/)?(?:python|pypy)[\d.]*: (?:No module named|Error while finding module specification for) (?P<module>\S+)"
)
_NODE_MODULE = re.compile(r"Cannot find (?:module|package) '(?P<module>[^']+)'(?: imported from (?P<file>\S+))?")
_PERL_MODULE = re.compile(r"^Can't locate (?P<module>\S+) in @INC.* at (?P<file>\S+) line (?P<line>\d+)\.?$")
_PERL_OPTION = re.compile(r"^Can't locate (?P<module>\S+?)(?:\.pm)? in @INC")
_RUBY_MODULE = re.compile(r"cannot load such file -- (?P<module>\S+)")
_GO_MODULE = re.compile(
    r"^(?P<file>\S+\.go):(?P<line>\d+):(?P<column>\d+): (?:no required module provides package|cannot find package|"
    r"package \S+ is not in|cannot find module)"
)
_TS_MODULE = re.compile(r"^(?P<file>[^\s(]+)[(:](?P<line>\d+)[,:](?P<column>\d+)\)?(?::| -) error TS(?:2307|7016)")
_LUA_MODULE = re.compile(r"^(?:lua\S*: )?(?P<file>[^\s:]{1,300}\.lua):(?P<line>\d+): module '[^']+' not found:")
_DENO_MODULE = re.compile(r'^error: (?:Uncaught )?(?:\(in promise\) )?Module not found "')
_FRAME_BELOW = re.compile(
    r"^\s*(?:# |from |❯ |at (?:.*\()?|File: )?(?:file://)?(?P<file>/?[^\s:()'\"]{1,400}\.\w+):(?P<line>\d+)"
    r"(?::\d+)?(?:\)|:|:in .*)?$"
)
_LINES_BELOW = 14
_OTHER_MODULE = re.compile(
    r"Could not find or load main class|ClassNotFoundException|NoClassDefFoundError|there is no package called|"
    r"module '[^']+' not found:|"
    r"no required module provides package|Error importing plugin|Cannot find module|ERR_MODULE_NOT_FOUND|"
    r"MODULE_NOT_FOUND|No module named '?[\w.]+'?$|ModuleNotFoundError: "
)


_REFUSED_IMPORT = re.compile(
    r"^(?:(?:un\w+|forbidden|disallowed) )?(?:import(?:ing|s)?|(?:use of )?modules?)\b.{0,120}\b(?:(?:not|n't) (?:be )?"
    r"(?:allowed|permitted|authori[sz]ed|supported)|forbidden|disallowed|prohibited|blocked|denied|restricted)\b|"
    r"^(?:forbidden|disallowed|prohibited|blocked|unauthori[sz]ed|restricted|unsafe|dangerous) (?:import|module)\b",
    re.IGNORECASE,
)
"""How interpreters with a list of allowed modules refuse one; the name of their exception varies."""


def _import(turn: Turn) -> Finding | None:
    if turn.report is not None:
        broken = turn.report.collection_failure
        if broken is None and all(t.exception in _IMPORT_NAMES for t in turn.report.failed):
            broken = turn.report.failed[0]  # every failing test stops at the same kind of line
        if broken is None or broken.exception not in _IMPORT_NAMES:
            return None
        return Finding((_collected(turn, broken).model_copy(update={"test_id": _test_id(broken)}),))
    for traceback in turn.final_tracebacks:
        if traceback.name in _IMPORT_NAMES or _REFUSED_IMPORT.search(traceback.text):
            sites = _traceback_sites(turn, traceback)
            span = None if sites else argument_span(turn, quoted(traceback.text), in_code=False)
            return Finding((site(traceback.line, span=span),) if span else sites)
    if turn.agent_files is not None:
        last = next((line for line in reversed(turn.lines) if line.strip()), "")
        if any(_REFUSED_IMPORT.search(part) for part in last.split(": ")) or _REFUSED_IMPORT.search(last):
            return Finding((site(last),))
    if not turn.mentions("module", "@inc", "cannot load such", "classnotfound", "main class", "package", "noclassdef"):
        return None
    lines = [x for x in turn.messages if not re.match(r"\s+(?:throw new |code: )", x)]
    for index, line in enumerate(lines):
        found = _import_message(turn, line)
        if found is not None:
            return Finding(found or _importing(turn, line, lines[index + 1 : index + 1 + _LINES_BELOW]))
    return None


def _importing(turn: Turn, line: str, below: Sequence[str]) -> tuple[ErrorSite, ...]:
    """Return the site of the first line of the workspace in the frames below a message about a module."""
    frames = [Frame(m["file"], int(m["line"])) for each in below if (m := _FRAME_BELOW.match(each))]
    inside = [f for f in frames if is_own(turn, f.file) and not relative_file(turn, f.file).startswith("/")]
    return (frame_site(turn, inside[0], line),) if inside else ()


def _import_message(turn: Turn, line: str) -> tuple[ErrorSite, ...] | None:
    match = _NO_MODULE.match(line)
    if match:
        module = match.group("module").strip("';,").removesuffix(".__main__").rstrip(";")
        span = argument_span(turn, (module, module.split(".")[0]), "python3", in_code=False)
        return (site(line, span=span),) if span else ()
    for pattern in (_PERL_MODULE, _GO_MODULE, _TS_MODULE, _LUA_MODULE):
        match = pattern.match(line)
        if match:
            return (frame_site(turn, Frame(match.group("file"), int(match.group("line"))), line, source="message"),)
    match = _PERL_OPTION.match(line)
    if match:
        span = argument_span(turn, (match.group("module").replace("/", "::"),), "perl")
        return (site(line, span=span),) if span else ()
    crash = turn.crash
    match = _NODE_MODULE.search(line)
    if match:
        frame = last_own_frame(turn, crash.frames) if crash and crash.language == "node" else None
        if frame is not None:
            return (frame_site(turn, frame, line, match.group("module") or ""),)
        if match.group("file"):
            return (site(line, file=relative_file(turn, match.group("file"))),)
        span = argument_span(turn, (match.group("module") or "",), "node", in_code=False)
        return (site(line, span=span),) if span else ()
    if _DENO_MODULE.match(line):
        return ()
    if _RUBY_MODULE.search(line):
        own = last_own_frame(turn, crash.frames) if crash else None
        return (frame_site(turn, own, line),) if own else ()
    if _OTHER_MODULE.search(line):
        span = argument_span(turn, (*quoted(line), line.rsplit(" ", 1)[-1]), in_code=False)
        if span is None and turn.tracebacks:  # the last lines of a message of several lines
            return _traceback_sites(turn, turn.tracebacks[-1])
        return (site(line, span=span),) if span else ()
    return None


SYNTAX_RULES = (
    Rule(
        "code.syntax",
        ErrorKind.SYNTAX_ERROR,
        "A SyntaxError that ends a Python or node run or a collection, a shell, sed, awk, jq, SQL, perl, ruby, Elixir "
        "or Go text or a Dockerfile that does not compile, or a JSON, YAML or XML document that a checking tool "
        "refuses.",
        "File and line from the message; for code in the action that line of it; for a document its line, with the "
        "argument that names it.",
        _syntax,
    ),
)
IMPORT_RULES = (
    Rule(
        "code.import",
        ErrorKind.IMPORT_ERROR,
        "ImportError or ModuleNotFoundError that ends a run or a collection, an interpreter's refusal of a module that "
        "it does not allow, `No module named`, `Cannot find module`, "
        "`Can't locate .. in @INC`, `cannot load such file`, a missing Go package or Java main class.",
        "The importing line: the last frame in the workspace, or the line of code in the action; for `python -m NAME` "
        "the name.",
        _import,
    ),
)
