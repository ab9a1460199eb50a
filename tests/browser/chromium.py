"""Debian's Chromium without a screen, spoken to in its own protocol; a page notes whatever goes wrong in it."""

from __future__ import annotations

import asyncio
import base64
import fnmatch
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from websockets.asyncio.client import connect

PROGRAM = shutil.which("chromium")

_LISTENING = re.compile(r"DevTools listening on (ws://\S+)")
_STREAM_AT_REST_S = 5.0
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # it cannot make one as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--window-size=1400,1000",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # whatever asks for the internet fails and is noted
    "--remote-debugging-port=0",
)

_UNTIL = """new Promise((resolve) => {
    const look = () => {
        const found = (%s);
        if (found) resolve(found); else requestAnimationFrame(look);
    };
    look();
})"""

_MIDDLE = """((element) => {
    if (!element) return null;
    element.scrollIntoView({block: 'center'});
    const {x, y, width, height} = element.getBoundingClientRect();
    const middle = [x + width / 2, y + height / 2];
    const still = window.looked && looked.element === element && String(looked.middle) === String(middle);
    window.looked = {element, middle, frames: still ? looked.frames + 1 : 0};
    return looked.frames >= 5 && element.contains(document.elementFromPoint(...middle)) ? middle : null;
})(%s)"""
"""An element's middle, once it has stood still for some frames and nothing covers it any more."""


