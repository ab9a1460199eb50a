"""rfcs/: the notes' statements are numbered and tagged, their exchanges are real bytes, the index is complete."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import uvicorn

from errata_protocol.markers import HINT_TEMPLATE_KEYS, ErrorMarkers

from .protocol_exchanges import NOTES, TEXT, Exchange, exchanges, played

ROOT = Path(__file__).parents[1]
SCHEMAS = ROOT / "rfcs" / "schemas"
INDEX = ROOT / "rfcs" / "notes" / "README.md"
PROPOSALS = sorted((ROOT / "rfcs" / "proposals").glob("[abc]-*.md"))
EXCHANGES = [(path, exchange) for path in NOTES for exchange in exchanges(path.read_text())]
each_note = pytest.mark.parametrize("path", [path for path in NOTES if path != INDEX], ids=lambda path: path.stem)

STATEMENT = re.compile(r"^- \*\*(R-(\d{3})-(\d+))\*\* (?:\(([^)]*)\) )?(.*?)(?=^- \*\*R-|^\s*$|^#)", re.M | re.S)
TAG = re.compile(r"(?:wire|fault|inspection: \S.*)", re.S)


def prose(text: str) -> str:
    """Return a text without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", " ", text, flags=re.S)


def numbers(text: str) -> list[tuple[str, int]]:
    """Return (group, number) of each statement of a note, in their order."""
    return [(group, int(number)) for _, group, number, *_ in STATEMENT.findall(prose(text))]


def problems(text: str) -> list[str]:
    """Return what is wrong with the statements of a note."""
    found = STATEMENT.findall(prose(text))
    wrong = [f"{name} has no tag" for name, _, _, tag, _ in found if not TAG.fullmatch(tag)]
    wrong += [f"{name} says neither MUST nor SHOULD" for name, *_, said in found if not re.search("MUST|SHOULD", said)]
    if len({group for group, _ in numbers(text)}) > 1:
        wrong.append("its statements are of two groups")
    if numbers(text) != sorted(set(numbers(text))):
        wrong.append("the numbers do not grow")
    rest = STATEMENT.sub("", prose(text))
    return wrong + [f"{m[0]!r} outside a statement" for m in re.finditer(r"\b(?:MUST|SHOULD|REQUIRED|SHALL)\b.*", rest)]


@each_note
def test_statements_are_tagged_and_in_order(path: Path) -> None:
    assert problems(path.read_text()) == []


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("- **R-014-1** (wire) It MUST.\n- **R-014-4** (fault) It\n  SHOULD.\n\nAs R-014-2 says.", None),
        ("- **R-014-1** It MUST.\n", "R-014-1 has no tag"),
        ("- **R-014-1** (inspection) It MUST.\n", "R-014-1 has no tag"),
        ("- **R-014-1** (wire) It does.\n", "R-014-1 says neither MUST nor SHOULD"),
        ("- **R-014-2** (wire) It MUST.\n- **R-014-1** (wire) It MUST.\n", "the numbers do not grow"),
        ("- **R-014-1** (wire) It MUST.\n- **R-014-1** (wire) It MUST.\n", "the numbers do not grow"),
        ("- **R-014-1** (wire) It MUST.\n- **R-015-1** (wire) It MUST.\n", "its statements are of two groups"),
        ("It MUST.\n", "'MUST.' outside a statement"),
    ],
)
def test_a_wrong_statement_is_found(text: str, mistake: str | None) -> None:
    assert problems(text) == ([mistake] if mistake else [])


def test_no_number_is_missing_or_given_twice() -> None:
    found = sorted(number for path in NOTES for number in numbers(path.read_text()))
    assert found == [(group, n) for group, last in (("014", 20), ("015", 31), ("016", 51)) for n in range(1, last + 1)]


@each_note
def test_a_note_begins_with_who_needs_it_and_what_it_costs(path: Path) -> None:
    text = path.read_text()
    assert re.match(r"# .+\n\nInformational\. ", text)
    headings = re.findall(r"^## (.+)$", prose(text), re.M)
    assert headings == ["Which deployments need it", "What it costs", "Statements"]


