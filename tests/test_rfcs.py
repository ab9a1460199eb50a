"""The RFCs: statements are numbered and tagged, schemas are the generated ones, examples run and are real bytes."""

from __future__ import annotations

import json
import re
import runpy
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import uvicorn
from pydantic import BaseModel

from errata_protocol.markers import HINT_TEMPLATE_KEYS, ErrorMarkers, ErrorSite

from .protocol_exchanges import RFCS, Exchange, Player, envelopes, exchanges, played, read_line
from .test_protocol_exchanges import models

ROOT = Path(__file__).parents[1]
SCHEMAS = ROOT / "rfcs" / "schemas"
EXCHANGES = [(path, exchange) for path in RFCS for exchange in exchanges(path.read_text())]
each_rfc = pytest.mark.parametrize("path", RFCS, ids=lambda path: path.stem)
each_exchange = pytest.mark.parametrize(("path", "exchange"), EXCHANGES, ids=[e.name for _, e in EXCHANGES])

STATEMENT = re.compile(r"^- \*\*(R-(\d{3})-(\d+))\*\* (?:\(([^)]*)\) )?(.*?)(?=^- \*\*R-|^\s*$|^#)", re.M | re.S)
TAG = re.compile(r"(?:wire|fault|inspection: \S.*)", re.S)
SECTIONS = ("Summary", "Motivation", "Design", "Examples")
"""Those that OpenEnv requires of an RFC."""


