"""Rules for compilers, linkers and build tools."""

from __future__ import annotations

import re
from collections.abc import Sequence

from errata_protocol.detect.compilers import diagnostics
from errata_protocol.detect.image_builds import builds_image, failed_instruction, image_failed
from errata_protocol.detect.place import argument_span, is_own, relative_file, site
from errata_protocol.detect.rules.rule import Finding, Rule
from errata_protocol.detect.test_runners import GO_NOT_BUILT
from errata_protocol.detect.text import quoted
from errata_protocol.detect.turn import Turn
from errata_protocol.markers import ErrorKind, ErrorSite

_GO = re.compile(r"^(?:vet: )?(?P<file>\.{0,2}/?[\w./-]+\.go):(?P<line>\d+):(?:(?P<column>\d+):)? ")
_CMAKE = re.compile(r"^CMake Error(?: at (?P<file>[^:]+):(?P<line>\d+))?")
_LINK = re.compile(
    r"undefined reference to|ld returned \d+ exit status|multiple definition of|cannot find -l|"
    r"linker command failed|undefined symbol: |Undefined symbols for"
)
_LINK_PLACE = re.compile(
    r"(?:^|: )(?P<file>[^\s:(]+\.\w+):(?P<line>\d+): undefined reference|(?:^|"
    r": )(?P<plain>[^\s:(/]+\.\w+):\(\.text[^)]*\): undefined reference"
)
_MAKEFILE = re.compile(r"^(?P<file>[^\s:][^:]{0,300}):(?P<line>\d+): \*\*\* ")
_MAKE = re.compile(r"^(?:g|re)?make(?:\[\d+\])?: \*\*\* ")
_MAKE_PLACE = re.compile(r"\*\*\* \[(?P<file>[^:\]]+):(?P<line>\d+): ")
_OTHER = re.compile(
    r"^ninja: (?:build stopped|error)|^error: (?:could not compile|linking with|aborting due to)|"
    r"^FAILURE: Build failed|^BUILD FAILED|^== Compilation error in file |^===> Compiling .* failed$|"
    r"^error: builder for '|^could not compile dependency |"
    r"^\[ERROR\] COMPILATION ERROR|error: command '\S+' failed with exit|Failed building wheel|^collect2: |"
    r"^compilation terminated\.|"
    r"^\d+ errors? generated\.$|^\d+ errors?$|^cc1\w*: |: fatal error: |^lto1: "
)
_NO_SOURCE = re.compile(r"^cc1\w*: fatal error: (?P<file>.+): No such file or directory$")
_NOT_COMPILED = re.compile(r"\.(?:pyi?|txt|log|json|md|ya?ml)$")


def _build(turn: Turn) -> Finding | None:
    if not turn.mentions(
        *(
            "error",
            "***",
            "undefined",
            "multiple definition",
            "cannot find -l",
            "# ",
            "compil",
            "vet:",
            "build",
            "non-zero",
        )
    ):
        return None
    go_tests = turn.mentions("[build failed]") and any(GO_NOT_BUILT.match(line) for line in turn.reported)
    lines = turn.reported if go_tests or _builds(turn) else turn.messages
    found: list[ErrorSite] = []
    fallback: list[ErrorSite] = []
    fired = False
    go = go_tests or any(c.program == "go" for c in turn.action.invocations) or any(x.startswith("# ") for x in lines)
    image: str | None = None
    for index, line in enumerate(lines):
        place = _place(turn, lines, index, go=go)
        if place is not None:
            (found if place.line else fallback).append(place)
            fired = True
        elif _LINK.search(line):
            fired = True
            match = _LINK_PLACE.search(line)
            if match:
                name = match.group("file") or match.group("plain")
                number = int(match.group("line")) if match.group("line") else None
                fallback.append(site(line, file=relative_file(turn, name), number=number))
        elif _MAKE.match(line) or (_MAKEFILE.match(line) and not line.startswith("configure")):
            fired = True
            fallback.extend(_make(turn, line))
        elif line.startswith("CMake Error") and not _is_about_arguments(line):
            fired = True
        elif image_failed(line):
            fired = True
            image = image or line
        elif _OTHER.search(line) and not _is_driver_argument(lines, line):
            fired = True
            missing = _NO_SOURCE.match(line)
            span = argument_span(turn, [missing.group("file")], in_code=False) if missing else None
            fallback += [site(line, span=span)] if span else []
    if not fired:
        return None
    if image is not None:
        found = _in_image(turn, lines, image, found)
    return Finding(tuple(dict.fromkeys([*found, *([] if found else fallback)]))[:20])


