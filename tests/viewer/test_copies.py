"""The commands that the viewer copies give the bytes that the server keeps; what cannot be loaded is said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from errata_client import ErrataClient
from tests.hangs import HANGS_S

from ..browser.chromium import Page
from ..server.local_server import LocalServer
from .visits import IN_CHROMIUM, SHELL, button, press, shown, visit

pytestmark = IN_CHROMIUM

LONG_ACTION = f"fail {'ü' * 40_000}"
COMMANDS = ["ls", "nul", LONG_ACTION]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalServer(SHELL, tmp_path_factory.mktemp("data")) as server:
        with ErrataClient(server.url).sync() as env:
            env.reset()
            for command in COMMANDS:
                env.step({"command": command})
        yield server.url


@pytest.fixture(scope="module")
def eid(server: str) -> str:
    return str(httpx.get(f"{server}/episodes").json()["episodes"][0]["eid"])


def run(name: str, text: str, folder: Path) -> bytes:
    """Run a copied command as it is, as whoever pastes it does; return what it printed."""
    if name == "Python":
        (folder / "pasted.py").write_text(text)
        command = [sys.executable, str(folder / "pasted.py")]
    else:
        command = ["bash", "-c", text]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        command, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, timeout=HANGS_S, check=True
    ).stdout


async def copied(page: Page, name: str) -> str:
    """Press a copy button, and return what the clipboard has then and did not have before."""
    await page.evaluate("navigator.clipboard.writeText('')")
    await page.click(button(name))
    await page.until(button("copied"))
    text: str = await page.evaluate("navigator.clipboard.readText()")
    await page.until(button(name))
    return text


@pytest.mark.parametrize("t", [1, 2])
async def test_each_copied_command_gives_the_bytes_of_the_state(server: str, eid: str, t: int, tmp_path: Path) -> None:
    kept = httpx.get(f"{server}/episodes/{eid}/states/{t}").content
    async with visit(f"{server}/viewer/#{eid}/{t}") as page:
        await page.allow_clipboard()
        await shown(page, t)
        for name in ("curl", "Python", "CLI"):
            assert run(name, await copied(page, name), tmp_path) == kept, name


async def test_a_page_without_a_clipboard_shows_the_command(server: str, eid: str) -> None:
    async with visit(f"{server}/viewer/#{eid}/1") as page:
        await shown(page, 1)
        await page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        await page.click(button("curl"))
        command = await page.until("document.querySelector('.copies pre[aria-label=curl]')?.textContent")
        assert command == f"curl -sS '{server}/episodes/{eid}/states/1'"
        await page.click(button("curl"))
        await page.until("!document.querySelector('.copies pre')")


async def test_an_action_that_cannot_be_loaded_is_said_and_asked_for_again(server: str, eid: str) -> None:
    async with visit(f"{server}/viewer/#{eid}/1", troubles=["503"]) as page:
        await shown(page, 1)
        await page.answer("*/states/3/action", b'{"code": "OVERLOADED", "message": "try later"}', 503)
        await press(page, "j", "j")
        trouble = await page.until("document.querySelector('.turn .trouble')?.innerText")
        assert trouble == "only the beginning of the action: try later"
        assert await page.evaluate("document.querySelector('.turn mark')") is None
        await page.call("Fetch.disable")
        await page.click(
            "[...document.querySelectorAll('.turn button')].find((each) => each.innerText.startsWith('all '))"
        )
        await page.until("document.querySelector('.turn mark')?.textContent.length === 40_000")
        assert await page.evaluate("document.querySelector('.turn .trouble')") is None


async def test_sums_that_cannot_be_computed_are_said(server: str) -> None:
    async with visit(f"{server}/viewer/", troubles=["400"]) as page:
        await page.until("document.querySelector('.sums')")
        await page.answer("*/episodes/aggregates*", b'{"code": "INVALID_REQUEST", "message": "too many"}', 400)
        await page.fill("document.querySelector('input[name=text]')", "ep_")
        await press(page, "Enter")
        await page.click(button("filter"))
        assert await page.until("document.querySelector('.trouble')?.innerText") == "no sums: too many"
        await page.until("document.querySelectorAll('tbody tr').length === 1")


async def test_a_state_is_first_shown_as_fields_where_the_agents_text_is_not_known(server: str, eid: str) -> None:
    pressed = "document.querySelector('.switch [aria-pressed=true]').innerText"
    said = '{"t": 1, "kind": "step", "agent_text": "text", "agent_text_version": null, "as_read": %s}'
    async with visit(f"{server}/viewer/#{eid}/0") as page:
        await shown(page, 0)
        for t, known, usual in ((1, "false", "fields"), (2, "true", "agent text")):
            await page.answer(f"*/states/{t}/agent_text", (said % known).encode())
            await press(page, "j")
            await shown(page, t)
            assert await page.evaluate(pressed) == usual
        await press(page, "a")
        await page.until(f"{pressed} === 'fields'")
        await press(page, "a")
        await page.until(f"{pressed} === 'raw'")
        await press(page, "k")  # what was chosen counts for every turn
        await shown(page, 1)
        assert await page.evaluate(pressed) == "raw"
