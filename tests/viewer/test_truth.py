"""The browser checks what a server says: a state with another digest is shown as that; files come once and small."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from errata_client import ErrataClient
from errata_protocol.turns import turn_from

from ..server.local_server import LocalServer
from .visits import IN_CHROMIUM, SHELL, press, shown, visit

pytestmark = IN_CHROMIUM

SIZES = """performance.getEntriesByType('navigation').concat(performance.getEntriesByType('resource'))
    .map((one) => [new URL(one.name).pathname, one.transferSize, one.encodedBodySize, one.decodedBodySize])"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with LocalServer(SHELL, tmp_path_factory.mktemp("data")) as server:
        with ErrataClient(server.url).sync() as env:
            env.reset()
            for command in ("one", "two", "three"):
                env.step({"command": command})
            eid = str(env.eid)
        yield server.url, eid


async def test_bytes_with_another_digest_are_said_to_be_others(played: tuple[str, str]) -> None:
    url, eid = played
    kept = httpx.get(f"{url}/episodes/{eid}/states/2").content
    digest = f"sha256:{hashlib.sha256(kept).hexdigest()}"
    lie = kept.replace(b"ran two", b"ran 2wo")
    assert lie != kept and len(lie) == len(kept)
    async with visit(f"{url}/viewer/#{eid}/1") as page:
        await shown(page, 1)
        # Also the digest that the server sends with the bytes is made to fit: the timeline's is what counts.
        tag = {"ETag": f'"sha256:{hashlib.sha256(lie).hexdigest()}"', "Content-Type": "application/json"}
        await page.answer("*/states/2", lie, headers=tag)
        await press(page, "j")
        await shown(page, 2, "other")
        said = await page.evaluate("document.querySelector('.digest').innerText")
        assert digest in said and "NOT the digest of the raw bytes" in said
        await press(page, "j")
        await shown(page, 3)
        assert "raw has the bytes whose digest was recorded" in await page.evaluate(
            "document.querySelector('.digest').innerText"
        )


async def test_a_browser_that_cannot_check_says_so(played: tuple[str, str]) -> None:
    url, eid = played
    async with visit(f"{url}/viewer/#{eid}/1") as page:
        await shown(page, 1)
        await page.evaluate("Object.defineProperty(crypto, 'subtle', { value: undefined })")
        await press(page, "j")
        await shown(page, 2, "unknown")
        assert "not checked" in await page.evaluate("document.querySelector('.digest').innerText")


ACTIONS: list[Any] = [
    None, "ls", 3, ["a", 1], {}, {"command": "ls"}, {"command": "ls", "timeout_s": 3.5, "metadata": {}, "path": ""},
    {"tool": "run", "command": "a\tb \"c\"", "path": "", "content": None}, {"tool": "submit", "metadata": {"a": 1}},
    {"tool": "write_file", "path": "x.py", "content": "one\ntwo\nthree\n"},
    {"tool": "search", "most": 3, "what": [1, {}]},
    {"tool": {"a": 1}, "x": "y"}, {"type": "call_tool", "tool_name": "echo", "arguments": {"message": "é🎉"}},
    {"tool_name": "none", "arguments": None},
    {"method": "tools/call", "params": {"name": "add", "arguments": {"a": 1}}},
    {"a": True, "b": [None, 2]}, {"code": "x = 1"}, {"action": {"move": "left", "by": []}},
]  # fmt: skip


async def test_actions_are_in_the_words_of_errata_replay(played: tuple[str, str]) -> None:
    async with visit(f"{played[0]}/viewer/") as page:
        shown = await page.evaluate(f"import('./text.js').then((it) => {json.dumps(ACTIONS)}.map(it.oneLine))")
    for action, line in zip(ACTIONS, shown, strict=True):
        printed = turn_from(1, "step", action, None).action_text
        assert line.split() == printed.split(), action  # the viewer shows runs of white space as one space


async def test_files_come_zipped_and_then_not_again(played: tuple[str, str]) -> None:
    url, eid = played
    async with visit(f"{url}/viewer/#{eid}/1") as page:
        await shown(page, 1)
        first = {path: rest for path, *rest in await page.evaluate(SIZES) if path.startswith("/viewer/")}
        for path in ("/viewer/app.js", "/viewer/viewer.css", "/viewer/vendor/htm-preact.js"):
            transferred, encoded, decoded = first[path]
            assert encoded < decoded and transferred > encoded, path
        await page.call("Page.reload")
        await shown(page, 1)
        again = {path: rest for path, *rest in await page.evaluate(SIZES) if path.startswith("/viewer/")}
        assert first.keys() == again.keys()
        for path, (transferred, *_) in again.items():
            if path != "/viewer/login":  # which says who looks, and is never kept
                assert transferred <= 300, path  # of 304 the head alone, which Chromium counts as 300 bytes