class Page:
    """One tab with a profile of its own.

    Attributes:
        context: Id of the profile.
        troubles: Console errors, exceptions, requests that failed or were answered by an error, in order.
        hosts: Every host that was asked for something.
    """

    def __init__(self, browser: Chromium, context: str, session: str) -> None:
        self._browser = browser
        self.context = context
        self._session = session
        self._asked: dict[str, str] = {}
        self._open: set[str] = set()
        self._last_data: dict[str, float] = {}  # of event streams that are open, on the event loop's clock
        self._changed = asyncio.Event()
        self._loaded = asyncio.Event()
        self._replaced: list[tuple[str, int, dict[str, str], bytes]] = []
        self._answering: set[asyncio.Task[Any]] = set()
        self.troubles: list[str] = []
        self.hosts: set[str] = set()

    async def open(self, url: str) -> str:
        """Go there; return where it led."""
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        self._loaded.clear()
        answer = await self.call("Page.navigate", url=url)
        assert "errorText" not in answer, f"{url}: {answer['errorText']}"
        await self._loaded.wait()
        return str(await self.evaluate("location.href"))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.call(method, parameters, self._session)

    async def allow_clipboard(self) -> None:
        """Let the page write and read the clipboard, as one that its user looks at."""
        allowed = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "browserContextId": self.context}
        await self._browser.call("Browser.grantPermissions", allowed)
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await self.evaluate("navigator.clipboard.writeText('')")  # another tab of the process may have filled it

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Wait until an expression about the document holds, and return it; it is looked at before each frame."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.evaluate(_UNTIL % expression)
        except TimeoutError:
            shown = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never so: {expression}\nthe page: {shown}\ntroubles: {self.troubles}") from None

    async def click(self, element: str) -> None:
        """Press the mouse on an element, given as an expression, once nothing is under way and the page stands still.

        Gradio drops a click while the one before is being answered, and lays an overlay over what it loads.
        """
        await self.quiet()
        x, y = await self.until(_MIDDLE % element)
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def quiet(self, timeout_s: float = 60.0) -> None:
        """Wait until no request is under way.

        An event stream without data for 5 s is at rest, too: Gradio opens one for each event, and where another stream
        of the page has already had the event's result, it stays open.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + timeout_s
        while self._open:
            waits_for = self._open - self._last_data.keys()
            at_rest = max(self._last_data.values(), default=0.0) + _STREAM_AT_REST_S
            if not waits_for and clock() >= at_rest:
                return
            assert clock() < end, f"under way after {timeout_s} s: {[self._asked[each] for each in self._open]}"
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(end if waits_for else min(end, at_rest)):
                    await self._changed.wait()

    async def fill(self, element: str, text: str) -> None:
        """Type a text over what stands in a field."""
        await self.until(f"{element} && ({element}.focus(), {element}.select(), true)")
        await self.call("Input.insertText", text=text)

    async def answer(
        self, pattern: str, body: bytes = b"", status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Answer requests in place of the server from now on.

        Args:
            pattern: Addresses of the requests, whole, with ``*`` for any characters.
            body: What they are answered with.
            status: Status of the answers.
            headers: Headers of the answers.
        """
        self._replaced.append((pattern, status, headers or {}, body))
        await self.call("Fetch.enable", patterns=[{"urlPattern": each[0]} for each in self._replaced])

    def _answer(self, event: dict[str, Any]) -> None:
        """Send the answer of a request that the browser holds back."""
        url = event["request"]["url"]
        status, headers, body = next(rest for pattern, *rest in self._replaced if fnmatch.fnmatchcase(url, pattern))
        sent = self.call(
            "Fetch.fulfillRequest",
            requestId=event["requestId"],
            responseCode=status,
            responseHeaders=[{"name": name, "value": value} for name, value in headers.items()],
            body=base64.b64encode(body).decode(),
        )

        async def answer() -> None:
            with suppress(AssertionError):  # the page has given the request up meanwhile
                await sent

        task = asyncio.create_task(answer())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def note(self, method: str, event: dict[str, Any]) -> None:
        if method in ("Network.loadingFinished", "Network.loadingFailed"):
            self._open.discard(event["requestId"])
            self._last_data.pop(event["requestId"], None)
        match method:
            case "Fetch.requestPaused":
                self._answer(event)
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                url = self._asked[event["requestId"]] = event["request"]["url"]
                if host := urlsplit(url).hostname:
                    self.hosts.add(host)
                if "/heartbeat/" not in url and "/episodes/events" not in url:  # open as long as the page is
                    self._open.add(event["requestId"])
                if "/queue/data" in url:
                    self._last_data[event["requestId"]] = asyncio.get_running_loop().time()
            case "Network.dataReceived" if event["requestId"] in self._last_data:
                self._last_data[event["requestId"]] = asyncio.get_running_loop().time()
            case "Network.responseReceived" if event["response"]["status"] >= 400:
                self.troubles.append(f"{event['response']['status']} {event['response']['url']}")
            case "Network.loadingFailed" if not event.get("canceled"):
                self.troubles.append(f"{event['errorText']} {self._asked.get(event['requestId'])}")
            case "Network.webSocketFrameError":
                self.troubles.append(f"web socket: {event['errorMessage']}")
            case "Runtime.exceptionThrown":
                self.troubles.append(json.dumps(event["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if event["type"] in ("error", "assert"):
                self.troubles.append(json.dumps([each.get("value", each.get("description")) for each in event["args"]]))
            case "Log.entryAdded" if event["entry"]["level"] == "error":
                self.troubles.append(f"{event['entry']['text']} {event['entry'].get('url')}")
        self._changed.set()


class Process:
    """A browser process with a profile of its own."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [PROGRAM, *_OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._listens_at: str | None = None
        self._drain: threading.Thread | None = None

    def address(self) -> str:
        """Return the address of its DevTools, once it listens there."""
        assert self._process.stderr is not None
        said: list[str] = []
        while self._listens_at is None:
            line = self._process.stderr.readline()
            assert line, f"{PROGRAM} ended: {''.join(said)}"
            said.append(line)
            if found := _LISTENING.search(line):
                self._listens_at = found[1]
                self._drain = threading.Thread(target=self._process.stderr.read, daemon=True)  # so that no pipe is full
                self._drain.start()
        return self._listens_at

    def runs(self) -> bool:
        """Return whether it has not ended."""
        return self._process.poll() is None

    def end(self) -> None:
        """End it, and remove its profile."""
        assert self._process.stderr is not None
        self._process.kill()
        self._process.wait()
        if self._drain is not None:
            self._drain.join(10)  # a process of its own may hold the pipe for ever
        if self._drain is None or not self._drain.is_alive():
            self._process.stderr.close()
        self._profile.cleanup()


_shared: list[Process] = []


def shared_process() -> Process:
    """Return the browser process that the tests share: its start takes seconds of processor time."""
    if not (_shared and _shared[-1].runs()):
        _shared.append(Process())
    return _shared[-1]


def end_shared_processes() -> None:
    """End the browser process that tests have shared, if there is one."""
    while _shared:
        _shared.pop().end()


class Chromium:
    """A browser: a connection to a browser process, and the tabs that were opened by it, which end with its context.

    Args:
        process: The browser process; None for one that starts and ends with the context.
    """

    def __init__(self, process: Process | None = None) -> None:
        self._owns_process = process is None
        self._process = process or Process()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def __aenter__(self) -> Self:
        try:
            self._socket = await connect(await asyncio.to_thread(self._process.address), max_size=None)
        except BaseException:
            self._end()
            raise
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            contexts = [{"browserContextId": page.context} for page in self._pages.values()]
            await asyncio.gather(*(self.call("Target.disposeBrowserContext", context) for context in contexts))
        finally:
            await self._socket.close()
            await self._reading
            self._end()

    def _end(self) -> None:
        if self._owns_process:
            self._process.end()

    async def page(self) -> Page:
        """Open a tab that shares nothing with another."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})
        attached = await self.call("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        session: str = attached["sessionId"]
        page = self._pages[session] = Page(self, context, session)
        return page

    async def call(
        self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        frame = {"id": number, "method": method, "params": parameters or {}}
        await self._socket.send(json.dumps(frame if session is None else {**frame, "sessionId": session}))
        try:
            return await answer
        finally:
            del self._answers[number]

    async def _read(self) -> None:
        try:
            async for text in self._socket:
                frame = json.loads(text)
                if "id" not in frame:
                    page = self._pages.get(frame.get("sessionId", ""))
                    if page is not None:
                        page.note(frame["method"], frame["params"])
                elif (answer := self._answers.get(frame["id"])) is not None and not answer.done():
                    if "error" in frame:
                        answer.set_exception(AssertionError(frame["error"]))
                    else:
                        answer.set_result(frame["result"])
        finally:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(AssertionError(f"the connection to {PROGRAM} has ended"))
