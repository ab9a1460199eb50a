"""Live, forks and groups for people with screen readers, small windows and dark rooms, and with hostile texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from errata_client import ErrataClient
from errata_protocol.labels import Labels

from ..browser.chromium import Page
from ..server.local_server import LocalServer
from .test_access import faults
from .visits import IN_CHROMIUM, SHELL, button, visit

pytestmark = IN_CHROMIUM

HOSTILE = "<img src=x onerror='window.hacked = 1'>\u202e\x1b[2J\x00 javascript:alert(1)"
READY = {
    "live": "document.querySelectorAll('.wall li').length === 2 && document.querySelector('.stream.live')",
    "forks": "document.querySelectorAll('.member').length === 2",
    "compare": "document.querySelector('.sides tr.first')",
    "group": "document.querySelectorAll('canvas').length === 3",
    "episode": "document.querySelector('.digest.same')",
}


async def look(page: Page, address: str, name: str) -> None:
    await page.open(address)
    await page.until(READY[name])
    if name == "episode":
        await page.click(button("fork here"))
        await page.click(button("make the fork"))
        await page.until("document.querySelector('.made')")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 360)])
async def test_axe_finds_nothing_grave_and_hostile_texts_are_shown(tmp_path: Path, scheme: str, width: int) -> None:
    labels = Labels(group="<b>g</b>\u202e")
    with LocalServer(SHELL, tmp_path) as server:
        async with ErrataClient(server.url, labels=labels) as env, ErrataClient(server.url, labels=labels) as other:
            for each, way in ((env, "one"), (other, "other")):
                await each.reset(task=HOSTILE)
                await each.step({"command": f"fail {way} {HOSTILE}"})
            fork = await env.fork(0)
            await fork.step({"command": HOSTILE})
            hashes = {
                "live": "live",
                "forks": f"forks/{env.eid}",
                "compare": f"compare/{env.eid}/{fork.eid}",
                "group": "group?group=%3Cb%3Eg%3C%2Fb%3E%E2%80%AE",
                "episode": f"{env.eid}/0",
            }
            async with visit("about:blank") as page:
                media = [{"name": "prefers-color-scheme", "value": scheme}]
                await page.call("Emulation.setEmulatedMedia", features=media)
                window = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
                await page.call("Emulation.setDeviceMetricsOverride", **window)
                for name, hash_ in hashes.items():
                    await page.open("about:blank")
                    await look(page, f"{server.url}/viewer/#{hash_}", name)
                    assert await faults(page) == [], name
                    assert await page.evaluate("document.documentElement.scrollWidth") <= width, name
                    text = await page.evaluate("document.body.textContent + document.title")
                    assert not set(text) & set("\x00\x1b\u202e"), name
                    assert "<img src=x" in text, name
                    assert await page.evaluate("window.hacked") is None
                    links = "[...document.links].every((each) => each.origin === location.origin)"
                    assert await page.evaluate(links) and await page.evaluate("document.images.length") == 0
            await fork.close()


async def test_addresses_that_name_nothing_are_shown_as_text(tmp_path: Path) -> None:
    with LocalServer(SHELL, tmp_path) as server:
        for hash_ in ("forks/%E2%80%AE%3Cb%3E", "compare/a%2Fb/%E2%80%AE"):
            async with visit(f"{server.url}/viewer/#{hash_}", troubles=["404"]) as page:
                await page.until("document.querySelector('[role=alert]')")
                assert "\u202e" not in await page.evaluate("document.body.outerHTML + document.title")
