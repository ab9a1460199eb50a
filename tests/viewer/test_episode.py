"""A person looks at an episode: its marked actions, its outputs, whatever is in them, and its turns by keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from errata_client import ErrataClient

from ..browser.chromium import Chromium, Page, shared_process
from ..server.local_server import LocalServer
from .shell import COLOURS, HOSTILE
from .visits import IN_CHROMIUM

pytestmark = IN_CHROMIUM

SHELL = "tests.viewer.shell:ShellEnvironment"
FAMILY = "\U0001f469\u200d\U0001f467"
WRONG = {"fail 🎉 e\u0301 zz!!": "🎉 e\u0301 zz", f"ü🎉; fail {FAMILY}ñ!": f"{FAMILY}ñ"}
"""Actions and what is wrong in each: the span counts code points."""
COMMANDS = [*WRONG, *HOSTILE, "colours", "lines", "long", "done"]
OUTPUT = "document.querySelector('pre[aria-label=\"output\"]')"


SCROLLED = """(async () => {
  const { html, render } = await import("./html.js");
  const { Timeline } = await import("./timeline.js");
  const turn = { kind: "step", action: "ls", error_kind: null, done: false, reward: null, duration_s: null };
  const turns = Array.from({ length: 2000 }, (_, t) => ({ ...turn, t }));
  let renders = 0;
  turns.slice = (...span) => (renders++, Array.prototype.slice.apply(turns, span));
  const box = document.body.appendChild(document.createElement("div"));
  render(html`<${Timeline} turns=${turns} chosen=${0} choose=${() => {}} />`, box);
  const list = box.firstElementChild;
  list.style = "height: 300px; border: 0";
  const frames = async () => { for (let n = 0; n < 4; n++) await new Promise(requestAnimationFrame); };
  window.scrolled = async (tops) => {
    await frames();
    renders = 0;
    for (const top of tops) {
      list.scrollTop = top;
      list.dispatchEvent(new Event("scroll"));
    }
    await frames();
    const rows = list.querySelectorAll(".row");
    return { renders, first: rows[0].id, last: rows[rows.length - 1].id };
  };
})()"""
"""Puts a timeline of 2,000 turns into the page, 10 rows of it in view. ``scrolled`` scrolls it to several places before
the next frame, and returns how often it was rendered and which rows are there then."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalServer(SHELL, tmp_path_factory.mktemp("data")) as server:
        with ErrataClient(server.url).sync() as env:
            env.reset()
            for command in COMMANDS:
                env.step({"command": command})
        yield server.url


@pytest.fixture
async def page(server: str) -> AsyncIterator[Page]:
    async with Chromium(shared_process()) as browser:
        page = await browser.page()
        await page.open(f"{server}/viewer/")
        await page.until("document.querySelectorAll('tbody tr').length === 1")
        yield page
        await page.quiet()
        assert page.troubles == [] and page.hosts == {"127.0.0.1"}


async def look(page: Page, command: str) -> None:
    """Go to a command's turn by its address, and show the fields of its state."""
    t = COMMANDS.index(command) + 1
    await page.evaluate("window.eid ??= document.querySelector('tbody a').hash.slice(1)")
    await page.evaluate(f"location.hash = `#${{eid}}/{t}`")
    await at(page, t)
    await page.click("[...document.querySelectorAll('.switch button')].find((each) => each.innerText === 'fields')")
    await page.until(OUTPUT)


async def at(page: Page, t: int) -> None:
    """Wait until a turn is shown, and its state's digest has been checked."""
    shown = f"document.querySelector('h2')?.innerText.startsWith('t={t} ')"
    await page.until(f"{shown} && document.querySelector('.digest.same')")


async def test_the_span_is_marked_by_code_points(page: Page) -> None:
    for command, wrong in WRONG.items():
        await look(page, command)
        assert await page.evaluate("document.querySelector('mark').textContent") == wrong
        assert await page.evaluate("document.querySelector('pre.action').textContent") == command
        assert "a/b.py:7" in await page.evaluate("document.querySelector('.facts.failed').innerText")


