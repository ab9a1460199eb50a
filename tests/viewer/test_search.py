"""A person looks for a text in the actions of an episode, by keys, also while turns are still coming."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from errata_client import ErrataClient

from ..browser.chromium import Page
from ..server.local_server import LocalServer
from .visits import IN_CHROMIUM, SHELL, press, visit

pytestmark = IN_CHROMIUM

TURNS = 1203
HITS = {5: "cat Needle.txt", 700: "ls needle", 1201: 'echo "a needle"'}
SAID = "document.querySelector('.search [role=status]').innerText"
FOCUSED = "document.activeElement.id"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalServer(SHELL, tmp_path_factory.mktemp("data")) as server, ErrataClient(server.url).sync() as env:
        env.reset()
        for t in range(1, TURNS):
            env.step({"command": "fail it!" if t == 9 else HITS.get(t, f"hay {t}")})
        yield f"{server.url}/viewer/#{env.eid}"


async def find(page: Page, text: str) -> None:
    await press(page, "/")
    await page.until(f"{FOCUSED} === 'search'")
    await page.call("Input.insertText", text=text)
    await page.until(f"document.querySelector('#search').value.endsWith('{text}')")
    await page.call(
        "Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13
    )
    await page.call("Input.dispatchKeyEvent", type="keyUp", key="Enter", code="Enter", windowsVirtualKeyCode=13)


async def at(page: Page, t: int) -> None:
    await page.until(f"location.hash.endsWith('/{t}') && {SAID} === 'turn {t} has it'")


async def test_keys_go_from_one_action_that_has_the_text_to_the_next(address: str) -> None:
    async with visit(f"{address}/6") as page:
        await page.until(f"document.querySelector('.row')?.ariaSetSize === '{TURNS}'")
        await find(page, "NEEDLE")
        await at(page, 700)
        assert await page.evaluate(FOCUSED) == "timeline"
        for key, t in (("n", 1201), ("Enter", 5), ("p", 1201), ("p", 700)):
            await press(page, key)
            await at(page, t)
        await press(page, "Escape")
        await page.until("document.querySelector('#search').value === ''")
        await press(page, "p")  # the search is over: the error before
        await page.until("location.hash.endsWith('/9')")


async def test_a_text_that_no_action_has_says_so_and_moves_nothing(address: str) -> None:
    async with visit(f"{address}/6") as page:
        await page.until(f"document.querySelector('.row')?.ariaSetSize === '{TURNS}'")
        await find(page, "haystack")
        await page.until(f"{SAID} === 'no action has it'")
        assert (await page.evaluate("location.hash")).endswith("/6")


async def test_the_turn_that_is_looked_at_counts_for_a_new_text(address: str) -> None:
    async with visit(f"{address}/5") as page:
        await page.until(f"document.querySelector('.row')?.ariaSetSize === '{TURNS}'")
        await find(page, "needle")
        await at(page, 5)
        await press(page, "n")
        await at(page, 700)


async def test_a_search_waits_for_turns_that_are_still_loaded_and_says_how_far_it_is(address: str) -> None:
    async with visit(address.partition("#")[0]) as page:
        await page.evaluate(
            "void (globalThis.fetch = ((ask) => async (url, how) => { if (String(url).includes('cursor=999'))"
            " await new Promise((go) => (globalThis.go = go)); return ask(url, how); })(fetch))"
        )
        await page.evaluate(f"location.hash = '{address.partition('#')[2]}/701'")
        await page.until("document.querySelector('.row')?.ariaSetSize === '1000' && globalThis.go")
        await find(page, "needle")
        await page.until(f"{SAID} === 'searching turn 1000 of {TURNS}'")
        await page.evaluate("globalThis.go()")
        await at(page, 1201)
