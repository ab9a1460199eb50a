"""rfcs/proposals: short, numbered, linked; each cited thread and each sentence about today has its evidence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROPOSALS = ROOT / "rfcs" / "proposals"
PATCHES = ROOT / "rfcs" / "upstream"
PAGE = PROPOSALS / "README.md"
EVIDENCE = PROPOSALS / "evidence.md"
TEXTS = sorted(PROPOSALS.glob("[abc]-*.md"))
each_text = pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)

THREAD = re.compile(r"https://github\.com/([\w-]+/[\w-]+)/(?:issues|pull)/(\d+)")
TODAY = re.compile(r"<!-- today: (\w+) -->")
TESTS = (
    "tests/upstream_patches/test_today.py",
    "tests/upstream_patches/test_today_replies.py",
    "tests/upstream_envs/test_today_environments.py",
)
"""Where a sentence's `test_today_NAME` may be: those of all proposals."""


def words(path: Path) -> int:
    """Return the words of a text, code and tables included and comments not."""
    return len(re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.S).split())


def rows(text: str) -> list[list[str]]:
    """Return the cells of a text's table rows."""
    found = (line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in cells] for cells in found]


def lines_of_patches(letter: str) -> int:
    """Return how many lines a proposal's patches add or remove outside of tests."""
    counted = 0
    for patch in PATCHES.glob(f"{letter}*.patch"):
        file = ""
        for line in patch.read_text().splitlines():
            if line.startswith("diff --git "):
                file = line.rpartition(" b/")[2]
            elif re.match(r"[+-](?!\+\+ |-- )", line) and not file.startswith("tests/") and file:
                counted += 1
    return counted


def test_the_proposals_are_found() -> None:
    assert [path.stem for path in TEXTS] == ["a-no-lost-replies", "b-error-information", "c-repeat-safe-requests"]


@each_text
def test_a_proposal_has_at_most_2000_words_and_15_statements(path: Path) -> None:
    assert words(path) <= 2000
    numbers = re.findall(rf"^- \*\*{path.stem[0].upper()}-(\d+)\*\* ", path.read_text(), re.M)
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    assert 1 <= len(numbers) <= 15
    cited = {int(number) for number in re.findall(rf"\b{path.stem[0].upper()}-(\d+)\b", path.read_text())}
    assert cited == set(range(1, len(numbers) + 1))


@each_text
def test_a_proposal_has_the_sections_that_openenv_requires(path: Path) -> None:
    text = path.read_text()
    assert re.match(
        r"# RFC: .+\n\n\*\*Status\*\*: Draft\n\*\*Created\*\*: .+\n\*\*Authors\*\*: .+\n\*\*RFC ID\*\*: .+\n", text
    )
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    for heading in ("Summary", "Motivation", "Problem Statement", "Goals", "Design", "Architecture Overview"):
        assert heading in headings
    for heading in ("Core Abstractions", "Key Design Decisions", "Examples"):
        assert heading in headings
    decisions = text.partition("### Key Design Decisions")[2].partition("\n## ")[0].split("\n#### ")[1:]
    assert decisions
    for decision in decisions:
        assert re.findall(r"^- \*\*(.+?)\*\*:", decision, re.M) == ["Chosen Approach", "Rationale", "Trade-offs"]


def test_the_page_is_one_page_and_names_each_proposal_with_its_lines() -> None:
    assert words(PAGE) <= 500
    table = {cells[0].strip("[]")[0]: cells for cells in rows(PAGE.read_text()) if re.match(r"\[?[ABC]\. ", cells[0])}
    assert sorted(table) == ["A", "B", "C"]
    for letter, cells in table.items():
        counted = lines_of_patches(letter.lower())
        assert cells[2] == str(counted), letter
        assert 0 < counted <= 500, letter
        texts = [path.name for path in TEXTS if path.name.startswith(letter.lower())]
        assert re.findall(r"\]\((.+?)\)", cells[0]) == texts, letter


@each_text
def test_a_proposal_names_its_lines(path: Path) -> None:
    named = re.findall(r"\b(\d+) lines are added or removed outside of tests\b", path.read_text())
    assert named == [str(lines_of_patches(path.stem[0]))]


@pytest.mark.parametrize("path", [PAGE, EVIDENCE, *TEXTS], ids=lambda path: path.stem)
def test_every_cited_thread_is_in_the_evidence(path: Path) -> None:
    threads = rows(EVIDENCE.read_text().partition("## Threads")[2].partition("\n## ")[0])[1:]
    listed = [THREAD.findall(cells[0]) for cells in threads]
    assert all(len(one) == 1 for one in listed)
    assert len({one[0] for one in listed}) == len(listed)
    for _, state, asks, answer in threads:
        assert re.match(r"(issue|pull request), (open|closed|merged)|could not be read from here$", state)
        assert asks
        assert re.match(r"context|[ABC] |0\.10\.0 ", answer)
    assert set(THREAD.findall(path.read_text())) <= {one[0] for one in listed}


def test_every_sentence_about_today_has_a_test_and_every_test_a_sentence() -> None:
    said = {name for path in (PAGE, *TEXTS) for name in TODAY.findall(path.read_text())}
    table = rows(EVIDENCE.read_text().partition("## Sentences about today")[2])[1:]
    listed = {cells[0]: cells[2].strip("`") for cells in table}
    tests = {
        name: file
        for file in TESTS
        for name in re.findall(r"^(?:async )?def test_today_(\w+)", (ROOT / file).read_text(), re.M)
    }
    assert said
    assert listed == tests
    assert said == set(tests)


def test_the_guide_has_the_kinds_of_the_proposal() -> None:
    def kinds(text: str) -> list[tuple[str, str]]:
        table = re.split(r"The action failed because \|\n\+?\|---\|---\|\n", text)[1]
        return re.findall(r"^\+?\| `(\w+)` \| (.+) \|$", re.split(r"\n\+?\n", table)[0], re.M)

    proposed = kinds((PROPOSALS / "b-error-information.md").read_text())
    assert len(proposed) == 10
    assert proposed == kinds((PATCHES / "b-error-information.patch").read_text())
