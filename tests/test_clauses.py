"""What code, tests and documents cite exists: clauses of rfcs/PROTOCOL.md, decisions in docs/decisions/.

A clause is cited as ``PROTOCOL D4``, several as ``PROTOCOL D4, D7``, ``PROTOCOL D2-D13``, ``PROTOCOL A, C and G``; a
decision as ``decision 51``. A letter and a number alone is refused: it could be either.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROTOCOL, DECISIONS = ROOT / "rfcs" / "PROTOCOL.md", ROOT / "docs" / "decisions"

CLAUSE = r"(?:[A-G][1-9]\d*(?:-[A-G][1-9]\d*)?|[A-G]|Terms)\b"
CITED = re.compile(rf"\bPROTOCOL\s+({CLAUSE}(?:(?:,\s+|\s+and\s+){CLAUSE})*)")
UNCITED = re.compile(r"\bPROTOCOL\b(?!\s+(?:[A-G]\d*\b|Terms\b)|[_.])")
DECIDED = re.compile(r"\b[Dd]ecisions?\s+(\d+[a-z]?(?:(?:,\s+|\s+and\s+)\d+[a-z]?\b)*)")
BARE = re.compile(r"(?<![\w%#./&+=$<\\-])[A-G]\d{1,3}[a-c]?\b(?![%=(-])")
ELSEWHERE = re.compile(r"\b(?:STYLE|DESIGN)\b(?: \d|\.md| section)|promise \d of the design")
"""Documents that are not in the repository."""

MENTIONS = re.compile(r"PROTOCOL|[Dd]ecision|STYLE|DESIGN|promise|[A-G]\d")
"""What the text of a file has somewhere if its prose has anything that the patterns above find."""

HEADING = re.compile(r"^# (\d+[a-z]?)\. (.+)$", re.M)
NO_PROSE = re.compile(r"noqa: .*|type: ignore\S*|ruff: .*")
HERE = {"tests/test_clauses.py"}


@functools.cache
def files() -> list[Path]:
    """Return the files that cite."""
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
    assert listed.returncode == 0, listed.stderr.decode()
    names = [name for name in listed.stdout.decode().split("\0") if name and name not in HERE]
    names = [name for name in names if name.endswith((".py", ".md", ".toml", ".sh", ".json", "Makefile"))]
    aside = ("tests/golden/", "tests/protocol/data/", "envs/terminal_env/tasks/")
    return [ROOT / name for name in names if not name.startswith(aside) and (ROOT / name).is_file()]


def prose(path: Path) -> str:
    """Return what of a file is written for people: comments and docstrings of code, a document without its code."""
    text = path.read_text()
    if path.suffix == ".py":
        return "\n".join(_of_python(text))
    if path.suffix == ".md":
        return re.sub(r"```.*?```|^(?: {4}|\t)[^\n]*$|`[^`\n]*`|\]\([^)]*\)", " ", text, flags=re.S | re.M)
    if path.suffix == ".json":
        return "\n".join(re.findall(r'"description": "(.*)"', text))
    return "\n".join(line.partition("#")[2] for line in text.splitlines())


def _of_python(text: str) -> Iterator[str]:
    if not MENTIONS.search(text):  # most files, and to read the prose of one takes 10 ms
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield NO_PROSE.sub("", token.string)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield re.sub(r"``.*?``|`[^`\n]*`", " ", node.value.value, flags=re.S)


@functools.cache
def clauses() -> set[str]:
    """Return the clauses and sections that the text has."""
    text = PROTOCOL.read_text()
    return {"Terms", *re.findall(r"^## ([A-G])\. ", text, re.M), *re.findall(r"^### ([A-G]\d+)\. ", text, re.M)}


@functools.cache
def decisions() -> dict[str, tuple[str, str]]:
    """Return the title and the file name of each decision by its number."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(DECISIONS.glob("[0-9]*.md")):
        heading = HEADING.match(path.read_text())
        assert heading and path.name.partition("-")[0].lstrip("0") == heading[1], (
            f"{path.name}: its first line is no title"
        )
        assert heading[1] not in found, f"two files for decision {heading[1]}"
        found[heading[1]] = heading[2], path.name
    return found


def cited(text: str) -> Iterator[str]:
    """Yield the clauses that a text cites, those within a range included."""
    for listing in CITED.findall(text):
        for item in re.findall(CLAUSE, listing):
            first, _, last = item.partition("-")
            if not last:
                yield first
            else:
                yield from (f"{first[0]}{n}" for n in range(int(first[1:]), int(last[1:]) + 1))
                assert first[0] == last[0] and int(first[1:]) < int(last[1:]), f"{item} is no range"


