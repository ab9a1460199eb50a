"""A tab for tests of the viewer's screens."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ..browser.chromium import Chromium, Page


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    """An empty tab; at the end nothing has gone wrong in it."""
    async with Chromium() as browser:
        page = await browser.page()
        yield page
        await page.quiet()
        assert page.troubles == [] and page.hosts == {"127.0.0.1"}
