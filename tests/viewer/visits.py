"""A person's visit to the viewer: what is pressed, and that nothing went wrong in the page meanwhile."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest

from ..browser import chromium
from ..browser.chromium import Chromium, Page, shared_process

IN_CHROMIUM = [
    pytest.mark.viewer,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="chromium is not installed: apt-get install chromium"),
]
"""Marks of a test that looks at the viewer in a browser."""

SHELL = "tests.viewer.shell:ShellEnvironment"


@asynccontextmanager
async def visit(address: str, *, troubles: Collection[str] = ()) -> AsyncIterator[Page]:
    """Open an address in a browser of its own; at the end nothing else than expected has gone wrong.

    Args:
        address: The address.
        troubles: Parts of the troubles that the browser is to note, each of which has to occur.
    """
    async with Chromium(shared_process()) as browser:
        page = await browser.page()
        await page.open(address)
        yield page
        await page.quiet()
        unexpected = [each for each in page.troubles if not any(part in each for part in troubles)]
        missing = [part for part in troubles if not any(part in each for each in page.troubles)]
        assert (unexpected, missing, page.hosts) == ([], [], {"127.0.0.1"}), f"{unexpected} {missing} {page.hosts}"


def button(text: str, within: str = "document") -> str:
    """Return an expression for the button with a text."""
    return f"[...{within}.querySelectorAll('button')].find((each) => each.innerText === {json.dumps(text)})"


async def press(page: Page, *keys: str) -> None:
    """Press keys, one after the other."""
    for key in keys:
        await page.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
        await page.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)


async def look_at(page: Page, eid: str, t: int) -> None:
    """Go to a turn by its address, and wait until its state is shown and checked."""
    await page.evaluate(f"location.hash = '#{eid}/{t}'")
    await shown(page, t)


async def shown(page: Page, t: int, check: str = "same") -> None:
    """Wait until a turn is shown, and the check of its state's digest has ended.

    Args:
        page: The page.
        t: Delivery of the turn.
        check: What the check has found.
    """
    await page.until(f"document.querySelector('.turn[aria-label=\"Turn {t}\"] .digest.{check}')")