def wrong(text: str) -> list[str]:
    """Return what a text cites wrongly."""
    known, decided = clauses(), decisions()
    found = [f"PROTOCOL {name} does not exist" for name in cited(text) if name not in known]
    for listing in DECIDED.findall(text):
        numbers = re.findall(r"\d+[a-z]?", listing)
        found += [f"decision {number} does not exist" for number in numbers if number not in decided]
    found += [f"{m[0]!r} names no clause: PROTOCOL D4" for m in UNCITED.finditer(text)]
    found += [f"{m[0]!r} is in no document of this repository" for m in ELSEWHERE.finditer(text)]
    rest = CITED.sub("", text)
    return found + [f"{m[0]} alone: write PROTOCOL {m[0]} or decision {m[0][1:]}" for m in BARE.finditer(rest)]


@pytest.mark.parametrize("room", sorted({path.relative_to(ROOT).parts[0] for path in files()}))
def test_what_is_cited_exists(room: str) -> None:
    found = {}
    for path in files():
        if path.relative_to(ROOT).parts[0] == room and path != PROTOCOL and (mistakes := wrong(prose(path))):
            found[path.relative_to(ROOT).as_posix()] = mistakes
    assert not found


def test_the_index_lists_every_decision_in_order() -> None:
    rows = re.findall(r"^\| \[(\d+[a-z]?)\]\((.+?)\) \| (.+) \|$", (DECISIONS / "README.md").read_text(), re.M)
    assert rows == [(number, name, title) for number, (title, name) in decisions().items()]


@functools.cache
def statements() -> set[str]:
    """Return the numbers of the statements that the notes make."""
    texts = (path.read_text() for path in sorted(PROTOCOL.parent.glob("notes/*.md")))
    return {name for text in texts for name in re.findall(r"^- \*\*(R-\d{3}-\d+)\*\*", text, re.M)}


def test_every_statement_that_is_cited_exists() -> None:
    own = {path: set(re.findall(r"\bR-\d{3}-\d+\b", path.read_text())) for path in files()}
    wrong = {
        path.relative_to(ROOT).as_posix(): sorted(found - statements())
        for path, found in own.items()
        if found - statements()
    }
    assert not wrong


def test_every_statement_belongs_to_a_clause() -> None:
    rows = re.findall(r"^\| ([A-F]\d+(?:, [A-F]\d+)*) \| (R-[^|]+) \|$", PROTOCOL.read_text(), re.M)
    assert {clause for row, _ in rows for clause in row.split(", ")} <= clauses()
    assert {name for _, named in rows for name in named.split(", ")} == statements()


def test_the_text_names_its_own_clauses() -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", " ", PROTOCOL.read_text(), flags=re.S)
    assert set(re.findall(r"(?<![\w.])[A-G][1-9]\d*\b", text)) <= clauses()
    assert not [mistake for mistake in wrong(text) if mistake.startswith("decision ")]


def test_clauses_have_one_place_each_and_stand_in_order() -> None:
    found = re.findall(r"^##+ ([A-G]\d*)\. ", PROTOCOL.read_text(), re.M)
    assert found == sorted(set(found), key=lambda name: (name[0], int(name[1:] or 0)))


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("held (PROTOCOL D4, D7)", None),
        ("held (PROTOCOL D2-D10 and D12), as decisions 51 and 84b say", None),
        ("PROTOCOL\n    D4 wraps, and so does decision\n    51", None),
        ("the sections PROTOCOL A, C and G, and PROTOCOL Terms", None),
        ("a regular expression %D9%A3, a colour #D4D4, issue F401x", None),
        ("held (D4)", "D4 alone: write PROTOCOL D4 or decision 4"),
        ("as D51 has it", "D51 alone: write PROTOCOL D51 or decision 51"),
        ("held (PROTOCOL D4) and D7's too", "D7 alone"),
        ("held (PROTOCOL D44)", "PROTOCOL D44 does not exist"),
        ("held (PROTOCOL D2-D44)", "PROTOCOL D15 does not exist"),
        ("held (PROTOCOL, somewhere)", "'PROTOCOL' names no clause"),
        ("as decision 999 has it", "decision 999 does not exist"),
        ("as decisions 51 and 999 have it", "decision 999 does not exist"),
        ("house style (STYLE 7)", "'STYLE 7' is in no document of this repository"),
    ],
)
def test_a_wrong_citation_is_found(text: str, mistake: str | None) -> None:
    found = wrong(text)
    assert (not found) if mistake is None else any(one.startswith(mistake) for one in found), found


def test_comments_docstrings_and_documents_are_read_and_code_is_not(tmp_path: Path) -> None:
    code = tmp_path / "a.py"
    code.write_text(
        '"""One D1."""\nx = "D2"  # three D3, noqa: E402\n\n\nclass A:\n    y = 1\n    """Four D4, `D5`."""\n'
    )
    assert sorted(one[:2] for one in wrong(prose(code))) == ["D1", "D3", "D4"]
    page = tmp_path / "a.md"
    page.write_text("One D1, `D2`, [three D3](D4.md).\n\n    D5\n\n```\nD6\n```\n")
    assert sorted(one[:2] for one in wrong(prose(page))) == ["D1", "D3"]
    other = tmp_path / "a.sh"
    other.write_text("echo D1 # two D2\n")
    assert [one[:2] for one in wrong(prose(other))] == ["D2"]
