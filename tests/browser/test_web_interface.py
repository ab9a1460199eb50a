"""The web interface as a person meets it: Chromium opens the pages, resets and steps an environment, and reads on.

The environment is tied to the thread of its ``__init__`` by sqlite3, which upstream's own interface cannot drive.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from errata_server.process import ServerProcess

from . import chromium
from .chromium import Chromium, Page, shared_process

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="chromium is not installed: apt-get install chromium"),
]

LEDGER = "tests.environments.ledger:LedgerEnvironment"
PINNED = "tests.server.environments:PinnedEnvironment"

RESULT = "[...document.querySelectorAll('.oe-result')].find((each) => each.innerText.includes(%r))"
FIELD = "document.querySelector('input[aria-label^=%s]')"


def button(text: str) -> str:
    return f"[...document.querySelectorAll('button')].find((each) => each.innerText.trim() === '{text}')"


@pytest.fixture
async def browser() -> AsyncIterator[Chromium]:
    async with Chromium(shared_process()) as started:
        yield started


@contextmanager
def uvicorn(factory: str) -> Iterator[str]:
    """Serve one of the applications next door, as its author would; yields its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "--factory", f"tests.browser.applications:{factory}", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ENABLE_WEB_INTERFACE": "true"},
    )
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                yield found[1]
                break
        else:
            raise AssertionError("".join(said))
    finally:
        process.kill()  # with a page open uvicorn would wait for its event stream
        process.wait()
        process.stderr.close()


async def play(browser: Chromium, url: str, *, field: str, shown: str, numbers: tuple[int, int]) -> Page:
    """Open, reset and step twice as a person does, and read the results on the page.

    Args:
        browser: In a new tab of which.
        url: What is written into the address bar.
        field: The action's field to fill.
        shown: The observation's field to read.
        numbers: What to fill in, which the environment adds up.
    """
    page = await browser.page()
    address = await page.open(url)
    assert address.endswith("/web/"), address
    await page.click(button("Reset"))
    await page.until(f"{RESULT % 'step'} && document.querySelector('.oe-episode').innerText.includes('new episode')")
    total = 0
    for count, number in enumerate(numbers, start=1):
        total += number
        await page.fill(FIELD % field, str(number))
        await page.click(button("Run step"))
        # The page shows fields and figures, each a name and a value: "balance 3 … step 1".
        expected = rf"/\b{shown}\s+{total}\b[\s\S]*\bstep\s+{count}\b/i"
        await page.until(
            f"[...document.querySelectorAll('.oe-result')].find((each) => {expected}.test(each.innerText))"
        )
    await page.quiet()
    assert page.troubles == []
    assert page.hosts == {"127.0.0.1"}
    return page


def episodes(url: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = httpx.get(f"{url}/episodes").raise_for_status().json()["episodes"]
    return listed


async def test_one_environment_is_reset_and_stepped_at_the_root_and_under_its_name(
    browser: Chromium, tmp_path: Path
) -> None:
    with ServerProcess(LEDGER, tmp_path, "--web") as server:
        await play(browser, server.url, field="amount", shown="balance", numbers=(3, 4))
        page = await play(browser, f"{server.url}/LedgerEnvironment", field="amount", shown="balance", numbers=(5, 6))
        listed = episodes(server.url)
        assert [(each["environment"], each["deliveries"]) for each in listed] == [("LedgerEnvironment", 3)] * 2
        last = httpx.get(f"{server.url}/episodes/{listed[0]['eid']}/states/2").json()
        assert (last["observation"]["balance"], last["reward"]) == (11, 11.0)
        await page.fill(FIELD % "amount", "")
        await page.click(button("Run step"))
        await page.until("document.querySelector('.oe-error')")
        await page.fill(FIELD % "amount", "6")
        await page.click(button("Run step"))
        await page.until(RESULT % "17")
        await page.quiet()
        assert [each["deliveries"] for each in episodes(server.url)] == [4, 3]


async def test_several_environments_have_pages_of_their_own(browser: Chromium, tmp_path: Path) -> None:
    with ServerProcess(LEDGER, tmp_path, PINNED, "--web") as server:
        await play(browser, f"{server.url}/PinnedEnvironment/", field="n", shown="n", numbers=(1, 2))
        await play(browser, f"{server.url}/LedgerEnvironment/web", field="amount", shown="balance", numbers=(3, 4))
        assert [(e["environment"], e["deliveries"]) for e in episodes(server.url)] == [
            (name, 3) for name in ("LedgerEnvironment", "PinnedEnvironment")
        ]


async def test_plain_uvicorn_serves_the_pages(browser: Chromium) -> None:
    with uvicorn("ours") as url:
        for path in ("/", "/ledger"):
            await play(browser, url + path, field="amount", shown="balance", numbers=(3, 4))
        assert [each["deliveries"] for each in episodes(url)] == [3, 3]


async def test_somebody_elses_application_serves_the_pages_below_a_path_and_runs_no_lifespan(browser: Chromium) -> None:
    with uvicorn("mounted") as url:
        for path in ("/name", "/name/web/", "/adopted/"):
            await play(browser, url + path, field="amount", shown="balance", numbers=(3, 4))
        assert [each["deliveries"] for each in episodes(f"{url}/name")] == [3, 3]
        assert [each["deliveries"] for each in episodes(f"{url}/adopted")] == [3]


async def test_the_pages_of_an_adopted_application_reset_and_step_our_session(browser: Chromium) -> None:
    with uvicorn("adopted") as url:
        await play(browser, url, field="amount", shown="balance", numbers=(3, 4))
        assert [each["deliveries"] for each in episodes(url)] == [3]
