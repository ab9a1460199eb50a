"""Servers for the client's tests: a scripted Errata and stock OpenEnv."""

from __future__ import annotations

from collections.abc import Iterator

import errata_client.openenv_import  # noqa: F401 - first: without it all of gradio is imported to collect these tests

# isort: split
import pytest
from echo_environment import stock_app
from fake_errata import FakeErrata
from loopback import served


@pytest.fixture
def errata() -> FakeErrata:
    """A scripted Errata server's memory; `errata_url` serves it."""
    return FakeErrata()


@pytest.fixture
def errata_url(errata: FakeErrata) -> Iterator[str]:
    """Base URL of the scripted Errata server."""
    with served(errata.app) as url:
        yield url


@pytest.fixture(scope="module")
def stock_url() -> Iterator[str]:
    """Base URL of stock OpenEnv 0.10 with an echo environment."""
    with served(stock_app()) as url:
        yield url