def prose(text: str) -> str:
    """Return a text without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", " ", text, flags=re.S)


def without_names(schema: Any) -> Any:
    """Return a schema without titles and descriptions."""
    if isinstance(schema, dict):
        kept = {k: v for k, v in schema.items() if k not in ("title", "description", "$schema") or isinstance(v, dict)}
        return {k: without_names(v) for k, v in kept.items()}
    return [without_names(one) for one in schema] if isinstance(schema, list) else schema


def part(schema: Any, shown: Any) -> Any:
    """Return what a schema has of the keys that an excerpt shows."""
    if isinstance(schema, dict) and isinstance(shown, dict):
        return {key: part(schema[key], value) for key, value in shown.items() if key in schema}
    return schema


def problems(text: str) -> list[str]:
    """Return what is wrong with the statements of an RFC."""
    number = re.search(r"^\*\*RFC ID\*\*: (\d{3})$", text, re.M)
    found = STATEMENT.findall(prose(text))
    wrong = [f"{name} has no tag" for name, _, _, tag, _ in found if not TAG.fullmatch(tag)]
    wrong += [f"{name} says neither MUST nor SHOULD" for name, *_, said in found if not re.search("MUST|SHOULD", said)]
    if {rfc for _, rfc, *_ in found} - {number[1] if number is not None else None}:
        wrong.append("a statement has another RFC's number")
    if [int(n) for _, _, n, *_ in found] != list(range(1, len(found) + 1)):
        wrong.append("the numbers are not 1, 2, 3 …")
    rest = STATEMENT.sub("", prose(text))
    wrong += [f"{m[0]!r} outside a statement" for m in re.finditer(r"\b(?:MUST|SHOULD|REQUIRED|SHALL)\b[^\n]*", rest)]
    cited = set(re.findall(r"R-\d{3}-\d+", rest))
    own = {name for name in cited if number is not None and name.startswith(f"R-{number[1]}-")}
    return wrong + [f"{name} does not exist" for name in sorted(own - {name for name, *_ in found})]


@each_rfc
def test_statements_are_numbered_and_tagged(path: Path) -> None:
    assert problems(path.read_text()) == []


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("- **R-014-1** (wire) It MUST.\n- **R-014-2** (fault) It\n  SHOULD.\n\nAs R-014-2 says.", None),
        ("- **R-014-1** It MUST.\n", "R-014-1 has no tag"),
        ("- **R-014-1** (inspection) It MUST.\n", "R-014-1 has no tag"),
        ("- **R-014-1** (wire) It does.\n", "R-014-1 says neither MUST nor SHOULD"),
        ("- **R-014-2** (wire) It MUST.\n", "the numbers are not 1, 2, 3 …"),
        ("- **R-014-1** (wire) It MUST.\n- **R-014-1** (wire) It MUST.\n", "the numbers are not 1, 2, 3 …"),
        ("- **R-015-1** (wire) It MUST.\n", "a statement has another RFC's number"),
        ("It MUST.\n", "'MUST.' outside a statement"),
        ("As R-014-7 says.\n", "R-014-7 does not exist"),
    ],
)
def test_a_wrong_statement_is_found(text: str, mistake: str | None) -> None:
    assert problems(f"**RFC ID**: 014\n\n{text}") == ([mistake] if mistake else [])


@pytest.mark.parametrize("path", [p for p in RFCS if not p.name.startswith("000")], ids=lambda path: path.stem)
def test_an_rfc_has_upstreams_header_and_sections(path: Path) -> None:
    text = path.read_text()
    header = (
        r"# RFC: .+\n\n\*\*Status\*\*: Draft\n\*\*Created\*\*: \d{4}-\d\d-\d\d\n\*\*Authors\*\*: .+\n\*\*RFC ID\*\*: "
    )
    assert re.match(header + path.name[:3], text)
    headings = re.findall(r"^## (.+)$", prose(text), re.M)
    assert [heading for heading in headings if heading in SECTIONS] == list(SECTIONS)
    assert {"Problem Statement", "Goals", "Architecture Overview", "Core Abstractions", "Key Design Decisions"} <= set(
        re.findall(r"^### (.+)$", text, re.M)
    )
    decisions = re.findall(r"^#### D\d+\. .*?(?=^##)", text, re.M | re.S)
    assert decisions
    for decision in decisions:
        assert all(f"- **{part}**:" in decision for part in ("Chosen approach", "Rationale", "Trade-offs")), decision


@each_rfc
def test_an_rfc_stands_by_itself(path: Path) -> None:
    """It links to other RFCs of the same filing and to the web, and cites nothing of this repository."""
    text = prose(path.read_text())
    links = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith(("https://", "#"))]
    assert all(re.fullmatch(r"(\./)?0\d\d-[\w-]+\.md(#[\w-]+)?", target) for target in links), links
    assert all((path.parent / target.partition("#")[0]).exists() for target in links)
    assert not re.search(r"\bPROTOCOL\b|\bdecisions? \d|docs/|\.\./", text)


@each_rfc
def test_each_schema_is_the_generated_one(path: Path) -> None:
    text = path.read_text()
    found = re.findall(r"<!-- (schema|excerpt) (\S+) -->\n+```json\n(.*?)```", text, re.S)
    for kind, name, shown in found:
        generated = without_names(json.loads((SCHEMAS / f"{name}.json").read_text()))
        excerpt = without_names(json.loads(shown))
        assert excerpt == (generated if kind == "schema" else part(generated, excerpt)), name
    assert len(found) == text.count("```json"), "each block of JSON says which schema it is"


# -- exchanges --------------------------------------------------------------------------------------------------------


@each_exchange
async def test_a_server_says_what_the_rfc_says(path: Path, exchange: Exchange) -> None:
    assert await played(exchange) == list(exchange.lines), (
        "python scripts/protocol_examples.py writes the server's lines"
    )


@each_rfc
def test_each_block_of_text_with_frames_is_played(path: Path) -> None:
    text = path.read_text()
    assert len(exchanges(text)) == text.count("```text")


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


@each_exchange
def test_examples_validate(path: Path, exchange: Exchange) -> None:
    for name, value in frames(exchange):
        jsonschema.validate(value, json.loads((SCHEMAS / f"{name}.json").read_text()))


@each_exchange
def test_multiplexed_frames_are_messages(path: Path, exchange: Exchange) -> None:
    for way, text in exchange.frames():
        for envelope in (json.loads(one) for one in envelopes(text)):
            assert any(models(way, envelope)) or (way == "-->" and exchange.name == "core-session"), envelope


def test_examples_have_one_of_each_schema() -> None:
    shown = {name for _, exchange in EXCHANGES for name, _ in frames(exchange)}
    embedded = {name for path in RFCS for name in re.findall(r"<!-- (?:schema|excerpt) (\S+) -->", path.read_text())}
    assert {name for name in embedded if not name.startswith(("client.", "server."))} - {
        "plain.StateAtRequest",
        "http.RewardPost",
    } <= shown


# -- programs ---------------------------------------------------------------------------------------------------------


def programs(path: Path) -> dict[str, str]:
    """Return the programs of an RFC by file name."""
    return dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", path.read_text(), re.S))


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


@pytest.fixture
def files(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The programs of an RFC in a directory from which they can be imported."""
    for name, text in programs(path).items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in programs(path):
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.parametrize("path", [p for p in RFCS if "client.py" in programs(p)], ids=lambda path: path.stem)
def test_the_client_of_an_rfc_speaks_with_its_server(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(runpy.run_path(str(files / "server.py"))["app"]) as address:
        monkeypatch.setenv("BASE_URL", address)
        runpy.run_path(str(files / "client.py"), run_name="__main__")


PLAYED = {"015": ("replay", "fork"), "016": ("core-session", "core-resume")}
"""Exchanges of what the minimal server of an RFC has."""


@pytest.mark.parametrize("path", [p for p in RFCS if p.name[:3] in PLAYED], ids=lambda path: path.stem)
async def test_a_minimal_server_says_what_ours_says(path: Path, files: Path) -> None:
    """All but texts for people, random ids, and what capabilities and HTTP say beyond the RFC."""
    named = {exchange.name: exchange for exchange in exchanges(path.read_text())}
    for name in PLAYED[path.name[:3]]:
        exchange, app = named[name], runpy.run_path(str(files / "server.py"))["app"]
        ids: dict[str, str] = {}
        async with AsyncExitStack() as stack:
            player = Player(app, None, stack)
            answer: str | None = None
            for line in exchange.lines:
                part = read_line(renamed(line, ids))
                if part["answer"] is not None:
                    got = f"HTTP <-- {answer}"
                elif part["way"] == "<--" or part["closed"]:
                    got = await player.next_frame(part["socket"])
                else:
                    answer = await player.do(part)
                    continue
                ids |= dict(zip(ID.findall(line), ID.findall(got), strict=False))
                assert comparable(got) == comparable(renamed(line, ids))


ID = re.compile(r"ep_[\w-]{24}|[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def renamed(line: str, ids: dict[str, str]) -> str:
    """Return a line of the text with the ids that a server made instead of those that stand there."""
    return ID.sub(lambda found: ids.get(found[0], found[0]), line)


def comparable(line: str) -> Any:
    """Return a server's line without what may differ between servers."""
    line = re.sub(r"; x-errata-[^;\]]*", "", line)
    head, brace, text = line.partition("{")
    said = json.loads(brace + text) if brace else None
    for holder in (said, said.get("data")) if isinstance(said, dict) else ():
        if isinstance(holder, dict) and "code" in holder:
            holder.pop("message")
    if isinstance(said, dict) and said.get("type") == "capabilities":
        said["data"] = said["data"].get("session")
        (said["data"] or {}).pop("first", None)  # of the proposal that replies are read again by
    for told in (said, said.get("data")) if isinstance(said, dict) else ():
        if isinstance(told, dict):
            told.pop("read_key", None)  # the minimal server has one user, who reads everything
    if isinstance(said, dict) and said.get("type") in ("opened", "resumed"):
        del said["data"]["recovery"]
    payload = text.partition('"data":')[2] if isinstance(said, dict) and "observation" in said.get("data", {}) else ""
    return head, said, payload


def test_the_index_names_each_rfc() -> None:
    index = (ROOT / "rfcs" / "README.md").read_text()
    for path in RFCS:
        assert f"]({path.name})" in index
        if not path.name.startswith("000"):
            assert f"- [{path.name}](./{path.name}) - " in index
            assert f"](./{path.name})" in RFCS[0].read_text()


def test_each_program_of_an_rfc_has_a_name_and_belongs_to_a_pair() -> None:
    for path in RFCS:
        assert path.read_text().count("```python") == len(programs(path))
        assert ("client.py" in programs(path)) == ("server.py" in programs(path))


# -- 014 --------------------------------------------------------------------------------------------------------------

(MARKERS,) = [path for path in RFCS if path.name.startswith("014")]


@pytest.mark.parametrize("path", [MARKERS], ids=["014"])
@pytest.mark.parametrize("model", [ErrorMarkers, ErrorSite], ids=lambda model: model.__name__)
def test_the_mixin_of_014_has_the_fields_of_ours(files: Path, model: type[BaseModel]) -> None:
    proposed = runpy.run_path(str(files / "markers.py"))[model.__name__]
    assert without_names(proposed.model_json_schema()) == without_names(model.model_json_schema())


def test_014_has_our_kinds_and_keys_in_our_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| `([\w.]+)` \|$", MARKERS.read_text(), re.M)
    assert rows == [(kind.value, key) for kind, key in HINT_TEMPLATE_KEYS.items()]
