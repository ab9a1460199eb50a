"""`Forwarder`: answers HTTP requests of other shards, and those about all of them; `Arrivals`: the door of the other
workers and of ``errata fleet``.

A connection is handed over by its first request (`acceptor`), but a kept connection may send others after it. So each
request is looked at once more behind the guard, and one of another shard is sent to its worker's Unix socket.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from errata_protocol.episode_lists import EpisodeOrder, merged, summed
from errata_protocol.errors import CODES, ErrataError, InvalidRequest, NotSupported
from errata_protocol.replay import DeletedEpisodes, EpisodeAggregates, EpisodePage

from ..doors.auth import Guard, refuse
from ..doors.http_routes import answer_error
from ..ids import MULTIPLEXED
from ..journal.base import Journal
from ..runtime import metrics
from ..runtime.fleet import PASSED_ON
from ..runtime.runtime import Runtime
from .drain import DRAIN, UNDRAIN, Drain, workers_of
from .elsewhere import PATH as ELSEWHERE
from .events import MergedEvents, cursors_of
from .logins import SharedLogins, StoredLogins
from .member import ASK_S, Member, unanswered
from .origin import passed_on, restored
from .routes import Merged, Of, Refused, Route, of_id, of_request

LOOK_S = 1.0
"""Time between two looks at whether a worker that is asked still runs, seconds."""

MAX_BODY = 16 * 1024**2
"""Largest body that is read for whose it is, of a request to ``/mcp`` and of a list of episodes to delete, bytes."""


def install(app: FastAPI, member: Member, *, tokens: bool) -> None:
    """Put the forwarder of an application right behind its guard. Call it before the first request.

    Args:
        app: The application.
        member: This worker.
        tokens: Whether the guard asks for tokens, so that the viewer has logins.
    """
    at = next(at for at, one in enumerate(app.user_middleware) if one.cls is Guard)  # type: ignore[comparison-overlap]
    app.user_middleware.insert(at + 1, Middleware(Forwarder, member=member))
    if tokens:
        logins = StoredLogins(member.plan.logins, len(member.plan.names))
        app.user_middleware.insert(at, Middleware(SharedLogins, logins=logins))


class Forwarder:
    """ASGI middleware that sends requests of other shards to their workers, and merges what all of them answer.

    Args:
        app: The application, which answers for this worker.
        member: This worker.
    """

    ends_before_socket = True

    def __init__(self, app: ASGIApp, *, member: Member) -> None:
        self._app = app
        self._member = member

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or PASSED_ON in scope:
            await self._app(scope, receive, send)
            return
        names = self._member.names
        method = scope["method"] if scope["type"] == "http" else "GET"
        query = scope["query_string"].decode("latin-1")
        route = of_request(method, scope["path"], query, names, self._member.sole)
        if scope["type"] == "websocket":
            if isinstance(route, Of) and route.shard != self._member.worker:
                # A handshake behind another request: the connection was handed over by that one, or not at all.
                message = "this session is another worker's: connect anew, with the handshake as the first request"
                if self._member.absent(route.shard) is not None:
                    message = "this session is one of a worker that is not served now: ask again once it is"
                await refuse(scope, receive, send, 421, "MISDIRECTED", message)
                return
            await self._app(scope, receive, send)
            return
        rereadable = _Rereadable(receive)
        request = Request(scope, rereadable)
        try:
            response = await self._answer(request, route, rereadable)
        except ErrataError as error:
            response = await answer_error(request, error)
        except _Passed as passed:
            response = passed.response
        except ClientDisconnect:
            return  # nobody waits for the answer
        if response is None:
            await self._app(scope, rereadable, send)
        else:
            await response(scope, rereadable, send)

    async def _answer(self, request: Request, route: Route, body: _Rereadable) -> Response | None:
        """Return the answer of other workers; None for a request that this one answers by itself."""
        here = self._member.worker
        if request.method == "POST" and request.scope["path"].endswith("/mcp"):
            sid = await _mcp_session(body)
            named = of_id(sid, self._member.names) if sid is not None else None
            if sid is None or named is not None:
                route = Of(self._member.for_new(request.scope["path"]) if named is None else named)
        match route:
            case Refused(why):
                raise NotSupported(f"with several workers a server does not serve {why}; --workers 1 does")
            case Of(shard):
                return None if shard == here else await self._forward(shard, request)
            case Merged("episodes"):
                return await self._page(request)
            case Merged("aggregates"):
                parts = await self._all(request)
                return await _made(lambda: summed([EpisodeAggregates.model_validate_json(part) for part in parts]))
            case Merged("metrics"):
                texts = {worker: part.decode() for worker, part in (await self._of_all(request)).items()}
                text = await asyncio.to_thread(_with_shards, texts)
                return Response(text, media_type=metrics.CONTENT_TYPE)
            case Merged("ready"):
                return await self._ready(request)
            case Merged("events"):
                return await self._events(request)
            case Merged("delete"):
                return await self._delete(request, body)
        return None

    async def _forward(self, shard: int, request: Request) -> Response:
        """Send a request to its worker, and return the answer as it comes."""
        content = request.stream() if {"content-length", "transfer-encoding"} & set(request.headers) else None
        answer = await self._ask(shard, request, content=content, stream=True)
        headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() != b"connection"]
        response = StreamingResponse(_raw(answer), answer.status_code)
        response.raw_headers = [(name, value) for name, value in headers if name not in (b"transfer-encoding", b"date")]
        return response

    async def _ask(
        self,
        shard: int,
        request: Request,
        *,
        content: Any = None,
        stream: bool = False,
        last_event: str | None = None,
    ) -> httpx.Response:
        """Send a request to a worker, and return its answer.

        Args:
            shard: Number of the worker.
            request: The request.
            content: Body to send; None to send none.
            stream: Whether the answer is returned before its body has come.
            last_event: ``Last-Event-ID`` to send in place of the request's; None to leave that as it is.

        Raises:
            JournalUnavailable: The worker does not answer.
            Misdirected: The worker has been drained.
        """
        self._member.check_served(shard)
        client, scope = self._member.client(shard), request.scope
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = passed_on(request)
        if isinstance(content, bytes):
            headers = [(name, value) for name, value in headers if name != "content-length"]
        if last_event is not None:
            headers = [(name, value) for name, value in headers if name != "last-event-id"]
            headers.append(("last-event-id", last_event))
        made = client.build_request(
            request.method,
            httpx.URL("http://fleet").copy_with(raw_path=target),
            headers=headers,
            content=content,
            # What one worker answers alone may take as long as it does there, while its event loop runs.
            timeout=httpx.Timeout(ASK_S, read=None if stream else ASK_S),
        )
        sending, looks = asyncio.ensure_future(client.send(made, stream=stream)), 0
        try:
            while not (await asyncio.wait({sending}, timeout=LOOK_S))[0]:
                looks += 1
                if looks * LOOK_S >= ASK_S and self._member.plan.board.silent_s(shard) >= ASK_S:
                    raise unanswered(shard)
            return sending.result()
        except httpx.HTTPError as error:
            raise unanswered(shard) from error
        finally:
            sending.cancel()

    async def _own(self, request: Request, content: bytes = b"") -> httpx.Response:
        """Return this worker's own answer to a request."""
        scope = {**request.scope, PASSED_ON: True}
        parts: list[bytes] = []
        status, headers = 500, []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], message.get("headers", [])
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return httpx.Response(status, headers=headers, content=b"".join(parts))

    async def _answers(self, request: Request) -> dict[int, httpx.Response]:
        """Return the answers of all workers that serve, in their order."""
        here, workers = self._member.worker, self._member.served
        answers = await asyncio.gather(
            *(self._own(request) if worker == here else self._ask(worker, request) for worker in workers)
        )
        return dict(zip(workers, answers, strict=True))

    async def _of_all(self, request: Request) -> dict[int, bytes]:
        """Return the bodies of all workers' answers, in their order.

        Raises:
            ErrataError: One of them answered with an error, which is then the answer to the whole.
        """
        answers = await self._answers(request)
        for worker, answer in answers.items():
            if not answer.is_success:
                raise _Passed(answer) if answer.status_code < 500 else unanswered(worker)
        return {worker: answer.content for worker, answer in answers.items()}

    async def _all(self, request: Request) -> list[bytes]:
        """Return what `_of_all` returns, without the workers."""
        return list((await self._of_all(request)).values())

    async def _page(self, request: Request) -> Response:
        parts = await self._all(request)
        given = request.query_params
        order = EpisodeOrder.of_query(given)
        limit, cursor = int(given.get("limit", 50)), given.get("cursor")
        pages = [lambda _limit, _cursor, part=part: EpisodePage.model_validate_json(part) for part in parts]
        return await _made(lambda: merged(pages, order, limit=limit, cursor=cursor))

    async def _events(self, request: Request) -> Response:
        """Answer with the streams of all workers as one; each of them goes on from its own part of the cursor."""
        given = request.headers.get("last-event-id", request.query_params.get("cursor"))
        async with AsyncExitStack() as opened:
            answers = []
            workers = self._member.served
            for worker, cursor in zip(workers, cursors_of(given, len(workers)), strict=True):
                answer = await self._ask(worker, request, stream=True, last_event=cursor)
                opened.push_async_callback(answer.aclose)
                if not answer.is_success:
                    await answer.aread()
                    raise _Passed(answer)
                answers.append(answer)
            return MergedEvents(answers, opened.pop_all())

    async def _ready(self, request: Request) -> Response:
        """Answer whether the whole server can be given work: a worker that cannot is named, one that can is enough."""
        found = {worker: json.loads(answer.content) for worker, answer in (await self._answers(request)).items()}
        ready = any(one["status"] == "ready" for one in found.values())
        reasons = [f"worker {worker}: {why}" for worker, one in found.items() for why in one["reasons"]]
        status = {"status": "ready" if ready else "unavailable", "reasons": reasons}
        if unusable := next((one["unusable"] for one in found.values() if "unusable" in one), None):
            status["unusable"] = unusable
        return JSONResponse(status, 200 if ready else 503)

    async def _delete(self, request: Request, body: _Rereadable) -> Response | None:
        text = await body.body()
        try:
            asked = await asyncio.to_thread(json.loads, text)
            eids = asked["eids"]
            shards = [of_id(eid, self._member.names) for eid in eids]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None  # the route answers what is wrong with it
        here, replies = self._member.worker, []
        for shard in sorted({here if shard is None else shard for shard in shards}):
            own = [eid for eid, at in zip(eids, shards, strict=True) if (here if at is None else at) == shard]
            content = json.dumps({**asked, "eids": own}).encode()
            answer = await (
                self._own(request, content) if shard == here else self._ask(shard, request, content=content)
            )
            if not answer.is_success:
                raise _Passed(answer)
            replies.append(DeletedEpisodes.model_validate_json(answer.content))
        return JSONResponse(_joined(replies).model_dump(mode="json")) if replies else None


