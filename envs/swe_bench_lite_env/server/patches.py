"""Finds the hunk of a patch that ``git apply`` refused, from the patch and git's output."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from errata_protocol.markers import Detection, ErrorKind, ErrorSite

PATCH_CHARACTERS = 4 * 1024**2
"""Longest patch that ``apply_patch`` takes, code points."""
COMMAND = "cd {root} && exec git apply --whitespace=nowarn -"
"""Applies the patch on standard input: all of it, or nothing."""

_CHOPPED = 3
"""Blank lines at the end of a patch that patch(1) takes for lost, at most."""
_SITES = 20
_SAID = 200
"""Most lines of the message."""

# Numbers of more than nine digits count no lines, and Python refuses to read those of more than 4,300.
_HUNK = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_FAILED = re.compile(r"^error: patch failed: (?P<file>.+):(?P<line>\d{1,9})$")
_REFUSED = re.compile(
    r"^error: (?P<file>[^:]+): (?P<why>No such file or directory|already exists in working directory|"
    r"wrong type|patch does not apply|has type \d+, expected \d+|does not exist in index|"
    r"is beyond a symbolic link|cannot read the current contents.*)"
)
_CORRUPT = re.compile(
    r"(?:corrupt patch|patch fragment without header|corrupt binary patch) at (?:line |[^:]*:)(\d{1,9})(?!\d)"
)
_HEADER = re.compile(r"lacks filename information .*\(line (\d{1,9})\)")


@dataclass(frozen=True, slots=True)
class Hunk:
    """One hunk of a unified diff.

    Args:
        file: File that the hunk changes, relative to the root of the repository.
        number: Its position among the hunks of that file, from 1.
        line: Line of the old file at which the hunk begins, from 1.
        start: Position of the hunk's header in the text of the patch, in code points.
        end: Position behind the hunk's last line, in code points.
        first_line: Line of the hunk's header in the patch, from 1.
        last_line: Last line of the hunk in the patch, from 1.
        problem: Error in the line counts of its header, in words; empty if they are right.
    """

    file: str
    number: int
    line: int
    start: int
    end: int
    first_line: int
    last_line: int
    problem: str = ""


def hunks(patch: str) -> list[Hunk]:
    """Return the hunks of a unified diff in their order, those with wrong counts too."""
    found: list[Hunk] = []
    file, number = "", 0
    lines = patch.split("\n")
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line) + 1)
    at = 0
    while at < len(lines):
        line = lines[at]
        header = _HUNK.match(line)
        if header is None:
            if line.startswith(("--- ", "+++ ")):
                name = _name(line[4:])
                if name:
                    file = name
                number = 0
            at += 1
            continue
        old, new = (int(header[2] or 1)), (int(header[4] or 1))
        number += 1
        end = at + 1
        seen_old = seen_new = 0
        while end < len(lines) and (
            lines[end][:1] in (" ", "+", "-", "\\") or (not lines[end] and end < len(lines) - 1)
        ):
            if seen_old >= old and seen_new >= new and lines[end].startswith(("--- ", "diff ")):
                break
            sign = lines[end][:1]
            seen_old += sign in (" ", "-", "")
            seen_new += sign in (" ", "+", "")
            end += 1
        wrong = (seen_old, seen_new) != (old, new)
        problem = f"its header says {old} old and {new} new lines, it has {seen_old} and {seen_new}" if wrong else ""
        found.append(Hunk(file, number, int(header[1]), offsets[at], offsets[end] - 1, at + 1, end, problem))
        at = end
    return found


def applicable(patch: str) -> bytes:
    """Return a patch of a data set or a prediction as programs that apply it read it.

    A patch that was stripped lost its last newline, and the blank lines of context before it: it has them again. The
    benchmark's harness takes such patches, too: it hands them to a shell's here-document or to patch(1).
    """
    text = patch if patch.endswith("\n") else patch + "\n"
    for whole in (text, *(text + " \n" * lines for lines in range(1, _CHOPPED + 1))):
        if not any(hunk.problem for hunk in hunks(whole)[-1:]):
            return whole.encode("utf-8", "surrogateescape")
    return text.encode("utf-8", "surrogateescape")


def refusal(patch: str, stderr: str) -> tuple[str, Detection]:
    """Return the message for the agent about a patch that did not apply, and its marker.

    Args:
        patch: The patch, as the agent wrote it.
        stderr: Standard error of ``git apply``.
    """
    parts = hunks(patch)
    by_file: dict[str, Hunk] = {}
    by_line: dict[tuple[str, int], Hunk] = {}
    for part in parts:
        by_file.setdefault(part.file, part)
        by_line.setdefault((part.file, part.line), part)
    sites: list[ErrorSite] = []
    said: list[str] = []
    failed: set[str] = set()
    for line in stderr.splitlines():
        if len(said) >= _SAID:
            said.append("... and so on")
            break
        if match := _FAILED.match(line):
            file, number = match["file"], int(match["line"])
            failed.add(file)
            hunk = by_line.get((file, number))
            text = f"hunk {hunk.number} of {file}, at line {number}, does not match the file" if hunk else line
            sites.append(_site(text, hunk, file, number))
        elif match := _REFUSED.match(line):
            if match["file"] in failed:
                continue
            hunk = by_file.get(match["file"])
            text = f"{match['file']}: {match['why']}"
            sites.append(_site(text, hunk, match["file"], None))
        elif match := _CORRUPT.search(line) or _HEADER.search(line):
            number = int(match[1])
            hunk = _around(parts, number)
            why = hunk.problem if hunk and hunk.problem else line.removeprefix("error: ")
            text = f"hunk {hunk.number} of {hunk.file}, line {number} of the patch: {why}" if hunk else line
            sites.append(_site(text, hunk, hunk.file if hunk else None, None))
        else:
            continue
        said.append(text)
    if not said:
        text = "no diff was found in the patch: write it as `git diff` prints it" if not parts else stderr.strip()[:500]
        said.append(text or "git apply refused the patch")
        sites.append(_site(said[0], None, None, None, whole=len(patch)))
    return "\n".join([*said, "nothing was changed"]), Detection.of(ErrorKind.PATCH_FAILED, *sites[:_SITES])


def _around(parts: Sequence[Hunk], number: int) -> Hunk | None:
    """Return the first hunk that has a line of the patch, or ends before it: git names the line behind its stop."""
    at = bisect_right(parts, number, key=lambda hunk: hunk.first_line) - 1
    for hunk in parts[max(0, at - 1) : at + 1]:
        if hunk.first_line <= number <= hunk.last_line + 1:
            return hunk
    return None


def _site(message: str, hunk: Hunk | None, file: str | None, line: int | None, whole: int = 0) -> ErrorSite:
    span = (hunk.start, hunk.end) if hunk else (0, whole) if whole else None
    return ErrorSite(
        action_field="patch" if span else None,
        action_span=span,
        file=file,
        line=line or None,
        source="message",
        message=message[:300],
    )


def _name(text: str) -> str:
    text = text.split("\t", 1)[0].rstrip("\r")
    if text == "/dev/null":
        return ""
    return text[2:] if text.startswith(("a/", "b/")) else text
