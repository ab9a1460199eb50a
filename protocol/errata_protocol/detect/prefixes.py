"""Takes off what build tools put before each line of the programs that they run: ``#14 488.1 ``, ``web-1  | ``.

The rules then read the output as the program printed it. One pass takes the prefixes of all forms off, and puts the
lines of one source together where several ran at once. A tool may run another one: there are `MAX_PASSES` passes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_PASSES = 3
MIN_LINES = 3
"""How many lines of one source have a prefix that other text might have, too."""


@dataclass(frozen=True, slots=True)
class Form:
    """One form of prefix.

    Args:
        tools: The tools that print it.
        prefix: Matches the prefix, with the group ``source`` if lines of several sources are mixed.
        shown_by: Matches a line that only these tools print; with a group ``source``, the prefix counts only for the
            sources that such lines name. None if the prefix cannot be anything else.
        is_common: Whether the prefix counts only where most lines have it, because single lines of other programs may
            begin like that.
        below: Matches the line above a block of lines with the prefix, outside of which it does not count.
    """

    tools: str
    prefix: re.Pattern[str]
    shown_by: re.Pattern[str] | None = None
    is_common: bool = False
    below: re.Pattern[str] | None = None


_LABEL = r"[@\w][\w@/.-]{0,200}"
FORMS = (
    Form("docker build", re.compile(r"#(?P<source>\d+) \d+\.\d+(?: |$)| => => # ?")),
    Form("docker build, a failed step", re.compile(r"\d+\.\d+(?: |$)"), below=re.compile(r" > \[")),
    Form("pnpm, terraform", re.compile(r"│(?: |$)(?!.*│$)")),
    Form(
        "pnpm -r",
        re.compile(r"(?P<source>\S{1,200} [\w:.-]{1,100}): ?"),
        re.compile(r"^(?P<source>\S{1,200} [\w:.-]{1,100})\$ ", re.MULTILINE),
    ),
    Form(
        "pnpm -r, its end",
        re.compile(r"(?P<source>[\w@./-]{1,200} [a-z][\w:.-]{0,100}):(?: |$)"),
        re.compile(r"^ ?(?:ELIFECYCLE|ERR_PNPM_)", re.MULTILINE),
        is_common=True,
    ),
    Form(
        "turbo",
        re.compile(rf"(?P<source>{_LABEL}:[A-Za-z][\w:-]*):(?: |$)"),
        re.compile(rf"^(?P<source>{_LABEL}:[A-Za-z][\w:-]*): cache (?:miss|hit|bypass)", re.MULTILINE),
    ),
    Form("turbo, its end", re.compile(rf"(?P<source>{_LABEL}:[A-Za-z][\w-]*):(?: |$)"), is_common=True),
    Form(
        "lerna, nx",
        re.compile(rf"(?P<source>{_LABEL}):(?: |$)"),
        re.compile(r"^lerna (?:notice|info|ERR!) |^[ >]*NX   ", re.MULTILINE),
        is_common=True,
    ),
    Form("lerna, a scope", re.compile(r"(?P<source>@[\w.-]{1,100}/[\w.-]{1,100}):(?: |$)"), is_common=True),
    Form("yarn", re.compile(r"➤ YN\d{4}: (?:[│┌└](?: |$))?")),
    Form(
        "concurrently, npm-run-all, yarn workspaces",
        re.compile(
            r"\[(?P<source>\d+|(?=[^\]\n]*[a-z])(?!(?:error|info|warn|debug|ok|pass|fail)\w*\])[@\w][^\]\[\n%]*)\]"
            r":?(?: |$)"
        ),
        is_common=True,
    ),
    Form(
        "docker compose, foreman, earthly",
        re.compile(r"(?:\d\d:\d\d:\d\d )?(?P<source> *\+[\w-]{1,100}|[A-Za-z][\w.:-]{0,200}) +\|(?: |$)"),
        is_common=True,
    ),
    Form(
        "a CI's log",
        re.compile(
            r"(?:[^\t]{1,200}\t[^\t]{1,200}\t)?\[?\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3,9}Z\]?(?: |$)(?:##\[\w+\])?"
        ),
        is_common=True,
    ),
    Form("ant", re.compile(r" {1,20}\[\w{1,20}\](?: |$)"), re.compile(r"^(?:Buildfile: |BUILD FAILED$)", re.MULTILINE)),
    Form("Gradle with CMake", re.compile(r"C/C\+\+: ")),
    Form(
        "Gradle, a cause",
        re.compile(r"  (?=\S| )"),
        re.compile(r"^\* What went wrong:", re.MULTILINE),
        below=re.compile(r"> "),
    ),
    Form("nix", re.compile(r" {1,20}>(?: |$)"), below=re.compile(r" *(?:> )?last \d+ log lines:")),
)


def _anywhere(pattern: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile(f"^(?:{pattern.pattern})", re.MULTILINE)


_HINTS = tuple((form, _anywhere(form.prefix), _anywhere(form.below) if form.below else None) for form in FORMS)
"""Each form with what some line of the text must match: one search is cheaper than a look at each line."""


def without_prefixes(stdout: Sequence[str], stderr: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the lines of both streams without the prefixes of the tools that passed them on.

    Args:
        stdout: Lines of standard output, bounded in number and length.
        stderr: Lines of standard error, bounded in the same way.
    """
    streams = (tuple(stdout), tuple(stderr))
    for _ in range(MAX_PASSES):
        shown = list(_shown("\n".join((*streams[0], *streams[1]))))
        if not shown:
            break
        taken = (_taken(streams[0], shown), _taken(streams[1], shown))
        if taken == streams:
            break
        streams = taken
    return streams


