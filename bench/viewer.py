"""How soon the viewer paints a long list and a long episode, beside a static page of as many bytes; its longest task.

    python bench/viewer.py [--episodes N] [--turns N] [--repeats N] [--json] [--smoke]

Fills a data directory with episodes, one of them with many turns, serves it with ``errata view``, and opens the list
and that episode in Debian's Chromium. The static page is what the viewer shows then, as one HTML file with the viewer's
style sheet and without its scripts, filled up by a comment to the bytes that the viewer loaded in all, unzipped. Each
repeat opens both, in turns, in browsers of their own. "first" is the browser's first contentful paint, "content" the
first frame with rows and, of the episode, with the checked state. "task" is the longest task of the page's thread
while it loads, and then while its rows are scrolled through: "throttled" as the browser reports it with the processor
slowed down four times, which on a busy machine is mostly waiting, also four times; "cpu" four times its processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from msgspec.structs import replace  # noqa: E402

from episode_lists import BEGAN, fill, records_of  # noqa: E402
from errata_server.journal import DeliveryRow, IndexedJournal, journal_in  # noqa: E402
from tests.browser.chromium import Chromium, Page  # noqa: E402

SLOWER = 4
SCREENS = {
    "list": ("document.querySelectorAll('tbody tr').length >= 100 && document.querySelector('.sums')", ".scrolls"),
    "episode": ("document.querySelector('.timeline .row') && document.querySelector('.digest.same')", ".timeline"),
}
"""What is there when a screen has its content, and the element that is scrolled."""

NOTE = """
    window.noted = { content: null, tasks: [] };
    new PerformanceObserver((list) => noted.tasks.push(...list.getEntries().map((one) => one.duration)))
        .observe({ type: 'longtask', buffered: true });
    const look = () => {
        if (document.body && (%s)) setTimeout(() => { noted.content = performance.now(); });
        else requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
"""
FIRST = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
BYTES = """performance.getEntriesByType('resource').reduce((sum, one) => sum + one.decodedBodySize, 0)
    + performance.getEntriesByType('navigation')[0].decodedBodySize"""
STILL = """(() => {
    const page = document.documentElement.cloneNode(true);
    page.querySelectorAll('script').forEach((each) => each.remove());
    return '<!doctype html>' + page.outerHTML;
})()"""


async def directory_of(place: Path, episodes: int, turns: int) -> str:
    """Fill a data directory; return the eid of its long episode."""
    journal = IndexedJournal(journal_in(place))
    await fill(journal, episodes - 1)
    session, episode, *deliveries = records_of(episodes, random.Random(2))
    first = next(row for row in deliveries if isinstance(row, DeliveryRow))
    rows: list[Any] = [session, episode]
    for t in range(turns):
        kind = "nonzero_exit" if t % 7 == 3 else None
        action = json.dumps({"type": "step", "data": {"command": f"grep -rn word-{t} src"}}).encode()
        rows.append(
            replace(
                first,
                t=t,
                id=t + 1,
                kind="step" if t else "reset",
                request=action,
                created=BEGAN + 1e6 + t,
                done=False,
                error_kind=kind,
            )
        )
    for at in range(0, len(rows), 500):
        await journal.commit(*rows[at : at + 500])
    journal.close()
    return str(episode.eid)


@contextmanager
def viewing(place: Path) -> Iterator[str]:
    """Serve a data directory; yield the viewer's address."""
    command = [sys.executable, "-m", "errata_server.cli", "view", "--no-browser", str(place)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@contextmanager
def still(pages: dict[str, bytes]) -> Iterator[str]:
    """Serve pages by their paths; yield the address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages.get(self.path, b"")
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/css" if self.path.endswith(".css") else "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):  # a browser that has seen enough may end before the comment has come
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def opened(browser: Chromium, address: str, ready: str, slower: int = 1) -> Page:
    """Open a page and wait for its content."""
    page = await browser.page()
    await page.call("Page.enable")
    await page.call("Page.addScriptToEvaluateOnNewDocument", source=NOTE % ready)
    await page.call("Emulation.setCPUThrottlingRate", rate=slower)
    await page.open(address)
    await page.until("window.noted?.content", timeout_s=120.0)
    return page


async def painted(address: str, ready: str) -> dict[str, float]:
    """Return when a page in a new browser was painted first, and with its content, in milliseconds."""
    async with Chromium() as browser:
        page = await opened(browser, address, ready)
        return {"first": await page.until(FIRST), "content": await page.evaluate("noted.content")}


async def scroll(page: Page, scrolled: str) -> None:
    """Scroll an element down and half the way up, as with a finger."""
    x, y = await page.evaluate(
        f"(({{left, top, width}}) => [left + width / 2, Math.min(top + 300, innerHeight - 50)])"
        f"(document.querySelector({json.dumps(scrolled)}).getBoundingClientRect())"
    )
    for distance in (-30_000, 15_000):
        await page.call("Input.synthesizeScrollGesture", x=x, y=y, yDistance=distance, speed=10_000)


async def longest_tasks(address: str, ready: str, scrolled: str) -> dict[str, float]:
    """Return the longest task of a page on a slow processor while it loads and while it is scrolled, milliseconds."""
    longest = "Math.max(0, ...noted.tasks)"
    async with Chromium() as browser:
        page = await opened(browser, address, ready, SLOWER)
        await page.quiet()
        loading = await page.evaluate(longest)
        await page.evaluate("noted.tasks = [], true")
        await scroll(page, scrolled)
        return {"loading": loading, "scrolling": await page.evaluate(longest)}


async def processor_times(address: str, ready: str, scrolled: str) -> dict[str, float]:
    """Return the processor time of the longest task while a page loads and while it is scrolled, ms, times `SLOWER`."""
    found: dict[str, float] = {}
    async with Chromium() as browser:
        page = await opened(browser, "about:blank", "true")
        noted = page.note
        for when in ("loading", "scrolling"):
            events: list[dict[str, Any]] = []
            ended = asyncio.Event()

            def note(method: str, event: dict[str, Any], events: Any = events, ended: Any = ended) -> None:
                if method == "Tracing.dataCollected":
                    events.extend(event["value"])
                elif method == "Tracing.tracingComplete":
                    ended.set()
                noted(method, event)

            page.note = note  # type: ignore[method-assign]
            categories = ["toplevel", "devtools.timeline", "disabled-by-default-devtools.timeline"]
            await page.call(
                "Tracing.start", transferMode="ReportEvents", traceConfig={"includedCategories": categories}
            )
            if when == "loading":
                await page.open(address)
                await page.until(ready, timeout_s=120.0)
                await page.quiet()
            else:
                await scroll(page, scrolled)
            await page.call("Tracing.end")
            await ended.wait()
            # The page's thread is the one that runs its scripts.
            threads = {(one["pid"], one["tid"]) for one in events if one["name"] == "FunctionCall"}
            tasks = [one for one in events if one["name"] == "RunTask" and (one["pid"], one["tid"]) in threads]
            found[when] = SLOWER * max((one.get("tdur", 0) for one in tasks), default=0) / 1e3
    return found


async def measure(episodes: int, turns: int, repeats: int) -> dict[str, Any]:
    """Return the figures of each screen."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        eid = await directory_of(Path(scratch), episodes, turns)
        with viewing(Path(scratch)) as viewer:
            for name, (ready, scrolled) in SCREENS.items():
                address = viewer if name == "list" else f"{viewer}#{eid}/{turns // 2}"
                async with Chromium() as browser:
                    page = await opened(browser, address, ready)
                    await page.quiet()
                    size, text = await page.evaluate(BYTES), (await page.evaluate(STILL)).encode()
                    style = await page.evaluate("fetch('viewer.css').then((answer) => answer.text())")
                    shown = await page.evaluate("document.querySelectorAll('*').length")
                text += b"<!--" + b" " * max(0, size - len(text) - len(style.encode()) - 7) + b"-->"
                times: dict[str, list[dict[str, float]]] = {"viewer": [], "still": []}
                with still({"/": text, "/viewer.css": style.encode()}) as other:
                    for _ in range(repeats):
                        times["viewer"].append(await painted(address, ready))
                        times["still"].append(await painted(f"{other}/", ready))
                figures: dict[str, Any] = {"bytes": size, "elements": shown}
                for what in ("first", "content"):
                    ours, theirs = ([one[what] for one in times[each]] for each in ("viewer", "still"))
                    figures[f"{what}_ms"] = statistics.median(ours)
                    figures[f"{what}_spread_ms"] = [min(ours), max(ours)]
                    figures[f"{what}_still_ms"] = statistics.median(theirs)
                    figures[f"{what}_ratio"] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
                for kind, measured in (("throttled", longest_tasks), ("cpu", processor_times)):
                    tasks = [await measured(address, ready, scrolled) for _ in range(repeats)]
                    for when in ("loading", "scrolling"):
                        figures[f"task_{when}_{kind}_ms"] = statistics.median(one[when] for one in tasks)
                        figures[f"task_{when}_{kind}_worst_ms"] = max(one[when] for one in tasks)
                found[name] = figures
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="a small directory, each page once")
    args = parser.parse_args()
    if args.smoke:
        args.episodes, args.turns, args.repeats = 200, 50, 1
    found = asyncio.run(measure(args.episodes, args.turns, args.repeats))
    found["size"] = {"episodes": args.episodes, "turns": args.turns, "repeats": args.repeats}
    found["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for name, values in found.items():
        print(name)
        for key, value in values.items():
            print(f"  {key:28} {value if isinstance(value, str | list) else f'{value:,.2f}'}")


if __name__ == "__main__":
    main()
