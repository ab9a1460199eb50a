"""A person watches agents: an episode that grows, a list with new ones, and what fails now; also over a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from errata_client import EnvPool, ErrataClient
from errata_server.cli.source import runtime_for_reading
from errata_server.runtime import changes
from errata_server.runtime.changes import Changes
from errata_server.serve.journal_server import journal_app
from errata_server.settings import Settings

from ..browser.chromium import Chromium, Page, shared_process
from ..server.local_server import LocalServer, serving
from .test_episode import SHELL
from .visits import IN_CHROMIUM

pytestmark = IN_CHROMIUM

TURNS = "Number(document.querySelector('.row')?.getAttribute('aria-setsize'))"
LIVE = "document.querySelector('.stream.live')"
NEWS = "document.querySelector('button.news')"
CHOSEN = "Number(document.querySelector('.row.chosen .t')?.innerText)"
SHOWN = "[...document.querySelectorAll('.row .t')].map((each) => Number(each.innerText))"
EIDS = "[...document.querySelectorAll('tbody td:first-child a:first-child')].map((each) => each.hash.slice(1))"
NO_STREAM = """(async () => {
    while (!/^errata_event_streams 0/m.test(await (await fetch("/metrics")).text())) {
        await new Promise((resolve) => setTimeout(resolve, 20));
    }
})()"""
"""Waits until the server has no stream."""
COUNTS = "[...document.querySelectorAll('tbody td.count:nth-child(3)')].reduce((sum, each) => sum + +each.innerText, 0)"
CARDS = "[...document.querySelectorAll('.wall li')].map((each) => each.innerText)"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalServer]:
    with LocalServer(SHELL, tmp_path) as server:
        yield server


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with Chromium(shared_process()) as browser:
        page = await browser.page()
        yield page
        assert page.troubles == [] and page.hosts == {"127.0.0.1"}


def fact(name: str) -> str:
    """Return an expression for a fact in the heading of an episode."""
    names = "[...document.querySelectorAll('header dt')]"
    return f"{names}.find((each) => each.innerText === '{name}')?.nextSibling.innerText"


async def press(page: Page, key: str) -> None:
    await page.call("Input.dispatchKeyEvent", type="keyDown", key=key)


async def test_a_running_episode_grows_and_its_end_is_followed_from_the_end_only(
    server: LocalServer, page: Page
) -> None:
    async with ErrataClient(server.url) as env:
        await env.reset(task="grow")
        await page.open(f"{server.url}/viewer/#{env.eid}")
        await page.until(LIVE)
        for t in (1, 2, 3):  # the reader stands at the end
            await env.step({"command": "fail it!" if t == 2 else f"echo {t}"})
            await page.until(f"{TURNS} === {t + 1} && {CHOSEN} === {t} && location.hash.endsWith('/{t}')")
        assert await page.evaluate(fact("turns")) == "4, t=0 to 3"
        assert await page.evaluate(fact("errors")) == "command_not_found 1"
        assert await page.evaluate(fact("reward")) == "-0.3"
        assert await page.evaluate(fact("status")) == "open"

        await press(page, "Home")
        await page.until(f"{CHOSEN} === 0")
        for t in (4, 5):
            await env.step({"command": f"echo {t}"})
            await page.until(f"{TURNS} === {t + 1} && {NEWS}?.innerText === '{t - 3} new turn{'s' if t > 4 else ''}'")
        assert await page.evaluate(CHOSEN) == 0
        await page.click(NEWS)
        await page.until(f"{CHOSEN} === 5 && !{NEWS}")

        await env.step({"command": "done"})
        await page.until(f"{TURNS} === 7 && {CHOSEN} === 6 && {fact('status')} === 'done'")
        assert await page.evaluate(SHOWN) == list(range(7))


async def test_the_end_of_a_session_and_a_late_reward_are_shown(server: LocalServer, page: Page) -> None:
    async with ErrataClient(server.url) as env:
        await env.reset()
        await env.step({"command": "ls"})
        await page.open(f"{server.url}/viewer/#{env.eid}/1")
        await page.until(LIVE)
        late = {"t": 1, "value": 0.5, "source": "judge", "reward_id": "one"}
        posted = f"fetch('/episodes/{env.eid}/rewards', {{method: 'POST', body: JSON.stringify({late})}})"
        assert await page.evaluate(f"{posted}.then((answer) => answer.status)") == 200
        await page.until("document.querySelector('.detail').innerText.includes('late rewards')")
        await env.end_session()
    await page.until(f"{fact('status')} === 'closed'")
    assert await page.evaluate(TURNS) == 2


async def test_late_rewards_that_come_at_once_are_all_shown(server: LocalServer, page: Page) -> None:
    async with ErrataClient(server.url) as env:
        await env.reset()
        await env.step({"command": "ls"})
        await env.step({"command": "ls"})
        await page.open(f"{server.url}/viewer/#{env.eid}/0")
        await page.until(LIVE)
        for name, count in (("few", 2), ("many", 20)):
            rewards = [
                {"t": t, "value": 0.5, "source": "judge", "reward_id": f"{name} {t} {n}"}
                for t in range(3)
                for n in range(count)
            ]
            posted = f"fetch('/episodes/{env.eid}/rewards', {{method: 'POST', body: JSON.stringify({rewards})}})"
            assert await page.evaluate(f"{posted}.then((answer) => answer.status)") == 200
            for t in range(3):
                await page.evaluate(f"location.hash = '{env.eid}/{t}'")
                came = "[...document.querySelectorAll('.turn dt')].find((each) => each.innerText === 'late rewards')"
                shown = f"{came}?.nextSibling.innerText === '{22 if name == 'many' else 2}'"
                await page.until(f"document.querySelector('h2').innerText.startsWith('t={t} ') && {shown}")


async def test_screens_are_read_beside_many_sessions_that_step(server: LocalServer, page: Page) -> None:
    """Each screen has what it shows while 200 sessions step as fast as they can, a tenth of their steps with errors."""
    going, steps = True, 0
    async with EnvPool(server.url, 200) as pool:
        await pool.reset_batch([{"task": f"task-{n}"} for n in range(200)])

        async def play() -> None:
            nonlocal steps
            while going:
                await pool.step_batch([{"command": "fail it!" if n % 10 == 0 else "ls"} for n in range(200)])
                steps += 200

        playing = asyncio.create_task(play())
        try:
            await page.open(f"{server.url}/viewer/")
            await page.until(f"{LIVE} && {EIDS}.length === 100")
            before = await page.evaluate(COUNTS)
            await page.until(f"{COUNTS} > {before}")
            await page.evaluate("location.hash = 'live'")
            await page.until(f"{CARDS}.length >= 5")
            eid = await page.evaluate("document.querySelector('.wall a').hash.slice(1).split('/')[0]")
            await page.evaluate(f"location.hash = '{eid}/1'")
            await page.until("document.querySelector('.facts.failed') && document.querySelector('.digest.same')")
            grown = await page.evaluate(TURNS)
            await page.until(f"{TURNS} > {grown}")
            assert not playing.done() and steps > 0
        finally:
            going = False
            await playing


async def test_a_deleted_episode_says_so(server: LocalServer, page: Page) -> None:
    async with ErrataClient(server.url) as env:
        await env.reset()
        await page.open(f"{server.url}/viewer/#{env.eid}")
        await page.until(LIVE)
        await page.quiet()
        assert await page.evaluate(f"fetch('/episodes/{env.eid}', {{method: 'DELETE'}}).then((a) => a.status)") == 200
        await page.until("document.querySelector('[role=alert]')?.innerText === 'the episode was deleted'")
    page.troubles[:] = [each for each in page.troubles if "404" not in each]  # read before it knew


async def test_an_episode_grows_on_after_a_restart_with_each_turn_once(tmp_path: Path) -> None:
    async with Chromium(shared_process()) as browser:
        page = await browser.page()
        with LocalServer(SHELL, tmp_path) as first:
            url = first.url
            env = ErrataClient(url, durable=True)
            await env.connect()
            await env.reset()
            for t in (1, 2):
                await env.step({"command": f"echo {t}"})
            await page.open(f"{url}/viewer/#{env.eid}/2")
            await page.until(f"{LIVE} && {TURNS} === 3")
            await page.evaluate("window.same = true")
        await page.until("document.querySelector('.stream.lost, .stream.refused')")
        with LocalServer(SHELL, tmp_path, port=urlsplit(url).port or 0):
            for t in (3, 4):  # some of it before the page is back
                await env.step({"command": f"echo {t}"})
            await page.until(f"{LIVE} && {TURNS} === 5 && {CHOSEN} === 4")
            await env.step({"command": "echo 5"})
            await page.until(f"{TURNS} === 6 && {CHOSEN} === 5")
            assert await page.evaluate(SHOWN) == list(range(6))
            assert await page.evaluate("window.same")  # the page was not loaded again
            assert await page.evaluate(fact("status")) == "open"
            await env.close()
        refused = [trouble for trouble in page.troubles if "ERR_" not in trouble]
        assert refused == []  # nothing but that the server was away


async def test_a_refused_stream_is_shown_and_tried_again(
    server: LocalServer, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "MAX_READERS", 0)
    async with ErrataClient(server.url) as env:
        await env.reset()
        await page.open(f"{server.url}/viewer/#{env.eid}")
        await page.until("document.querySelector('.stream.refused')?.innerText.includes('tried again')")
        await env.step({"command": "ls"})
        await page.until(f"{TURNS} === 2")  # read at the next try, although that was refused too
        monkeypatch.undo()
        await page.until(LIVE)
        await env.step({"command": "ls"})
        await page.until(f"{TURNS} === 3")
    assert page.troubles and all("429" in each or "503" in each for each in page.troubles)
    page.troubles.clear()


async def test_a_hidden_page_takes_no_place_and_reads_on_when_it_is_seen(server: LocalServer, page: Page) -> None:
    async with ErrataClient(server.url) as env:
        await env.reset()
        await page.open(f"{server.url}/viewer/#{env.eid}")
        await page.until(LIVE)
        hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true})"
        changed = "; document.dispatchEvent(new Event('visibilitychange'))"
        await page.evaluate(hide % "true" + changed)
        await page.evaluate(NO_STREAM)
        await env.step({"command": "ls"})
        await page.evaluate(hide % "false" + changed)
        await page.until(f"{LIVE} && {TURNS} === 2")


async def test_an_episode_in_a_directory_grows_although_nothing_tells_of_it(
    server: LocalServer, page: Page, tmp_path: Path
) -> None:
    files = "document.querySelector('.stream.files')"
    async with ErrataClient(server.url) as env:
        await env.reset()
        app = journal_app({tmp_path: runtime_for_reading(tmp_path)}, Settings(), changes=Changes())
        with serving(app) as url:
            await page.open(f"{url}/viewer/#{env.eid}")
            await page.until(f"{files} && {TURNS} === 1")
            await env.step({"command": "ls"})
            await page.until(f"{TURNS} === 2")
            await page.evaluate("location.hash = ''")
            await page.until(f"{files} && {EIDS}.length === 1")
            await env.reset()
            await page.until(f"{NEWS}?.innerText === '1 new'")


async def test_the_list_says_what_is_new_and_changes_rows_in_place(server: LocalServer, page: Page) -> None:
    row = "document.querySelector('tbody tr:nth-child(%d)')?.innerText.split('\\t')"
    async with ErrataClient(server.url) as old, ErrataClient(server.url) as other:
        await old.reset(task="old")
        await page.open(f"{server.url}/viewer/")
        await page.until(f"{LIVE} && {EIDS}.length === 1")
        await other.reset(task="new")
        await page.until(f"{NEWS}?.innerText === '1 new'")
        assert await page.evaluate(EIDS) == [old.eid]
        await old.step({"command": "fail it!"})
        await page.until(f"{row % 1}?.[2] === '2' && {row % 1}?.[5] === 'command_not_found 1'")
        await page.click(NEWS)
        await page.until(f"{EIDS}.length === 2 && !{NEWS}")
        assert await page.evaluate(EIDS) == [other.eid, old.eid]
        await other.step({"command": "done"})
        await page.until(f"{row % 1}?.[4] === 'done' && {row % 1}?.[3] === '1'")
        assert await page.evaluate(f"{row % 2}[4]") == "open"
    await page.until(f"{row % 2}?.[4] === 'closed'")


async def test_what_is_typed_into_a_filter_stays_while_rows_change(server: LocalServer, page: Page) -> None:
    field = "document.querySelector('input[name=task]')"
    async with ErrataClient(server.url) as env:
        await env.reset(task="old")
        await page.open(f"{server.url}/viewer/")
        await page.until(f"{LIVE} && {EIDS}.length === 1")
        await page.fill(field, "ol")
        await env.step({"command": "ls"})
        await page.until("document.querySelector('tbody .count').innerText === '2'")
        assert await page.evaluate(f"{field}.value") == "ol"
        assert await page.evaluate(f"document.activeElement === {field}")


async def test_a_row_that_a_filter_has_no_more_is_struck_out(server: LocalServer, page: Page) -> None:
    async with ErrataClient(server.url) as one, ErrataClient(server.url) as other:
        await one.reset()
        await other.reset()
        await page.open(f"{server.url}/viewer/?status=open")
        await page.until(f"{LIVE} && {EIDS}.length === 2")
        await one.step({"command": "done"})
        await page.until(f"document.querySelector('tr.gone a')?.hash === '#{one.eid}'")
        await page.until("document.querySelector('tr.gone').innerText.includes('done')")  # its event may come later
        assert await page.evaluate("document.querySelectorAll('tr.gone').length") == 1


async def test_the_wall_has_the_newest_error_of_each_running_episode(server: LocalServer, page: Page) -> None:
    async with ErrataClient(server.url) as one, ErrataClient(server.url) as two, ErrataClient(server.url) as three:
        for env, task in ((one, "first"), (two, "second"), (three, "third")):
            await env.reset(task=task)
        await one.step({"command": "fail early!"})
        await one.step({"command": "ls"})
        await page.open(f"{server.url}/viewer/")
        await page.click("document.querySelector('nav a[href=\"#live\"]')")
        await page.until(f"{LIVE} && {CARDS}.length === 1")
        card = await page.evaluate(f"{CARDS}[0]")
        for text in ("command_not_found", "first", "fail early!", f"{one.eid} t=1"):
            assert text in card
        fork = await one.fork(1)  # begins with its parent's error, and did not fail itself
        await two.step({"command": "fail <b>later</b>!"})
        await page.until(f"{CARDS}.length === 2 && {CARDS}[0].includes('fail <b>later</b>!')")  # newest first
        await one.step({"command": "fail again!"})
        await page.until(f"{CARDS}.length === 2 && {CARDS}[0].includes('fail again!')")
        assert "4 running" in await page.evaluate("document.querySelector('main').innerText")
        await fork.end_session()
        await two.step({"command": "done"})
        await page.until(f"{CARDS}.length === 1")
        await one.reset(task="another")  # what was before the reset is over
        await page.until(f"{CARDS}.length === 0 && document.querySelector('main')?.innerText.includes('no running')")
        await three.step({"command": "fail to!"})
        await page.until(f"{CARDS}.length === 1")
        await page.click("document.querySelector('.wall a')")
        await page.until(f"location.hash === '#{three.eid}/1' && document.querySelector('mark')?.textContent === 'to'")
        await page.evaluate("history.back()")
        await page.until(f"{CARDS}.length === 1 && document.title === 'Failing now'")


async def test_the_wall_stands_still_under_a_pointer(server: LocalServer, page: Page) -> None:
    async with ErrataClient(server.url) as one, ErrataClient(server.url) as two:
        for env in (one, two):
            await env.reset()
        await one.step({"command": "fail one!"})
        await page.open(f"{server.url}/viewer/#live")
        await page.until(f"{LIVE} && {CARDS}.length === 1")
        x, y = await page.evaluate(
            "(({x, y}) => [x + 9, y + 9])(document.querySelector('.wall a').getBoundingClientRect())"
        )
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await page.until("document.querySelector('.wall:hover')")
        await two.step({"command": "fail two!"})
        await page.until("document.querySelector('main')?.innerText.includes('changes wait')")
        assert "fail one!" in await page.evaluate(f"{CARDS}.join()")
        assert "fail two!" not in await page.evaluate(f"{CARDS}.join()")
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        await page.until(f"{CARDS}.length === 2 && {CARDS}[0].includes('fail two!')")


async def test_the_wall_fits_a_narrow_window(server: LocalServer, page: Page) -> None:
    async with ErrataClient(server.url) as env:
        await env.reset(task="a" * 200)
        await env.step({"command": f"fail {'b' * 300}!"})
        await page.open(f"{server.url}/viewer/#live")
        await page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
        await page.until(f"{CARDS}.length === 1")
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