async def test_hostile_outputs_are_text(page: Page) -> None:
    title = await page.evaluate("document.title")
    for command in HOSTILE:
        await look(page, command)
        shown = await page.evaluate(f"{OUTPUT}.textContent")
        assert await page.evaluate("window.hacked") is None
        assert await page.evaluate("document.querySelectorAll('.detail :is(a, img, script, iframe)').length") == 0
        assert not set(shown) & set("\x00\x1b\x7f\u202e\u2066\u2069\u202c\u200b\u200d"), command
        if command in ("script", "link", "template", "nested"):
            assert shown == HOSTILE[command] + "\n"
    assert await page.evaluate("document.title") != title  # the page's own, of the turn
    await look(page, "cursor")
    assert await page.evaluate(f"{OUTPUT}.textContent") == "one\u241b\u241btwo\u241bthree\u241bfour\u241bfive\n"
    await look(page, "joiner")
    assert await page.evaluate(f"{OUTPUT}.textContent") == "paU+200Dss\n"
    await look(page, "bidi")
    assert "U+202EU+2066level" in await page.evaluate(f"{OUTPUT}.textContent")


async def test_colours_of_terminals_are_shown(page: Page) -> None:
    await look(page, "colours")
    assert "\x1b" in COLOURS and "\u241b" not in await page.evaluate(f"{OUTPUT}.textContent")
    assert await page.evaluate(f"{OUTPUT}.querySelector('.bold.front-1').textContent") == "red"
    style = (
        "getComputedStyle([...document.querySelectorAll('.line span')].find((each) => each.textContent === '%s')).%s"
    )
    assert await page.evaluate(style % ("orange", "color")) == "rgb(255, 135, 0)"
    assert await page.evaluate(style % ("deep", "backgroundColor")) == "rgb(1, 2, 3)"


@pytest.mark.parametrize(("command", "most"), [("lines", 30_000), ("long", 3_000)])
async def test_long_outputs_are_folded_and_unfold(page: Page, command: str, most: int) -> None:
    await look(page, command)
    before = await page.evaluate(f"{OUTPUT}.textContent.length")
    assert before < most
    await page.click(
        "[...document.querySelectorAll('.output button')].find((each) => each.innerText.includes(' more of '))"
    )
    await page.until(f"{OUTPUT}.textContent.length > {before + 40_000}")


async def test_keys_move_through_the_turns(page: Page) -> None:
    await look(page, "script")
    now = COMMANDS.index("script") + 1
    for key, t in (("j", now + 1), ("k", now), ("p", 2), ("p", 1), ("n", 2), ("Home", 0), ("End", len(COMMANDS))):
        await page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        await at(page, t)
        assert (await page.evaluate("location.hash")).endswith(f"/{t}")


async def test_the_chosen_turn_stays_in_view_when_the_window_gets_smaller(page: Page) -> None:
    await look(page, COMMANDS[-1])
    for height in (900, 480):
        await page.call(
            "Emulation.setDeviceMetricsOverride", width=1200, height=height, deviceScaleFactor=1, mobile=False
        )
        await page.until(
            "((list, row) => list.bottom < innerHeight + 2 && row.top > list.top - 2 && row.bottom < list.bottom + 2)"
            "(...['.timeline', '.row.chosen'].map((each) => document.querySelector(each).getBoundingClientRect()))"
        )


async def test_a_scrolled_timeline_is_rendered_once_a_frame_and_only_for_other_rows(page: Page) -> None:
    await page.evaluate(SCROLLED)
    within_blocks, far, back = await page.evaluate(
        "(async () => [await scrolled([10, 25, 59]), await scrolled([6000, 9000, 30000]), await scrolled([0])])()"
    )
    assert within_blocks == {"renders": 0, "first": "turn-0", "last": "turn-17"}
    assert far == {"renders": 1, "first": "turn-990", "last": "turn-1019"}
    assert back == {"renders": 1, "first": "turn-0", "last": "turn-17"}


async def test_a_first_error_of_a_kind_has_an_address(page: Page) -> None:
    await page.evaluate("window.eid ??= document.querySelector('tbody a').hash.slice(1)")
    for kind, t in (("command_not_found", 1), ("no_such_kind", None)):
        await page.evaluate(f"location.hash = `#${{eid}}/error/{kind}`")
        if t is not None:
            await at(page, t)
        else:
            await page.until("document.querySelector('.detail').innerText === 'no turn failed so'")


async def test_a_narrow_window_needs_no_scrolling_sideways(page: Page) -> None:
    await page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
    assert await page.evaluate("document.documentElement.scrollWidth") == 360
    await look(page, "script")
    assert await page.evaluate("document.documentElement.scrollWidth") == 360
