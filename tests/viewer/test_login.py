"""A person opens a link to a turn of a server with tokens: the login, the turn, and nothing of another principal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from errata_client import ErrataClient
from errata_server.settings import Settings

from ..browser.chromium import Page
from ..server.local_server import LocalServer
from .test_copies import copied, run
from .visits import IN_CHROMIUM, SHELL, button, look_at, shown, visit

pytestmark = IN_CHROMIUM

ANN, BOB = "token-of-ann", "token-of-bob"
FIELD = "document.querySelector('input[name=token]')"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tokens = Settings(token=SecretStr(f"{ANN},{BOB}"))
    with LocalServer(SHELL, tmp_path_factory.mktemp("data"), tokens) as server:
        yield server.url


@pytest.fixture(scope="module")
def eids(server: str) -> dict[str, str]:
    """An episode of each token."""
    found = {}
    for token in (ANN, BOB):
        with ErrataClient(server, headers={"Authorization": f"Bearer {token}"}).sync() as env:
            env.reset(task=f"a task of {token}")
            env.step({"command": f"secret of {token}"})
            found[token] = str(env.eid)
    return found


async def log_in(page: Page, token: str) -> None:
    await page.fill(FIELD, token)
    await page.click(button("log in"))


async def test_a_link_shows_the_login_and_then_its_turn(
    server: str, eids: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with visit(f"{server}/viewer/#{eids[ANN]}/1", troubles=["401"]) as page:
        await page.until(FIELD)
        assert await page.evaluate("document.body.innerText") == (
            "Login\n\nThis server shows episodes to those who have one of its tokens (ERRATA_TOKEN).\n\ntoken  log in"
        )
        asked = "performance.getEntriesByType('resource').map((one) => new URL(one.name).pathname)"
        assert not any(path.startswith("/episodes") for path in await page.evaluate(asked))
        for wrong, said in (("not-a-token", "the token is not this server's"), ("two words", "a token has no spaces")):
            await log_in(page, wrong)
            await page.until(f"document.querySelector('.trouble')?.innerText.startsWith({said!r})".replace('"', '"'))
        await log_in(page, ANN)
        await shown(page, 1)
        assert f"secret of {ANN}" in await page.evaluate("document.body.innerText")
        assert await page.evaluate("document.cookie + JSON.stringify([localStorage, sessionStorage])") == "[{},{}]"
        await page.allow_clipboard()
        kept = httpx.get(f"{server}/episodes/{eids[ANN]}/states/1", headers={"Authorization": f"Bearer {ANN}"}).content
        monkeypatch.setenv("ERRATA_TOKEN", ANN)
        assert os.environ["ERRATA_TOKEN"] == ANN
        for name in ("curl", "Python", "CLI"):
            command = await copied(page, name)
            assert ANN not in command and run(name, command, tmp_path) == kept, name


async def test_another_principals_episode_is_unknown_and_a_login_ends(server: str, eids: dict[str, str]) -> None:
    async with visit(f"{server}/viewer/", troubles=["404"]) as page:
        await page.until(FIELD)
        await log_in(page, BOB)
        links = "[...document.querySelectorAll('tbody a')].map((each) => each.innerText)"
        assert await page.until(f"document.querySelector('tbody a') && {links}") == [eids[BOB]]
        assert "1 episodes" in await page.until("document.querySelector('.sums')?.innerText")
        await page.evaluate(f"location.hash = '#{eids[ANN]}/1'")
        assert "no episode" in await page.until("document.querySelector('.trouble')?.innerText")
        await look_at(page, eids[BOB], 1)
        await page.click(button("log out"))
        await page.until(FIELD)
        assert BOB not in await page.evaluate("document.body.innerText")
        await page.call("Page.reload")
        await page.until(FIELD)
        await log_in(page, BOB)
        await shown(page, 1)


async def test_a_login_that_ended_elsewhere_is_asked_for_again(server: str, eids: dict[str, str]) -> None:
    async with visit(f"{server}/viewer/#{eids[ANN]}/0", troubles=["401"]) as page:
        await page.until(FIELD)
        await log_in(page, ANN)
        await shown(page, 0)
        await page.evaluate("fetch('logout', { method: 'POST' }).then((answer) => answer.text())")  # in another tab
        await page.evaluate(f"location.hash = '#{eids[ANN]}/1'")
        await page.until(FIELD)
        assert f"secret of {ANN}" not in await page.evaluate("document.body.innerText")
        await log_in(page, ANN)
        await shown(page, 1)
