"""Whatever stands in an episode, and wherever, is shown as text, and the page stays small and where it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from errata_client import ErrataClient

from ..browser.chromium import Page
from ..server.local_server import LocalServer
from .visits import IN_CHROMIUM, button, press, shown, visit

pytestmark = IN_CHROMIUM

HOSTILE = "tests.viewer.shell:HostileEnvironment"
DEEP = "[" * 200 + "]" * 200
LONG = "<b>" * 1_750_000  # 5 MB in one line
TEXTS = {
    "markup": "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><base href='//evil.example'>",
    "link": "<a href='javascript:window.hacked=1'>x</a> javascript:window.hacked=1 https://evil.example/",
    "entity": "&lt;script&gt; &#x202e; </title></style><style>* { display: none }</style>",
    "terminal": "a\x1b[2J\x1b[1;1H\x1b]0;a title\x07b\x1b]8;;javascript:x\x1b\\c\x1b[31m\x1bP0q\x1b\\d\x9b2J",
    "bidi": "if \u202e\u2066level\u2069\u202c: \u200fpass\u200b\u2028\ufeff\u00ad",
    "nul": "a\x00b\x7fc\r\bd\x0ce",
    "template": "${window.hacked = 1} {{7*7}} `x` %s %c",
    "surrogates": "a\ud83dz \U0001f389 \U000e0041",
}
ACTING = set(
    map(chr, [*range(9), 11, 12, *range(14, 32), *range(127, 160), 0xAD, 0x200B, 0x200F, 0x2028, 0xFEFF])
) | set("\u202e\u2066\u2069\u202c\ud83d\U000e0041")
"""Characters that must not stand in the document."""
FORMS = "form:not(.filters, .search)"
SCRIPT = f"document.querySelectorAll('body :is(img, script, iframe, style, base, link, object, {FORMS})').length"
FOREIGN = (
    "[...document.querySelectorAll('a')].filter((each) => !each.href.startsWith(`${location.origin}/viewer/`)).length"
)
NODES = "document.querySelectorAll('*').length"
WATCH = "addEventListener('securitypolicyviolation', (event) => console.error(event.violatedDirective))"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A server with one episode for each text, which stands in every place that an agent or environment fills."""
    with LocalServer(HOSTILE, tmp_path_factory.mktemp("data")) as server:
        with ErrataClient(server.url).sync() as env:
            eids = {}
            for name, text in TEXTS.items():
                env.reset(task=text.encode("utf-8", "replace").decode())
                env.step({"command": text.encode("utf-8", "replace").decode(), "mode": f"echo {name}"})
                eids[name] = env.eid
            env.reset(task="long")
            for mode in ("long", "deep", "long"):
                env.step({"command": LONG if mode == "long" else "", "mode": mode})
            eids["long"] = env.eid
        yield {"url": server.url, "eids": eids}


async def harmless(page: Page, most: int = 1500) -> None:
    """Check what holds for every screen, whatever it shows.

    Args:
        page: The page.
        most: Most elements that the document may have.
    """
    assert await page.evaluate("window.hacked") is None
    assert await page.evaluate(SCRIPT) == 0 and await page.evaluate(FOREIGN) == 0
    text = await page.evaluate("document.documentElement.textContent + document.documentElement.innerHTML")
    assert not set(text) & ACTING, [hex(ord(each)) for each in set(text) & ACTING]
    assert await page.evaluate(NODES) < most
    assert await page.evaluate("location.pathname") == "/viewer/"
    assert await page.evaluate("getComputedStyle(document.body).display") in ("block", "flex")


@pytest.mark.parametrize("name", TEXTS)
async def test_a_text_is_only_text_in_every_place(played: dict[str, Any], name: str) -> None:
    url, eid = played["url"], played["eids"][name]
    turn = httpx.get(f"{url}/episodes/{eid}/turns").json()["turns"][1]
    assert turn["error_site"]["file"] and turn["error_site"]["message"], "the server keeps the places that are filled"
    async with visit(f"{url}/viewer/") as page:
        await page.evaluate(WATCH)
        await page.until(f"document.querySelectorAll('tbody tr').length === {len(TEXTS) + 1}")
        await harmless(page)
        await page.evaluate(f"document.querySelector('a[href=\"#{eid}\"]').click()")
        await shown(page, 0)
        await press(page, "n")
        for view in ("agent text", "fields", "raw"):
            await page.until(f"{button(view)} !== undefined")
            await page.click(button(view))
            await shown(page, 1)
            await harmless(page)
        title = await page.evaluate("document.title")
        assert title == f"{eid} t=1"
        if name in ("markup", "link", "entity", "template"):
            detail = await page.evaluate("document.querySelector('.detail').textContent")
            heading = await page.evaluate("document.querySelector('h1').textContent")
            assert TEXTS[name] in heading and TEXTS[name] in detail


async def test_long_and_deep_outputs_leave_the_page_small(played: dict[str, Any]) -> None:
    url, eid = played["url"], played["eids"]["long"]
    async with visit(f"{url}/viewer/#{eid}/1") as page:
        await page.evaluate(WATCH)
        for t in (1, 2, 3):
            await shown(page, t)
            for view in ("agent text", "fields", "raw"):
                await page.click(button(view))
                await harmless(page)
                assert await page.evaluate("document.body.textContent.length") < 200_000
            await press(page, "j")
        await press(page, "k")
        await shown(page, 2)
        await page.click(button("fields"))
        await page.click(button("199 more of 199 lines"))
        await page.until("!document.querySelector('.output button')")
        shown_value = await page.evaluate("document.querySelector('pre[aria-label=value]').textContent")
        assert "".join(shown_value.split()) == json.dumps(json.loads(DEEP)).replace(" ", "")


@pytest.mark.parametrize("name", ["markup", "terminal", "bidi"])
async def test_an_error_message_and_an_address_are_only_text(played: dict[str, Any], name: str) -> None:
    text = TEXTS[name]
    async with visit(f"{played['url']}/viewer/", troubles=["400"]) as page:
        await page.evaluate(WATCH)
        await page.until("document.querySelector('tbody tr')")
        error = json.dumps({"code": "INVALID_REQUEST", "message": text}).encode()
        await page.answer("*/episodes/*", error, 400)
        await page.evaluate(f"location.hash = '#' + encodeURIComponent({json.dumps(text)}) + '/1'")
        await page.until("document.querySelector('main > .trouble')")
        await harmless(page)
        if name == "markup":
            assert await page.evaluate("document.querySelector('main > .trouble').textContent") == text