class _Passed(Exception):  # not an error of this worker: its answer is passed on
    """Raised where another worker's answer is an error, which is then the answer to the whole.

    Args:
        answer: The answer.
    """

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(f"another worker answered {answer.status_code}")
        self.response = Response(answer.content, answer.status_code, media_type="application/json")


async def _raw(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()


async def _made(make: Callable[[], Any]) -> Response:
    """Answer with a model that is made, and written, on a thread: it may be long."""
    text = await asyncio.to_thread(lambda: json.dumps(make().model_dump(mode="json")).encode())
    return Response(text, media_type="application/json")


def _joined(replies: Sequence[DeletedEpisodes]) -> DeletedEpisodes:
    """Return what several workers deleted together."""
    return DeletedEpisodes(
        deleted={eid: count for reply in replies for eid, count in reply.deleted.items()},
        unknown=[eid for reply in replies for eid in reply.unknown],
        in_use=[eid for reply in replies for eid in reply.in_use],
    )


def _with_shards(texts: Mapping[int, str]) -> bytes:
    """Return the metrics of all workers with the label ``worker``, each family once."""
    families: dict[str, Metric] = {}
    for worker, text in texts.items():
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.samples.append(sample._replace(labels={**sample.labels, "worker": str(worker)}))
    registry = CollectorRegistry()
    registry.register(_Families(list(families.values())))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


class _Rereadable:
    """The receive function of a request whose body can be read before, too.

    Args:
        receive: The receive function of the ASGI call.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: list[Message] = []

    async def __call__(self) -> Message:
        return self._kept.pop(0) if self._kept else await self._receive()

    async def body(self) -> bytes:
        """Return the body; the next calls give its messages once more.

        Raises:
            InvalidRequest: It is longer than `MAX_BODY`.
        """
        parts, size, more = [], 0, True
        while more:
            message = await self._receive()
            self._kept.append(message)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > MAX_BODY:
                raise InvalidRequest(f"the body is longer than {MAX_BODY} bytes")
        return b"".join(parts)


async def _mcp_session(receive: _Rereadable) -> str | None:
    """Return the session that an MCP request names; None where it names none or cannot be read."""
    body = await receive.body()
    try:
        found = await asyncio.to_thread(json.loads, body)
        sid = found["params"]["session_id"]
        return sid if isinstance(sid, str) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


class Arrivals:
    """The ASGI application of a worker's Unix socket: requests that other workers pass on, and what they ask.

    Args:
        app: The worker's application.
        runtime: Runtime of the worker.
        member: The worker.
        drain: Drains the worker.
    """

    def __init__(self, app: ASGIApp, runtime: Runtime, member: Member, drain: Drain) -> None:
        self._app = app
        self._runtime = runtime
        self._member = member
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/fleet/"):
            response = await self._answer(scope["path"], await Request(scope, receive).json())
            await response(scope, receive, send)
            return
        await self._app(restored(scope) if scope["type"] in ("http", "websocket") else scope, receive, send)

    async def _answer(self, path: str, asked: dict[str, Any]) -> Response:
        try:
            await self._runtime.start()
            if path.startswith(ELSEWHERE):
                return Response(await self._member.elsewhere.answer(self._runtime.store, path, asked))
            return JSONResponse(await self._answer_here(path, asked))
        except ErrataError as error:
            return JSONResponse(error.to_wire(), CODES[error.code].http_status)

    async def _answer_here(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        if path == "/fleet/close_group":
            close = self._member.close_here[asked["environment"]]
            return {"closed": await close(asked["group"], asked["principal"])}
        if path == "/fleet/workers":
            return {"workers": workers_of(self._member)}
        if path == DRAIN:
            return await self._drain.ask(asked["shard"])
        if path == UNDRAIN:
            return await self._drain.undo(asked["shard"])
        sids = [MULTIPLEXED + sid for sid in asked["sids"]]

        def known(journal: Journal) -> list[int]:
            return [at for at, sid in enumerate(sids) if journal.session(sid) is not None]

        return {"has": await self._runtime.store.scan(known)}
