"""The screens for people with keyboards, screen readers, small windows, dark rooms and paper."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from errata_client import ErrataClient
from errata_server.settings import Settings

from ..browser.chromium import Page
from ..server.local_server import LocalServer
from .visits import IN_CHROMIUM, SHELL, button, press, shown, visit

AXE = Path(__file__).parents[2] / ".cache/npm/node_modules/axe-core/axe.min.js"

pytestmark = IN_CHROMIUM

COMMANDS = ["ls", "fail zz", "colours", "cursor", "bidi", "fail yy!", "lines", "fail xx", "pwd", "done"]
FAILED = [t for t, command in enumerate(COMMANDS, 1) if command.startswith("fail")]
LAST = len(COMMANDS)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with LocalServer(SHELL, tmp_path_factory.mktemp("data")) as server:
        with ErrataClient(server.url).sync() as env:
            env.reset(task="a task")
            for command in COMMANDS:
                env.step({"command": command})
            eid = str(env.eid)
            env.reset(task="another")
        yield {"url": server.url, "eid": eid}


@pytest.fixture
async def page(played: dict[str, str]) -> AsyncIterator[Page]:
    async with visit(f"{played['url']}/viewer/#{played['eid']}/3") as page:
        await shown(page, 3)
        yield page


async def faults(page: Page) -> list[dict[str, Any]]:
    """Return what axe finds serious or critical, with the elements."""
    await page.evaluate(f"{AXE.read_text(encoding='utf-8')}; true")
    found = await page.evaluate("axe.run().then((found) => found.violations)")
    grave = [each for each in found if each["impact"] in ("serious", "critical")]
    return [{"rule": each["id"], "where": [node["html"][:200] for node in each["nodes"]]} for each in grave]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 360])
async def test_axe_finds_nothing_grave(played: dict[str, str], tmp_path: Path, scheme: str, width: int) -> None:
    url, eid = played["url"], played["eid"]
    tokens = Settings(token=SecretStr("t0ken"))
    with LocalServer(SHELL, tmp_path, tokens) as closed:
        for address, ready, troubles in (
            (f"{url}/viewer/", "document.querySelector('.sums')", []),
            (f"{url}/viewer/?text=nothing", "document.querySelector('p.none')", []),
            (f"{url}/viewer/#{eid}/2", "document.querySelector('.digest.same')", []),
            (f"{url}/viewer/#{eid}/3", "document.querySelector('.digest.same')", []),
            (f"{url}/viewer/#{eid}/5", "document.querySelector('.digest.same')", []),
            (f"{url}/viewer/#ep_none", "document.querySelector('.trouble')", ["404"]),
            (f"{closed.url}/viewer/", "document.querySelector('.login')", []),
        ):
            async with visit("about:blank", troubles=troubles) as page:
                await page.call(
                    "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
                )
                await page.call(
                    "Emulation.setDeviceMetricsOverride",
                    width=width,
                    height=800,
                    deviceScaleFactor=1,
                    mobile=width < 500,
                )
                await page.open(address)
                await page.until(ready)
                for view in ("agent text", "fields", "raw") if "digest" in ready else ("",):
                    if view:
                        await page.click(button(view))
                    assert await faults(page) == [], (address, view)
                assert await page.evaluate("document.documentElement.scrollWidth") <= width


async def test_keys_move_and_choose_views(page: Page) -> None:
    async def goes_to(key: str, t: int) -> None:
        await press(page, key)
        await shown(page, t)
        assert (await page.evaluate("location.hash")).endswith(f"/{t}")
        assert await page.evaluate("document.querySelector('[role=option][aria-selected=true] .t').innerText") == str(t)
        assert await page.evaluate("document.querySelector('[role=scrollbar]').ariaValueNow") == str(t)

    for key, t in (("j", 4), ("ArrowDown", 5), ("k", 4), ("ArrowUp", 3), ("n", FAILED[1]), ("n", FAILED[2])):
        await goes_to(key, t)
    for key, t in (("n", FAILED[2]), ("p", FAILED[1]), ("p", FAILED[0]), ("p", FAILED[0])):  # at the ends they stay
        await goes_to(key, t)
    for key, t in (("Home", 0), ("k", 0), ("End", LAST), ("j", LAST)):
        await goes_to(key, t)
    chosen = "document.querySelector('.switch [aria-pressed=true]').innerText"
    views = ["agent text", "fields", "raw"]
    before = views.index(await page.evaluate(chosen))
    for step in (1, 2, 3):
        await press(page, "a")
        await page.until(f"{chosen} === {json.dumps(views[(before + step) % 3])}")


async def test_keys_with_others_held_and_keys_in_fields_do_nothing(page: Page) -> None:
    for modifier in (1, 2, 4):  # Alt, Ctrl, Meta
        await page.call("Input.dispatchKeyEvent", type="keyDown", key="j", modifiers=modifier)
    await page.evaluate(
        "document.querySelector('nav').append(Object.assign(document.createElement('input'), {id: 'probe'}))"
    )
    await page.evaluate("document.querySelector('#probe').focus()")
    await press(page, "j", "n", "End")
    await page.evaluate("document.querySelector('#probe').remove()")
    await press(page, "j")
    await shown(page, 4)


async def test_the_strip_is_dragged_to_a_turn(page: Page) -> None:
    left, top, width = await page.evaluate(
        "(({left, top, width}) => [left, top, width])(document.querySelector('.strip').getBoundingClientRect())"
    )

    async def move(kind: str, t: int) -> None:
        x = left + (t + 0.5) * width / (LAST + 1)
        await page.call("Input.dispatchMouseEvent", type=kind, x=x, y=top + 10, button="left", buttons=1, clickCount=1)

    await move("mousePressed", 7)
    await shown(page, 7)
    for t in (6, 4, 1):
        await move("mouseMoved", t)
    await shown(page, 1)
    await move("mouseReleased", 1)
    x = left + width - 1
    await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=top + 10, buttons=0)  # without a button
    await press(page, "j")
    await shown(page, 2)


async def test_a_turn_is_chosen_by_a_click(page: Page) -> None:
    await page.click(f"document.querySelector('#turn-{FAILED[0]}')")
    await shown(page, FAILED[0])
    assert await page.evaluate("document.querySelector('mark').textContent") == "zz"


async def test_every_control_has_a_visible_focus(page: Page) -> None:
    seen = []
    for _ in range(60):
        await page.call("Input.dispatchKeyEvent", type="rawKeyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        found = await page.evaluate(
            "(({tagName, innerText, className}, style) => tagName === 'BODY' ? null : "
            "[tagName, (innerText || className).slice(0, 20), style.outlineStyle, parseFloat(style.outlineWidth)])"
            "(document.activeElement, getComputedStyle(document.activeElement))"
        )
        if found is None or found[:2] in [each[:2] for each in seen]:
            break
        seen.append(found)
    assert all(style == "solid" and width >= 2 for _, _, style, width in seen), seen
    names = [name for _, name, *_ in seen]
    assert {"Episodes", "agent text", "fields", "raw", "curl", "Python", "CLI"} <= set(names), names


async def test_paper_has_the_turn_and_no_controls(page: Page) -> None:
    await page.call("Emulation.setEmulatedMedia", media="print")
    visible = "[...document.querySelectorAll(%r)].filter((each) => each.checkVisibility()).length"
    assert await page.evaluate(visible % "nav, .strip, .timeline, .keys, button, .copies") == 0
    assert await page.evaluate(visible % "h1, .facts, pre, .digest") >= 4
    height = "document.querySelector('.detail').scrollHeight <= document.querySelector('.detail').clientHeight"
    assert (
        await page.evaluate(height) and await page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    )
