"""A browser process for all of the viewer's tests, and a tab of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ..browser.chromium import Chromium, Page, shared_process
from ..browser.conftest import browser_process

__all__ = ["browser_process"]


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    """An empty tab; at the end nothing has gone wrong in it."""
    async with Chromium(shared_process()) as browser:
        page = await browser.page()
        yield page
        await page.quiet()
        assert page.troubles == [] and page.hosts == {"127.0.0.1"}
