"""How compilers report an error: the line that says so, and the line that names the place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_PLACE = r"(?P<file>[^\s:()\[\]]{1,400}):(?P<line>\d+)(?::(?P<column>\d+))?"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One form of a compiler's error.

    Args:
        tools: The compilers that print it.
        error: Matches the line of the error, with the groups ``file``, ``line`` and ``column`` if it names the place.
        place: Matches the line that names the place; None if `error` does.
        within: How many lines below the error that line is looked for; above it if negative.
    """

    tools: str
    error: re.Pattern[str]
    place: re.Pattern[str] | None = None
    within: int = 0

    def find(self, lines: Sequence[str], index: int) -> re.Match[str] | None:
        """Return the match that names the place of the error in line ``index``; None if that line is no such error."""
        match = self.error.match(lines[index])
        if match is None or self.place is None:
            return match
        step = 1 if self.within > 0 else -1
        for at in range(index + step, max(-1, min(len(lines), index + self.within + step)), step):
            if found := self.place.match(lines[at]):
                return found
            if _NEXT.match(lines[at]):
                break
        return None


_NEXT = re.compile(r"\s*(?:\*\* \(\w+\) )?(?:error|warning)(?:\[\w+\])?: ", re.IGNORECASE)
"""The line of another error or of a warning, whose place is not this one's."""


def _diagnostic(tools: str, error: str, place: str | None = None, within: int = 0) -> Diagnostic:
    return Diagnostic(tools, re.compile(error), re.compile(place) if place else None, within)


DIAGNOSTICS = (
    _diagnostic(
        "tsc, vue-tsc",
        r"(?:Error: )?(?P<file>[^\s(:][^(:]{0,300})[(:](?P<line>\d+)[,:](?P<column>\d+)\)?(?::| -) error TS\d+",
    ),
    _diagnostic(
        "msbuild, dotnet",
        r"\s*(?P<file>[^\s(:][^(:]{0,300})\((?P<line>\d+)(?:,(?P<column>\d+))?(?:,\d+,\d+)?\) ?: "
        r"(?:fatal )?error [A-Z]+\d+: ",
    ),
    _diagnostic("maven", r"\[ERROR\] (?:file://)?(?P<file>/\S+\.\w+): ?[\[(](?P<line>\d+), ?(?P<column>\d+)[\])]"),
    _diagnostic(
        "kotlin",
        r"e: (?:\[\w+\] )?(?:file://)?(?P<file>/[^:()]{1,400}\.kts?):(?: \()?(?P<line>\d+)[:,] ?(?P<column>\d+)",
    ),
    _diagnostic(
        "sbt, scala",
        r"\[(?:error|ERROR)\] (?:-- .{0,80}?Error: )?(?P<file>[^\s:]{1,400}\.(?:scala|sc|sbt|java|kt)):(?P<line>\d+)"
        r"(?::(?P<column>\d+))?(?:: | |$)",
    ),
    _diagnostic(
        "gcc, clang, javac, ghc, swiftc, zig, dart",
        r"(?:file://)?(?P<file>[^\s:][^:\n]{0,400}):(?P<line>\d+):(?:(?P<column>\d+):)? "
        r"(?:fatal |internal compiler )?[Ee]rror\b:?",
    ),
    _diagnostic("groovy", r"\s*(?:build file ')?(?P<file>[^\s:']{1,400}\.(?:groovy|gradle))'?: (?P<line>\d+): "),
    _diagnostic(
        "gradle",
        r"(?:Build|Settings|Initialization script|Script)(?: file)? '(?P<file>[^']{1,400})' line: (?P<line>\d+)$",
    ),
    _diagnostic("mix", rf"\*\* \(CompileError\) {_PLACE}: "),
    _diagnostic(
        "mix, gleam, rustc",
        r"\s*(?:\*\* \(\w+\) )?error(?:\[\w+\])?: ",
        rf"\s*(?:-->|[┌└╭]─+\[?) ?{_PLACE}\]?(?::| |$)",
        12,
    ),
    _diagnostic("mix, another exception", r"== Compilation error in file \S+ ==$", rf"\s+{_PLACE}: ", 12),
    _diagnostic("mix, a file", r"== Compilation error in file (?P<file>\S+) ==$"),
    _diagnostic("erlc, rebar3", r"(?P<file>[^\s:]{1,400}\.[ehxy]rl):(?P<line>\d+):(?:(?P<column>\d+):)? (?!Warning)"),
    _diagnostic("rebar3, a file", r"===> Compiling (?P<file>\S+) failed$"),
    _diagnostic("deno", r"(?:error: )?TS\d+ \[ERROR\]: ", rf"\s+at (?:file://)?{_PLACE}$", 20),
    _diagnostic("next, svelte-check", r"(?:Type e|E)rror: ", rf"{_PLACE}$", -1),
    _diagnostic("esbuild, angular", r"[✘X] \[ERROR\] ", rf"\s+{_PLACE}:$", 6),
    _diagnostic("webpack", r"(?:\[tsl\] )?ERROR in (?P<file>[^\s:()]{1,400})[ :(](?P<line>\d+)[:,](?P<column>\d+)"),
    _diagnostic(
        "vite, rollup",
        r"error during build:",
        r"(?:file: )?(?P<file>[^\s:()]{1,400})(?::| \()(?P<line>\d+):(?P<column>\d+)\)?",
        8,
    ),
    _diagnostic("dart", rf"\s*error [•-] (?:.{{1,300}} [•-] )?{_PLACE}(?: |$)"),
    _diagnostic(
        "nim, dmd, fpc",
        r"(?P<file>[^\s(:]{1,400}\.\w+)\((?P<line>\d+)(?:[,:] ?(?P<column>\d+))?\):? (?:fatal )?[Ee]rror\b",
    ),
    _diagnostic("crystal", r"Error: ", rf"In {_PLACE}$", -12),
    _diagnostic(
        "ocaml, dune",
        r"Error\b",
        r'File "(?P<file>[^"]{1,400})", lines? (?P<line>\d+)(?:-\d+)?, characters (?P<column>\d+)-\d+:$',
        -8,
    ),
    _diagnostic(
        "gfortran", r"(?:Fatal )?Error: ", r"(?P<file>\S{1,400}\.[fF]\w{0,3}):(?P<line>\d+):(?P<column>\d+):$", -6
    ),
    _diagnostic("terraform", r"Error: ", r"\s+on (?P<file>\S{1,400}) line (?P<line>\d+)(?:,|:|$)", 6),
)

_ANY = re.compile("|".join(re.sub(r"\?P<\w+>", "?:", each.error.pattern) for each in DIAGNOSTICS))


def diagnostics(lines: Sequence[str], index: int) -> list[re.Match[str]]:
    """Return the matches that may name the place of the error in line ``index``, in order of `DIAGNOSTICS`."""
    if not _ANY.match(lines[index]):
        return []
    return [match for each in DIAGNOSTICS if (match := each.find(lines, index))]