def _in_image(turn: Turn, lines: Sequence[str], image: str, found: list[ErrorSite]) -> list[ErrorSite]:
    """Return the sites of a failed build of an image: a file of the image is behind the instruction that read it."""
    instruction = failed_instruction(lines)
    if instruction is None:
        return found
    here = [each for each in found if each.file and not each.file.startswith("/")]
    where = site(image, file=relative_file(turn, instruction.file), number=instruction.line)
    return [*here, where, *(each for each in found if each not in here)]


def blames_file(turn: Turn) -> bool:
    """Return whether a compiler or a linker names a file that it could not build; the makefile's line says nothing of
    that."""
    found = _build(turn)
    return found is not None and any(each.file and not _MAKE.match(each.message or "") for each in found.sites)


_BUILDERS = frozenset(
    (
        *("make", "gmake", "cmake", "ninja", "meson", "bazel", "msbuild", "dotnet", "mvn", "mvnw", "gradle", "gradlew"),
        *("sbt", "mill", "tsc", "npm", "npx", "yarn", "pnpm", "bun", "deno", "lerna", "turbo", "nx", "go", "cargo"),
        *("mix", "rebar3", "swift", "zig", "dart", "flutter", "dune", "gleam"),
    )
)


def _builds(turn: Turn) -> bool:
    """Return whether the action calls a tool that reports compiler errors on standard output."""
    return any(c.program in _BUILDERS or builds_image(c) for c in turn.action.invocations)


def _place(turn: Turn, lines: Sequence[str], index: int, *, go: bool) -> ErrorSite | None:
    """Return the site of a compiler's error in line ``index``, or None."""
    line = lines[index]
    for found in diagnostics(lines, index):
        if not _NOT_COMPILED.search(found.group("file")) and is_own(turn, found.group("file")):
            return _located(turn, line, found)
    if go and (match := _GO.match(line)) and not re.search(r"(?:syntax error|expected '|--- FAIL)", line):
        return _located(turn, line, match)
    named = _CMAKE.match(line)
    if named and named.group("file"):
        return site(line, file=relative_file(turn, named.group("file")), number=int(named.group("line")))
    return None


def _located(turn: Turn, line: str, match: re.Match[str]) -> ErrorSite:
    named = match.groupdict()
    return site(
        line,
        file=relative_file(turn, named["file"]),
        number=int(named["line"]) if named.get("line") else None,
        column=int(named["column"]) if named.get("column") else None,
    )


def _make(turn: Turn, line: str) -> list[ErrorSite]:
    """Return the site of a make error: the line of the makefile, or the goal in the action that make cannot build."""
    match = _MAKEFILE.match(line) or _MAKE_PLACE.search(line)
    if match:
        return [site(line, file=relative_file(turn, match.group("file")), number=int(match.group("line")))]
    names = quoted(line) or [line.split("*** ", 1)[1].split(": ", 1)[0]]
    if "needed by" in line:
        return []
    span = argument_span(turn, names[:1], "make", in_code=False)
    return [site(line, span=span)] if span else []


def _is_about_arguments(line: str) -> bool:
    return re.search(r"does not exist|Unknown argument|--help|named generator", line) is not None


def _is_driver_argument(lines: Sequence[str], line: str) -> bool:
    """Return whether `gcc: fatal error: no input files` only follows a bad argument of the driver, so that nothing was
    built."""
    drivers = r"^(?:\S*/)?(?:gcc|g\+\+|clang|clang\+\+|cc|c\+\+)(?:-\d+)?: (?:fatal )?error: "
    if re.match(drivers, line) or line == "compilation terminated.":
        return any(re.match(drivers, x) for x in lines)
    return False


RULES = (
    Rule(
        "build.failed",
        ErrorKind.BUILD_ERROR,
        "A compiler's error line with file and line (gcc, clang, rustc, go, javac, tsc, ghc, dotnet, kotlin, scala, "
        "mix, deno ...), a linker's undefined reference, CMake Error, `make: ***`, or the failure line of a build tool "
        "or of the build of a container image.",
        "File, line and column of the first error; without one the makefile's line, or the goal in the action. In the "
        "build of an image, the instruction of the Dockerfile where the compiler names no relative file.",
        _build,
    ),
)