def ranges(text: str) -> list[tuple[str, int]]:
    """Return the statements that a cell such as ``R-016-1 to 33, 38`` names."""
    group, listed = re.fullmatch(r"R-(\d{3})-(.+)", text).groups()  # type: ignore[union-attr]
    found = []
    for one in listed.split(", "):
        first, _, last = one.partition(" to ")
        found += [(group, n) for n in range(int(first), int(last or first) + 1)]
    return found


def test_the_index_names_each_note_and_its_statements() -> None:
    rows = dict(re.findall(r"^\| \[[^]]+\]\((.+?)\) \| (R-.+?) \|", INDEX.read_text(), re.M))
    assert {name: ranges(cell) for name, cell in rows.items()} == {
        path.name: numbers(path.read_text()) for path in NOTES if path != INDEX
    }


def test_openenvs_index_gets_a_row_for_each_proposal() -> None:
    rows = re.findall(r"^- \[(NNN-[\w-]+\.md)\]\(\./(.+?)\) - (.+?): ", (ROOT / "rfcs" / "README.md").read_text(), re.M)
    titles = [re.match(r"# RFC: (.+)\n", path.read_text())[1] for path in PROPOSALS]  # type: ignore[index]
    names = [f"NNN-{path.name[2:]}" for path in PROPOSALS]
    assert sorted(rows) == sorted(zip(names, names, titles, strict=True))


def test_the_kinds_and_keys_are_ours_in_our_order() -> None:
    (note,) = (path for path in NOTES if path.name == "error-markers.md")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| `([\w.]+)` \|$", note.read_text(), re.M)
    assert rows == [(kind.value, key) for kind, key in HINT_TEMPLATE_KEYS.items()]


# -- exchanges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "exchange"), EXCHANGES, ids=[e.name for _, e in EXCHANGES])
async def test_a_server_says_what_the_note_says(path: Path, exchange: Exchange) -> None:
    assert await played(exchange) == list(exchange.lines), (
        "python scripts/protocol_examples.py writes the server's lines"
    )


@each_note
def test_each_block_of_text_is_played(path: Path) -> None:
    text = path.read_text()
    assert len(exchanges(text)) == text.count("```") / 2


def frames(exchange: Exchange) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name of the schema, value) of each part of an exchange that a schema describes."""
    asked = None
    for line in exchange.lines:
        if (found := re.match(r"HTTP --> POST \S+/fork (.*)", line)) is not None:
            asked = json.loads(found[1])
        elif (found := re.match(r"HTTP <-- 200 (\{.*)", line)) is not None and asked is not None:
            yield from (("http.ForkRequest", asked), ("http.ForkReply", json.loads(found[1])))
            asked = None
        elif (found := re.match(r"\[\d\] <-- (\{.*)", line)) is not None:
            frame = json.loads(found[1])
            if "sid" in frame or "q" in frame:
                continue  # multiplexed: the models say more
            if frame["type"] == "state_at":
                yield "plain.StateAtFrame", frame
            elif frame["type"] == "capabilities":
                yield "plain.Capabilities", frame["data"]
            yield from (("observation.ErrorMarkers", marker) for marker in markers(frame["data"]))


def markers(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects with all five marker fields in a value."""
    if isinstance(value, dict):
        if set(ErrorMarkers.model_fields) <= set(value):
            yield value
        for one in value.values():
            yield from markers(one)


def test_examples_validate_and_have_one_of_each_schema() -> None:
    shown = set()
    for exchange in (*exchanges(TEXT.read_text()), *(exchange for _, exchange in EXCHANGES)):
        for name, value in frames(exchange):
            jsonschema.validate(value, json.loads((SCHEMAS / f"{name}.json").read_text()))
            shown.add(name)
    assert shown == {
        "http.ForkRequest",
        "http.ForkReply",
        "observation.ErrorMarkers",
        "plain.Capabilities",
        "plain.StateAtFrame",
    }


# -- servers ----------------------------------------------------------------------------------------------------------


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an application on a port of this machine; yield its address."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            deadline = time.monotonic() + 60
            while not server.started and time.monotonic() < deadline:
                time.sleep(0.01)
            assert server.started
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
