"""A person looks for episodes: the filters stand in the address, columns sort, and a list goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import pytest

from errata_client import ErrataClient

from ..browser.chromium import Chromium, Page, shared_process
from ..server.local_server import LocalServer
from .test_episode import SHELL
from .visits import IN_CHROMIUM

pytestmark = IN_CHROMIUM

EPISODES = 103
ROWS = "document.querySelectorAll('tbody tr').length"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalServer(SHELL, tmp_path_factory.mktemp("data")) as server:
        with ErrataClient(server.url).sync() as env:
            for number in range(EPISODES):
                env.reset(task=f"task-{number}")
                for _ in range(number % 3):
                    env.step({"command": "ls"})
                if number == 7:
                    env.step({"command": "fail it!"})
        yield server.url


@pytest.fixture
async def page(server: str) -> AsyncIterator[Page]:
    async with Chromium(shared_process()) as browser:
        page = await browser.page()
        await page.open(f"{server}/viewer/")
        await page.until(f"{ROWS} === 100")
        yield page
        await page.quiet()
        assert page.troubles == [] and page.hosts == {"127.0.0.1"}


async def test_the_list_goes_on(page: Page) -> None:
    await page.click("[...document.querySelectorAll('main > button')].find((each) => each.innerText === 'more')")
    await page.until(f"{ROWS} === {EPISODES}")
    assert (
        await page.evaluate(
            "new Set([...document.querySelectorAll('tbody tr')].map((each) => each.querySelector('a').hash)).size"
        )
        == 103
    )
    assert f"{EPISODES} episodes" in await page.evaluate("document.querySelector('.sums').innerText")


async def test_charts_have_a_bar_at_each_time_that_has_episodes(page: Page) -> None:
    sums = {"bucket_s": 3600, "buckets": [
        {"start": 3600 * hour, "episodes": count, "done": 1, "reward": reward, "error_kinds": {}, "hint_keys": {}}
        for hour, count, reward in ((100, 2, 1.0), (101, 1, -0.5), (104, 1, 2 / 3), (109, 3, 0.0))
    ]}  # fmt: skip
    answer = f"String(url).includes('aggregates') ? new Response('{json.dumps(sums)}') : ask(url, how)"
    await page.evaluate(f"void (globalThis.fetch = ((ask) => (url, how) => {answer})(fetch))")
    await page.fill("document.querySelector('input[name=error_kind]')", "command_not_found")  # or nothing is read again
    await page.click("document.querySelector('.filters button')")
    bars = "[...document.querySelectorAll('svg.bars')]"
    places = f"{bars}.map((each) => [...each.children].map((bar) => bar.getAttribute('x')))"
    await page.until("document.querySelectorAll('svg.bars rect').length === 8")
    assert await page.evaluate(places) == [["0", "36", "144", "324"]] * 2
    titles = await page.evaluate(f"{bars}[1].textContent")
    assert ": 0.5" in titles and ": -0.5" in titles and ": 0.667" in titles
    assert await page.evaluate("document.querySelectorAll('.axis span').length") == 4


async def test_filters_stand_in_the_address_and_go_back(page: Page) -> None:
    await page.fill("document.querySelector('input[name=error_kind]')", "command_not_found")
    await page.click("document.querySelector('.filters button')")
    await page.until(f"{ROWS} === 1")
    assert await page.evaluate("location.search") == "?error_kind=command_not_found"
    assert "command_not_found 1" in await page.evaluate("document.querySelector('tbody').innerText")
    await page.evaluate("history.back()")
    await page.until(f"{ROWS} === 100")


async def test_filters_offer_the_words_that_are_in_use(page: Page) -> None:
    offered = "[...document.querySelector('input[name=%s]').list.options].map((each) => each.value)"
    assert len(await page.evaluate(offered % "task")) == 100
    await page.click("[...document.querySelectorAll('main > button')].find((each) => each.innerText === 'more')")
    await page.until(f"{ROWS} === {EPISODES}")
    assert await page.evaluate(offered % "error_kind") == ["command_not_found"]
    assert await page.evaluate(offered % "environment") == ["ShellEnvironment"]
    assert len(await page.evaluate(offered % "task")) == EPISODES


async def test_an_empty_list_says_why(page: Page) -> None:
    await page.fill("document.querySelector('input[name=task]')", "task")
    await page.click("document.querySelector('.filters button')")
    said = await page.until("document.querySelector('main > .none')?.innerText")
    assert said.startswith("no episodes with these filters; task must be a whole name")
    await page.click("[...document.querySelectorAll('.filters a')].find((each) => each.innerText === 'clear filters')")
    await page.until(f"{ROWS} === 100 && location.search === ''")


async def test_labels_are_filters(page: Page) -> None:
    await page.fill("document.querySelector('input[name=run]')", "no such run")
    await page.fill("document.querySelector('input[name=step]')", "3")
    await page.click("document.querySelector('.filters button')")
    await page.until(f"{ROWS} === 0 && location.search === '?run=no+such+run&step=3'")


async def test_errors_of_a_row_lead_to_the_first(page: Page) -> None:
    await page.fill("document.querySelector('input[name=text]')", "task-7")
    await page.click("document.querySelector('.filters button')")
    await page.until(f"{ROWS} > 0 && {ROWS} < 20")
    await page.click("document.querySelector('td.kinds a')")
    await page.until("document.querySelector('.turn[aria-label=\"Turn 2\"] .facts.failed')")
    assert (await page.evaluate("location.hash")).endswith("/error/command_not_found")
    await page.call("Input.dispatchKeyEvent", type="keyDown", key="k")
    await page.until("location.hash.endsWith('/1')")


async def test_the_episode_with_the_most_errors_of_a_kind_is_one_action_away(page: Page) -> None:
    await page.click("[...document.querySelectorAll('th a')].find((each) => each.innerText === 'errors')")
    await page.until("document.querySelector('th[aria-sort=descending] a')?.innerText.startsWith('errors')")
    first = await page.until("document.querySelector('tbody tr td:nth-child(6)')?.innerText")
    assert first == "command_not_found 1"
    assert await page.evaluate("location.search") == "?sort=errors&order=desc"


async def test_a_column_sorts_in_both_directions(page: Page) -> None:
    column = "[...document.querySelectorAll('th a')].find((each) => each.innerText.startsWith('turns'))"
    first = "document.querySelector('tbody .count')?.innerText"
    for direction, turns in (("descending", "3"), ("ascending", "1")):
        await page.click(column)
        await page.until(f"document.querySelector('th[aria-sort={direction}]') && {first} === '{turns}'")
    assert "sort=deliveries&order=asc" in await page.evaluate("location.search")