def _shown(text: str) -> Iterator[tuple[Form, set[str] | None]]:
    """Yield the forms that may occur in the text, each with the sources whose prefix counts; None for any source."""
    for form, prefix, below in _HINTS:
        if not prefix.search(text) or (below and not below.search(text)):
            continue
        if form.shown_by is None:
            yield form, None
        elif "source" in form.shown_by.groupindex:
            if sources := {match["source"] for match in form.shown_by.finditer(text)}:
                yield form, sources
        elif form.shown_by.search(text):
            yield form, None


def _taken(lines: tuple[str, ...], forms: Sequence[tuple[Form, set[str] | None]]) -> tuple[str, ...]:
    """Return the lines without one prefix each; those of one source stand together in each run of lines with one."""
    usual = [(form, sources) for form, sources in forms if not form.is_common or _is_common(form, lines)]
    if not usual:
        return lines
    taken: list[str] = []
    run: dict[str, list[str]] = {}
    for source, line in _split(lines, usual):
        if source is None:
            taken.extend(each for part in run.values() for each in part)
            run.clear()
            taken.append(line)
        else:
            run.setdefault(source, []).append(line)
    taken.extend(each for part in run.values() for each in part)
    return tuple(taken)


def _split(lines: Sequence[str], forms: Sequence[tuple[Form, set[str] | None]]) -> Iterator[tuple[str | None, str]]:
    """Yield the source of each line and the line without its prefix; None and the line if it has no prefix."""
    block: Form | None = None
    for line in lines:
        found = None
        for form, sources in forms:
            if form.below is not None and form is not block:
                continue
            match = form.prefix.match(line)
            source = (match.groupdict().get("source") or "") if match else ""
            if match and match.end() and (sources is None or not source or source in sources):
                found = source.strip(), line[match.end() :]
                break
        if found is None and line:
            block = next((form for form, _ in forms if form.below is not None and form.below.match(line)), None)
        yield found or (None, line)


def _is_common(form: Form, lines: Sequence[str]) -> bool:
    """Return whether most lines that are not blank have the prefix, each source at least `MIN_LINES` of them."""
    matches = [match for line in lines if line and (match := form.prefix.match(line))]
    counts = Counter(match.groupdict().get("source") or "" for match in matches)
    often = sum(count for count in counts.values() if count >= MIN_LINES)
    return often > 0 and often * 2 >= sum(1 for line in lines if line)
