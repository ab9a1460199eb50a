"""A person looks for episodes: the filters stand in the address, columns sort, and a list goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from errata_client import ErrataClient

from ..browser.chromium import Chromium, Page
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
    async with Chromium() as browser:
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
        await page.evaluate("new Set([...document.querySelectorAll('tbody a')].map((each) => each.hash)).size") == 103
    )
    assert f"{EPISODES} episodes" in await page.evaluate("document.querySelector('.sums').innerText")
    assert await page.evaluate("document.querySelectorAll('svg.bars rect').length") >= 2


async def test_filters_stand_in_the_address_and_go_back(page: Page) -> None:
    await page.fill("document.querySelector('input[name=error_kind]')", "command_not_found")
    await page.click("document.querySelector('.filters button')")
    await page.until(f"{ROWS} === 1")
    assert await page.evaluate("location.search") == "?error_kind=command_not_found"
    assert "command_not_found 1" in await page.evaluate("document.querySelector('tbody').innerText")
    await page.evaluate("history.back()")
    await page.until(f"{ROWS} === 100")


async def test_a_column_sorts_in_both_directions(page: Page) -> None:
    column = "[...document.querySelectorAll('th a')].find((each) => each.innerText.startsWith('turns'))"
    first = "document.querySelector('tbody .count')?.innerText"
    for direction, turns in (("descending", "3"), ("ascending", "1")):
        await page.click(column)
        await page.until(f"document.querySelector('th[aria-sort={direction}]') && {first} === '{turns}'")
    assert "sort=deliveries&order=asc" in await page.evaluate("location.search")
