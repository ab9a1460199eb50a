"""The documents: every relative link leads somewhere, and every ``errata`` command in them exists with its options."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from errata_server.cli.commands import cli

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "envs/*/README.md", "bench/*.md", "rfcs/**/*.md")
    for path in ROOT.glob(pattern)
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.S)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            broken.append(target)
    assert not broken


def test_each_picture_of_the_viewer_is_shown() -> None:
    shown = re.findall(r"\]\(pictures/([^)]+)\)", (ROOT / "docs" / "viewer.md").read_text())
    assert sorted(shown) == sorted(path.name for path in (ROOT / "docs" / "pictures").iterdir())


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_files_of_tests_that_are_named_are_there(path: Path) -> None:
    named = re.findall(r"`(tests/[\w./-]+\.(?:py|toml|md))", path.read_text())
    assert [
        file for file in named if file != "tests/verify.py" and not (ROOT / file).is_file()
    ] == []  # that is a task's


def commands(path: Path) -> Iterator[list[str]]:
    """Yield the words of each ``errata`` command line in an indented or fenced block."""
    text = path.read_text().replace("\\\n", " ")
    for line in text.splitlines():
        found = re.match(r"(?:    |\t)?(?:[A-Z_]+=\S+ )*errata ([a-z].*)$", line)
        if found is None:
            continue
        lexer = shlex.shlex(found[1], posix=True, punctuation_chars="|;&<>")
        lexer.commenters, lexer.whitespace_split = "#", True
        words = list(lexer)
        stop = next((at for at, word in enumerate(words) if word[0] in "|;&<>"), len(words))
        yield words[:stop]


@functools.cache
def root_command() -> Any:
    """The whole command line interface, which takes a tenth of a second to make."""
    return typer.main.get_command(cli)


def unknown(words: list[str]) -> str | None:
    """Return what a command line names that the command line interface does not have."""
    command = root_command()
    rest = list(words)
    while hasattr(command, "commands"):  # a group; newer versions of Typer have a Click of their own
        if not rest or rest[0].startswith("-"):
            break
        found = command.commands.get(rest[0])
        if found is None:
            return f"command {rest[0]!r}"
        command = found
        rest.pop(0)
    if command.context_settings.get("ignore_unknown_options"):
        return None  # it parses its own; its tests run them
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in rest:
        option = word.split("=")[0]
        if word.startswith("--") and word != "--" and option not in options | {"--help"}:
            return f"option {option!r} of {command.name!r}"
    return None


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_commands_exist(path: Path) -> None:
    assert [problem for words in commands(path) if (problem := unknown(words))] == []


def test_the_readme_shows_commands() -> None:
    assert {words[0] for words in commands(ROOT / "README.md")} >= {"serve", "replay", "episodes"}


def test_an_unknown_command_and_an_unknown_option_are_found() -> None:
    assert unknown(["serv", "x"]) == "command 'serv'"
    assert unknown(["serve", "x", "--databases", "y"]) == "option '--databases' of 'serve'"
    assert unknown(["journal", "verify", "--json"]) is None


def test_no_page_or_message_names_an_index_alone() -> None:
    """Before a release ``pip install 'openenv-errata[...]'`` finds nothing; pages say what works in a checkout too."""
    pages = [ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "pip install 'openenv-errata[" not in text, page
        for extra in re.findall(r"openenv-errata\[(\w+)\]", text):
            assert f"pip install '.[{extra}]'" in text, page
    for module in (path for folder in ("server", "trainer_adapter", "bench") for path in (ROOT / folder).rglob("*.py")):
        assert "openenv-errata[" not in module.read_text(encoding="utf-8"), module
