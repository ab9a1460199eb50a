"""A browser process for all tests of the web interface, and of the viewer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .chromium import end_shared_processes


@pytest.fixture(scope="session", autouse=True)
def browser_process() -> Iterator[None]:
    """Ends the browser process that tests have shared."""
    yield
    end_shared_processes()
