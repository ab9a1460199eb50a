"""Parses an action: which programs it calls, without wrappers such as ``sudo``, and which call decided
the exit status."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from errata_protocol.detect.shell import parse
from errata_protocol.detect.shell_tree import Compound, Pipeline, Sequence, Simple, Step, Word, simples

MAX_ACTION_CHARS = 262_144
"""A longer action is read up to here only; what decided its exit status is then unknown."""

SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh", "ash"})

_WRAPPERS: dict[str, str] = {
    # wrapper -> its options that take a value in the next word
    "sudo": "-u -g -h -p -C -D -R -T -U --user --group",
    "doas": "-u -C",
    "env": "-u -C -S --unset --chdir",
    "time": "-o -f",
    "timeout": "-s -k --signal --kill-after",
    "xargs": "-I -n -P -L -d -a -s -E --max-args --max-procs --delimiter --arg-file --replace",
    "nohup": "",
    "nice": "-n",
    "ionice": "-c -n -p",
    "stdbuf": "-i -o -e",
    "setsid": "",
    "exec": "-a",
    "command": "",
    "builtin": "",
    "chronic": "",
    "unbuffer": "",
    "strace": "-e -o -p -s",
    "watch": "-n",
    "parallel": "-j",
    "setpriv": "",
    "faketime": "",
    "eatmydata": "",
    "caffeinate": "",
}
_RUNNERS = frozenset({"uv", "poetry", "pipenv", "pdm", "hatch", "rye"})
_FILTERS = frozenset({"cat", "head", "tail", "tee", "grep", "sed"})
_SAY_NO_ERROR = frozenset({"echo", "printf", "exit", "true", ":"})
_NEVER_RAISE = (
    frozenset({"cd", "pushd", "popd", "export", "set", "unset", "pwd", "mkdir", "rm", "cp", "mv", "touch", "ls"})
    | frozenset({"sleep", "sort", "wc"})
    | _FILTERS
    | _SAY_NO_ERROR
)
"""Programs that print no traceback of their own."""

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w{0,255}=")
_PIPESTATUS = re.compile(r'"?\$\{PIPESTATUS\[(\d+)\]\}"?$')


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of a program.

    Args:
        simple: The simple command that it is part of.
        program: Base name of the program, without wrappers such as ``sudo`` and ``timeout 5``.
        words: The program word and its arguments.
        wrappers: The wrappers that were removed, outermost first, with their arguments.
    """

    simple: Simple
    program: str
    words: tuple[Word, ...]
    wrappers: tuple[tuple[Word, ...], ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(w.value for w in self.words[1:])

    @property
    def span(self) -> tuple[int, int]:
        return self.simple.start, self.simple.end

    @property
    def local(self) -> bool:
        """Whether the program is called by a relative path: `./test` is the agent's own and not the shell's `test`."""
        path = self.words[0].value if self.words else ""
        return "/" in path and not re.match(r"/(?:usr/)?(?:local/)?s?bin/", path)

    def wrapped_by(self, name: str) -> tuple[Word, ...] | None:
        """Return the words of the wrapper called ``name``, or None."""
        return next((w for w in self.wrappers if _base(w[0].value) == name), None)


def _base(path: str) -> str:
    return path.rsplit("/", 1)[-1] if not path.endswith("/") else path


def invocation(simple: Simple) -> Invocation:
    """Return the call in a simple command, with its wrappers removed; for assignments alone the program
    name is empty."""
    words = simple.words
    wrappers: list[tuple[Word, ...]] = []
    while words and len(wrappers) < 8:
        name = _base(words[0].value)
        rest = _unwrap(name, words)
        if not rest:
            break
        wrappers.append(words[: len(words) - len(rest)])
        words = rest
    return Invocation(simple, _base(words[0].value) if words else "", words, tuple(wrappers))


def _unwrap(name: str, words: tuple[Word, ...]) -> tuple[Word, ...]:
    """Return the words of the command that wrapper ``name`` runs, empty if it runs none."""
    if name in _RUNNERS:
        return words[2:] if len(words) > 2 and words[1].value in ("run", "exec") else ()
    if name == "coverage":
        return words[2:] if len(words) > 3 and words[1].value == "run" else ()
    if name == "npx":
        return words[1:] if len(words) > 1 and not words[1].value.startswith("-") else ()
    if name not in _WRAPPERS:
        return ()
    with_value = _WRAPPERS[name].split()
    index = 1
    if name == "command" and len(words) > 1 and words[1].value in ("-v", "-V", "-pv"):
        return ()
    while index < len(words) and words[index].value.startswith("-") and words[index].value != "-":
        value = words[index].value
        index += 2 if value in with_value else 1
        if value == "--":
            break
    if name in ("env", "sudo"):
        while index < len(words) and _ASSIGNMENT.match(words[index].value):
            index += 1
    if name == "timeout":
        index += 1  # the duration
    return words[index:]


class Action:
    """A parsed action. All spans count code points of ``text``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.complete = len(text) <= MAX_ACTION_CHARS
        self.tree = parse(text, 0, min(len(text), MAX_ACTION_CHARS))

    @cached_property
    def invocations(self) -> tuple[Invocation, ...]:
        """All program calls in the order written, including those inside ``bash -c '...'`` and ``eval``."""
        out: list[Invocation] = []
        for simple in simples(self.tree):
            call = invocation(simple)
            out.append(call)
            script = self.inner_script(call)
            if script is not None:
                out.extend(invocation(inner) for inner in simples(script))
        return tuple(out)

    def inner_script(self, call: Invocation) -> Sequence | None:
        """Return the parsed script that a call passes to a shell (``bash -c``, ``eval``), None without one; its
        spans are those of the action."""
        word = code_word(call)
        if call.program in SHELLS and word is not None:
            return parse(self.text, *word.inner)
        if call.program == "eval" and len(call.words) == 2:
            return parse(self.text, *call.words[1].inner)
        return None

    @cached_property
    def functions(self) -> dict[str, Compound]:
        """Names of the shell functions that the action defines."""
        found: dict[str, Compound] = {}

        def visit(sequence: Sequence) -> None:
            for step in sequence.steps:
                for command in step.pipeline.commands:
                    if isinstance(command, Compound):
                        if command.keyword == "function" and command.name:
                            found[command.name] = command
                        for body in command.bodies:
                            visit(body)

        visit(self.tree)
        return found

    @cached_property
    def pipefail(self) -> bool:
        """Whether the action sets ``pipefail``."""
        return any(c.program == "set" and "pipefail" in c.arguments for c in self.invocations)

    @cached_property
    def deciders(self) -> tuple[Invocation, ...]:
        """Calls whose exit status may be that of the action: those of the last simple command first, then those before
        ``&&``."""
        if not self.complete:
            return ()
        return tuple(self._of_sequence(self.tree, 0))

    def _of_sequence(self, sequence: Sequence, depth: int) -> list[Invocation]:
        steps = [s for s in sequence.steps if not _only_definition(s)]
        out: list[Invocation] = []
        for index in range(len(steps) - 1, -1, -1):
            step = steps[index]
            found = self._of_pipeline(step.pipeline, depth)
            if len(found) == 1 and found[0].program in ("exit", "return") and not out and index:
                repeated = self._of_exit(found[0], steps[index - 1], depth)
                if repeated is not None:
                    return repeated
            out.extend(found)
            if step.connector != "&&":
                break
        return out

    def _of_exit(self, call: Invocation, before: Step, depth: int) -> list[Invocation] | None:
        """Return the calls that decide the status of ``exit $?`` or ``exit ${PIPESTATUS[n]}``: those of the step
        before."""
        argument = call.words[1].value if len(call.words) > 1 else "$?"
        if argument in ("$?", '"$?"'):
            return self._of_sequence(Sequence((before,)), depth)
        match = _PIPESTATUS.match(argument)
        if match and int(match.group(1)) < len(before.pipeline.commands):
            return self._of_command(before.pipeline.commands[int(match.group(1))], depth)
        return None

    def _of_pipeline(self, pipeline: Pipeline, depth: int) -> list[Invocation]:
        if not pipeline.commands:
            return []
        out = self._of_command(pipeline.commands[-1], depth)
        if self.pipefail:
            for command in reversed(pipeline.commands[:-1]):
                out.extend(self._of_command(command, depth))
        return out

    def _of_command(self, command: Simple | Compound, depth: int) -> list[Invocation]:
        if depth > 20:
            return []
        if isinstance(command, Compound):
            out: list[Invocation] = []
            for body in reversed(command.bodies):
                out.extend(self._of_sequence(body, depth + 1))
            return out
        call = invocation(command)
        if not call.program and command.inside:
            return self._of_sequence(command.inside[-1], depth + 1)
        if call.program in self.functions:
            return self._of_command(self.functions[call.program], depth + 1)
        script = self.inner_script(call)
        if script is not None and script.steps:
            return self._of_sequence(script, depth + 1)
        return [call]

    @cached_property
    def negated(self) -> bool:
        """Whether the last pipeline is negated with ``!``; a status of 1 then means that its command succeeded."""
        return bool(self.tree.steps) and self.tree.steps[-1].pipeline.negated

    @cached_property
    def merges_stderr(self) -> bool:
        """Whether some standard error is redirected to standard output (``2>&1``, ``&>``, ``|&``)."""
        return "2>&1" in self.text or "&>" in self.text or "|&" in self.text or ">&1" in self.text

    @cached_property
    def shows_data(self) -> bool:
        """Whether the action prints text that comes from elsewhere: a file, a log, search results, an echo."""
        return any(_prints_data(p) for p in _pipelines(self.tree))

    @cached_property
    def reports(self) -> bool:
        """Whether the action calls a tool that reports errors on standard output: tests, merges, patches, builds."""
        return any(_reports(call) for call in self.invocations)

    @cached_property
    def runs_tests(self) -> bool:
        """Whether the action seems to run tests: a runner, or a target with such a name (``npm run test:unit``)."""
        return any(_runs_tests(call) for call in self.invocations)

    def line_span(self, start: int, end: int, line: int) -> tuple[int, int] | None:
        """Return the span of line ``line`` of the text ``[start, end)``, without its indentation; None if it is blank
        or missing."""
        if line < 1:
            return None
        position = start
        for _ in range(line - 1):
            position = self.text.find("\n", position, end) + 1
            if position == 0:
                return None
        stop = self.text.find("\n", position, end)
        raw = self.text[position : end if stop < 0 else stop]
        body = raw.strip()
        if not body:
            return None
        begin = position + len(raw) - len(raw.lstrip())
        return begin, begin + len(body)


_REPORTERS = re.compile(
    r"(?:py\.?test|tox|nox|patch|g?make|ninja|ctest|cargo|npm|yarn|pnpm|jest|mocha|vitest|rspec|prove|bats|mvn|"
    r"gradlew?|tsc)$"
)
_GIT_EDITS = frozenset({"apply", "am", "merge", "cherry-pick", "rebase", "revert", "stash", "pull"})


def _reports(call: Invocation) -> bool:
    if call.program == "git":
        return any(a in _GIT_EDITS for a in call.arguments[:4])
    if language(call.program) == "python":
        return any(a in ("pytest", "unittest", "doctest") for a in call.arguments[:4])
    if call.program in ("go", "node"):
        return any(a in ("test", "--test") for a in call.arguments[:3])
    return _REPORTERS.match(call.program) is not None


_TESTS = re.compile(
    r"(?:.*[:._-])?(?:e2e|unit|integration)?(?:tests?|specs?|eunit|ct)(?:[:_(-].*)?$|test[A-Z]|.*[a-z]Tests?$|"
    r"(?:jest|vitest|mocha|ava|tap|tape|karma|jasmine|cypress|playwright|busted|bats|prove|ctest|behave|cucumber|robot|"
    r"pest|phpunit|codecept|behat|nose2|nosetests|tox|nox|pytest|py\.test|trial|minitest|gotestsum|ginkgo|testthat)$"
)
"""A runner of tests, or a target that runs them: ``test``, ``test:unit``, ``testDebugUnitTest``."""

_MAX_TARGETS = 8
_CHECKERS = frozenset({"make", "gmake", "gradle", "gradlew"})
"""Programs whose target ``check`` runs tests."""

_NO_RUNNERS = frozenset(
    {"git", "cd", "test", "[", "docker", "podman", "kubectl", "apt", "apt-get", "pip", "pip3", "ssh"}
)


def is_test_target(word: str) -> bool:
    """Return whether a word is the name of a runner of tests, or of a target or script that runs them."""
    return _TESTS.match(word[:200]) is not None


def _runs_tests(call: Invocation) -> bool:
    if call.program in _NO_RUNNERS and not call.local:
        return False
    if call.program in _NEVER_RAISE or call.program in _DATA_PRINTERS:
        return False
    words = (call.program, *(w for w in call.arguments[:_MAX_TARGETS] if "/" not in w and not w.startswith("-")))
    return any(is_test_target(word) for word in words) or (call.program in _CHECKERS and "check" in words)


_DATA_PRINTERS = frozenset(
    [
        "cat",
        "tac",
        "head",
        "tail",
        "grep",
        "egrep",
        "fgrep",
        "zgrep",
        "rg",
        "ag",
        "ack",
        "less",
        "more",
        "sed",
        "awk",
        "gawk",
        "cut",
        "sort",
        "uniq",
        "nl",
        "tr",
        "fold",
        "column",
        "strings",
        "xxd",
        "od",
        "hexdump",
        "jq",
        "yq",
        "echo",
        "printf",
        "find",
        "ls",
        "tree",
        "zcat",
        "bat",
        "history",
        "dmesg",
        "journalctl",
        "env",
        "printenv",
        "wc",
        "tee",
        "rev",
        "paste",
    ]
)
_FILTERS = frozenset(
    [
        "cat",
        "tac",
        "head",
        "tail",
        "grep",
        "egrep",
        "fgrep",
        "rg",
        "less",
        "more",
        "sed",
        "awk",
        "cut",
        "sort",
        "uniq",
        "nl",
        "tr",
        "fold",
        "column",
        "tee",
    ]
)
_GIT_PRINTERS = frozenset(["log", "show", "diff", "grep", "blame", "cat-file"])


def _prints_data(pipeline: Pipeline) -> bool:
    """Return whether a pipeline prints data: its first command prints files, and the others only filter."""
    calls = [invocation(c) if isinstance(c, Simple) else None for c in pipeline.commands]
    if not calls:
        return False
    last = pipeline.commands[-1]
    if isinstance(last, Simple) and any(r.operator in (">", ">>", "1>", "&>", ">|") for r in last.redirects):
        return False
    while len(calls) > 1 and calls[-1] is not None and calls[-1].program in _FILTERS:
        calls.pop()
    source = calls[-1]
    if source is None or source.local:
        return False
    if source.program == "git":
        return any(a in _GIT_PRINTERS for a in source.arguments[:3])
    return source.program in _DATA_PRINTERS


def _pipelines(sequence: Sequence) -> list[Pipeline]:
    out: list[Pipeline] = []
    for step in sequence.steps:
        compounds = [c for c in step.pipeline.commands if isinstance(c, Compound)]
        if len(compounds) < len(step.pipeline.commands) or not compounds:
            out.append(step.pipeline)
        for compound in compounds:
            for body in compound.bodies:
                out.extend(_pipelines(body))
    return out


def _only_definition(step: Step) -> bool:
    return all(isinstance(c, Compound) and c.keyword == "function" for c in step.pipeline.commands)


_CODE_OPTIONS = {
    "python": ("-c",),
    "node": ("-e", "--eval", "-p", "-pe", "--print"),
    "perl": ("-e", "-E", "-ne", "-pe", "-ane", "-lne", "-we", "-nle", "-lane", "-le", "-Mstrict", "-0777"),
    "ruby": ("-e", "-ne", "-pe"),
    "php": ("-r",),
    "shell": ("-c", "-lc", "-ec", "-xc", "-ic", "-euc", "-exc", "-euxc"),
}


def language(program: str) -> str:
    """Return the language of an interpreter: python, node, perl, ruby, php or shell; empty for other programs."""
    if re.match(r"(?:python|pypy)[\d.]*$", program):
        return "python"
    if program in ("node", "nodejs"):
        return "node"
    if program in SHELLS:
        return "shell"
    return program if program in ("perl", "ruby", "php") else ""


def may_raise(calls: tuple[Invocation, ...]) -> list[Invocation]:
    """Return the calls of programs that may print a Python traceback of their own."""
    return [c for c in calls if c.program and c.program not in _NEVER_RAISE]


def ends_in_python(action: Action) -> bool:
    """Return whether a single Python program printed the last messages of the action, and any traceback in it."""
    calls = [c for c in action.invocations if c.program]
    while len(calls) > 1:
        between = action.text[calls[-2].simple.end : calls[-1].simple.start].strip()
        piped = calls[-1].program in _FILTERS and between in ("|", "|&", "2>&1 |", "2>&1|")
        if not piped and calls[-1].program not in _SAY_NO_ERROR:
            break
        calls.pop()
    if not calls or may_raise(tuple(calls)) != calls[-1:]:
        return False
    program = calls[-1].program
    return language(program) == "python" or program.endswith(".py")


def code_word(call: Invocation) -> Word | None:
    """Return the word that carries inline code (``python -c CODE``, ``perl -e CODE``), or None."""
    family = language(call.program)
    options = _CODE_OPTIONS.get(family, ())
    for index, word in enumerate(call.words[1:-1], start=1):
        if word.value in options or (family == "perl" and re.match(r"-[a-zA-Z0-9]*[eE]$", word.value)):
            return call.words[index + 1]
        if family in ("python", "shell") and not word.value.startswith("-"):
            return None
    return None
