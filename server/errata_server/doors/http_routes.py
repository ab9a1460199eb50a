"""HTTP routes: health, readiness, capabilities, members, metrics, episodes (read, fork, export, delete), rewards, MCP
JSON-RPC; and how errors are answered (PROTOCOL A5, C1, G)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exception_handlers import http_exception_handler, request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, FailFast, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import StreamingResponse

from errata_protocol.episode_lists import DAY_S, MAX_BUCKET_S, MAX_CURSOR, EpisodeFilter, EpisodeOrder, Sort, Status
from errata_protocol.errors import ErrataError, InvalidRequest, JournalUnavailable
from errata_protocol.fleet import MAX_VERSION, MAX_WAIT_S
from errata_protocol.json_text import ValueCounter
from errata_protocol.labels import MAX_STEP
from errata_protocol.replay import DeleteRequest, ForkRequest, RewardPost
from errata_protocol.turn_pages import DEFAULT_PAGE

from ..episodes.bundles import bundle
from ..episodes.episodes import Episodes
from ..episodes.interface import EpisodeReads
from ..runtime import metrics
from ..runtime.changes import Changes
from ..runtime.rewards import reward_record
from ..runtime.runtime import Runtime
from ..runtime.store import Store
from ..viewer.pages import register_viewer
from .event_stream import MAX_EVENT_CURSOR, EventResponse, EventStream
from .input_errors import (
    BodyTooLong,
    TooManyValues,
    answer_invalid,
    answer_unreadable,
    bounded_errors,
    error_json,
    named_fields,
)
from .json_rpc import read_rpc
from .json_values import exceeds, too_many
from .labels import label_headers, read_labels
from .mcp import McpDoor
from .readers import Reader
from .strict_json import parse_json, parse_object
from .viewer_login import register_login

MAX_PAGE = 500
MAX_FORK_BODY = 64 * 1024
MAX_LIST_BODY = 4 * 1024**2

_PIECE = 500
"""Records that are written as JSON at a time."""

_POSTS = TypeAdapter(Annotated[list[RewardPost], FailFast()])


def principal(connection: HTTPConnection) -> str | None:
    """Return the principal that `auth.Guard` set on a request or socket; None where it set none."""
    found: str | None = connection.scope.get("state", {}).get("principal")
    return found


def register(
    app: FastAPI,
    *,
    runtime: Runtime,
    episodes: Episodes,
    capabilities: Callable[[], dict[str, Any]],
    replayable: bool,
) -> None:
    """Add our routes to an application.

    Call it before upstream's Task API is registered, whose two-segment route would match some of our paths.

    Args:
        app: The application.
        runtime: Readiness, metrics and rewards.
        episodes: Serves the routes below ``/episodes``.
        capabilities: Returns the answer to a capability probe.
        replayable: False in production mode: no episodes, state(t) or fork (PROTOCOL F1).
    """

    @app.get("/capabilities", tags=["Errata"])
    async def get_capabilities() -> Response:
        return _json(capabilities())

    @app.get("/ready", tags=["Errata"])
    async def get_ready(request: Request) -> Response:
        reasons = runtime.readiness.reasons()
        # Without its token a server with tokens tells a number only.
        may_know = principal(request) is not None or not runtime.settings.tokens
        unusable = await runtime.readiness.unusable(details=may_know)
        status = {"status": "unavailable" if reasons else "ready", "reasons": reasons}
        return _json({**status, "unusable": unusable} if unusable else status, 503 if reasons else 200)

    @app.get("/fleet", tags=["Errata"])
    async def get_fleet(
        after: str | None = Query(default=None, pattern="^[A-Za-z0-9_-]+$", max_length=MAX_VERSION),
        wait: float = Query(default=0.0, ge=0.0, le=MAX_WAIT_S, allow_inf_nan=False),
    ) -> Response:
        return _json((await runtime.members.after(after, wait)).model_dump(mode="json"))

    @app.get("/metrics", tags=["Errata"])
    async def get_metrics() -> Response:
        with suppress(JournalUnavailable):  # the figure stays as it was
            await runtime.store.measure()
        return Response(runtime.metrics.text(), media_type=metrics.CONTENT_TYPE)

    if replayable:
        register_reads(
            app,
            episodes.reads,
            runtime.store,
            changes=runtime.store.changes,
            warned=lambda: runtime.shutdown.is_announced,
        )
        _register_changes(app, runtime, episodes)


def register_probe(app: FastAPI, probe: bytes) -> None:
    """Add the route by which the conformance kit finds what it may send to the environment.

    Args:
        app: The application.
        probe: JSON text of the probe.
    """

    @app.get("/conformance/probe", tags=["Errata"])
    async def get_probe() -> Response:
        return Response(probe, media_type="application/json")


def register_reads(
    app: FastAPI,
    reads: EpisodeReads,
    store: Store | None = None,
    *,
    changes: Changes,
    warned: Callable[[], bool],
) -> None:
    """Add the routes that read episodes, and the viewer, which shows them.

    Args:
        app: The application.
        reads: Reads the episodes.
        store: The journal that knows whose they are; None where who may use the server may read all of them.
        changes: What happens to the episodes.
        warned: Returns whether the server calls ``changes.end`` when it begins to stop.
    """

    async def owner(request: Request, *eids: str) -> str | None:
        """Return the principal that may read ``eids``; without any, that may list its episodes."""
        if store is None:
            return principal(request)
        reader = Reader(store, request)
        if eids:
            await reader.check(*eids)
        else:
            reader.check_list()
        return reader.principal

    register_login(app)
    register_viewer(app)

    @app.get("/episodes", **_EPISODES)
    async def list_episodes(
        request: Request,
        limit: int = Query(default=50, ge=1, le=MAX_PAGE),
        cursor: str | None = Query(default=None, pattern="^[A-Za-z0-9_-]+$", max_length=MAX_CURSOR),
        sort: Sort = "created",
        order: Literal["asc", "desc"] = "desc",
        wanted: EpisodeFilter = _WANTED,
    ) -> Response:
        page = await reads.page(
            limit=limit,
            cursor=cursor,
            wanted=wanted,
            order=EpisodeOrder.of(sort, order == "desc", wanted),
            principal=await owner(request),
        )
        return await _json_of(page)

    @app.get("/episodes/aggregates", **_EPISODES)  # before an eid of this name
    async def get_aggregates(
        request: Request,
        bucket_s: int = Query(default=DAY_S, ge=1, le=MAX_BUCKET_S),
        wanted: EpisodeFilter = _WANTED,
    ) -> Response:
        found = await reads.aggregates(bucket_s=bucket_s, wanted=wanted, principal=await owner(request))
        return await _json_of(found)

    @app.get("/episodes/events", **_EPISODES)
    async def get_events(
        request: Request,
        environment: str | None = None,
        eid: str | None = None,
        cursor: str | None = Query(default=None, max_length=MAX_EVENT_CURSOR),
    ) -> Response:
        principal = await owner(request, *([eid] if eid is not None else ()))
        episode = None
        if eid is not None and store is not None:
            episode = await store.owned_episode(eid, principal)
        elif eid is not None:
            await reads.turns(eid, after=-1, limit=1, principal=principal)  # raises for one that is not there
        stream = EventStream(
            changes,
            store,
            principal=principal,
            environment=_listed_environment(request, environment),
            episode=episode,
            cursor=request.headers.get("last-event-id", cursor),
            warned=warned(),
        )
        return EventResponse(stream)

    @app.get("/episodes/{eid}", **_EPISODES)
    async def get_episode(request: Request, eid: str) -> Response:
        found = await reads.detail(eid, await owner(request, eid))
        text = error_json(found.model_copy(update={"turns": []}).model_dump(mode="json"))
        # In a text a quote is escaped, so that this stands there once.
        before, _, after = text.partition(b'"turns":[]')
        return _list(found.turns, before + b'"turns":', after)

    @app.get("/episodes/{eid}/turns", **_EPISODES)
    async def get_turns(
        request: Request,
        eid: str,
        limit: int = Query(default=DEFAULT_PAGE, ge=1, le=MAX_PAGE),
        cursor: str | None = Query(default=None, pattern="^[0-9]{1,16}$"),
    ) -> Response:
        after = int(cursor) if cursor is not None else -1
        return await _json_of(
            await reads.turns(eid, after=after, limit=limit, principal=await owner(request, eid))
        )  # fmt: skip

    @app.get("/episodes/{eid}/states/{t}/action", **_EPISODES)
    async def get_action(request: Request, eid: str, t: str) -> Response:
        found = await reads.action(eid, _delivery_index(t), await owner(request, eid))
        return Response(found, media_type="application/json", headers=_UNCHANGING)

    @app.get("/episodes/{eid}/states/{t}/agent_text", **_EPISODES)
    async def get_agent_text(request: Request, eid: str, t: str) -> Response:
        return await _json_of(await reads.agent_text(eid, _delivery_index(t), await owner(request, eid)))

    @app.get("/episodes/{eid}/states/{t}", **_EPISODES)
    async def get_state(request: Request, eid: str, t: str) -> Response:
        found = await reads.delivered(eid, _delivery_index(t), await owner(request, eid))
        headers = {
            "ETag": f'"{found.digest}"',
            "X-Errata-T": str(found.t),
            "X-Errata-Kind": found.kind,
            **_UNCHANGING,
        }
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(found.payload, media_type="application/json", headers=headers)

    @app.get("/episodes/{eid}/rewards", **_EPISODES)
    async def list_rewards(request: Request, eid: str) -> Response:
        return _list(await reads.rewards(eid, await owner(request, eid)))


def _register_changes(app: FastAPI, runtime: Runtime, episodes: Episodes) -> None:
    async def owner(request: Request, *eids: str) -> str | None:
        reader = Reader(runtime.store, request)
        await reader.check(*eids)
        return reader.principal

    @app.get("/episodes/{eid}/bundle", **_EPISODES)
    async def get_bundle(
        request: Request, eid: str, also: Annotated[list[str] | None, Query()] = None, ancestors: bool = True
    ) -> Response:
        reader, eids = Reader(runtime.store, request), [eid, *(also or ())]
        await reader.check(*eids)
        with_ancestors = ancestors and reader.may_list  # a read key opens no parent, which is another session's
        lines = bundle(runtime.store, runtime.clock, eids, reader.principal, ancestors=with_ancestors)
        return await streamed(lines)

    @app.post("/episodes/delete", **_EPISODES)
    async def delete_episodes(request: Request) -> Response:
        try:
            asked = DeleteRequest.model_validate(parse_object(await _message(request, MAX_LIST_BODY), MAX_LIST_BODY))
        except ValidationError as error:
            raise _not_valid('what is to be deleted is {"eids": ["...", ...]}, at most 1000', error) from error
        reader = Reader(runtime.store, request)
        known = await reader.known(asked.eids)
        deleted = await episodes.deletion.delete_all(known, reader.principal, unused_only=asked.unused_only)
        unknown = [*deleted.unknown, *dict.fromkeys(eid for eid in asked.eids if eid not in set(known))]
        return _json(deleted.model_copy(update={"unknown": unknown}).model_dump(mode="json"))

    @app.delete("/episodes/{eid}", **_EPISODES)
    async def delete_episode(request: Request, eid: str) -> Response:
        return _json({"eid": eid, "deleted": await episodes.deletion.delete(eid, await owner(request, eid))})

    @app.post("/episodes/{eid}/fork", **_EPISODES)
    async def post_fork(request: Request, eid: str) -> Response:
        try:
            asked = ForkRequest.model_validate(parse_object(await _message(request, MAX_FORK_BODY), MAX_FORK_BODY))
        except ValidationError as error:
            raise _not_valid('a fork request is {"t": 5, "request_id": "..."}, and labels', error) from error
        return _json((await episodes.forks.fork(eid, asked, await owner(request, eid))).model_dump(mode="json"))

    @app.post("/episodes/{eid}/rewards", **_EPISODES)
    async def post_rewards(request: Request, eid: str) -> Response:
        body = parse_json(await _message(request, MAX_LIST_BODY), MAX_LIST_BODY)
        try:
            posts = _POSTS.validate_python(body if isinstance(body, list) else [body])
        except ValidationError as error:
            raise _not_valid(
                'a reward is {"t": 5, "value": 0.5, "source": "...", "reward_id": "..."}, or a list of these', error
            ) from error
        rows = await runtime.rewards.post_all(eid, posts, await owner(request, eid))
        made = [reward_record(row) for row in rows]
        if not isinstance(body, list):
            return _json(made[0].model_dump())
        return _list(made)


async def streamed(lines: AsyncIterator[bytes]) -> Response:
    """Return an answer with lines as they are made; an error of the first one is raised, while a status can be sent."""
    first = await anext(lines)
    return StreamingResponse(_with_first(first, lines), media_type="application/x-ndjson")


async def _with_first(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for line in rest:
        yield line


def register_mcp(app: FastAPI, door: McpDoor, max_body: int) -> None:
    """Add our ``POST /mcp`` in place of upstream's.

    Args:
        app: The application, from which upstream's route was removed.
        door: Answers the requests.
        max_body: Largest request, bytes.
    """

    @app.post("/mcp")
    async def post_mcp(request: Request) -> Response:
        rpc = read_rpc(await _message(request, max_body), max_body)
        if isinstance(rpc, dict):
            return _json(rpc)
        answer = await door.over_http(
            rpc, rpc.model_dump_json().encode(), principal(request), lambda: read_labels(label_headers(request))
        )
        return Response(answer, media_type="application/json") if isinstance(answer, bytes) else _json(answer)


async def _message(request: Request, limit: int) -> dict[str, Any]:
    """Return the body as a message for `parse_object`: ``bytes``; ``oversize`` if it is longer than ``limit``;
    ``refused`` if it has too many values."""
    parts, size = [], 0
    values = ValueCounter()
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                return {"oversize": f"more than {limit}"}
            if await exceeds(values, part):
                return {"refused": too_many()}
            parts.append(part)
    except TooManyValues:
        return {"refused": too_many()}
    except BodyTooLong:
        return {"oversize": f"more than {limit}"}
    return {"bytes": b"".join(parts)}


def answer_errors(app: Starlette) -> None:
    """Add exception handlers that answer errors as JSON with a code, except where the application has its own.

    Every application with routes of this module needs them: the routes raise `ErrataError`.
    """
    app.exception_handlers.setdefault(ErrataError, answer_error)
    if app.exception_handlers.get(RequestValidationError) in (None, request_validation_exception_handler):
        app.exception_handlers[RequestValidationError] = answer_invalid
    if app.exception_handlers.get(HTTPException) in (None, http_exception_handler):
        app.exception_handlers[HTTPException] = answer_unreadable


async def answer_error(_: Request, error: Exception) -> Response:
    """Answer an `ErrataError` with its HTTP status and code; for a retryable one with ``Retry-After``."""
    if not isinstance(error, ErrataError):
        raise error
    headers = {"Retry-After": "5"} if error.retryable else {}
    return _json(error.to_wire(), error.info.http_status, headers)


def _not_valid(expected: str, error: ValidationError) -> InvalidRequest:
    """Return the error for a body that is not what is expected; it names the fields that are wrong."""
    errors = bounded_errors(error.errors(include_url=False))
    return InvalidRequest(f"{expected}; {named_fields(errors)}", errors=errors)


def _wanted(
    request: Request,
    environment: str | None = None,
    task: str | None = None,
    status: Status | None = None,
    error_kind: str | None = None,
    episode_id: str | None = None,
    text: str | None = Query(default=None, min_length=1, max_length=256),
    reward_min: float | None = Query(default=None, allow_inf_nan=False),
    reward_max: float | None = Query(default=None, allow_inf_nan=False),
    created_from: float | None = Query(default=None, allow_inf_nan=False),
    created_before: float | None = Query(default=None, allow_inf_nan=False),
    last_from: float | None = Query(default=None, allow_inf_nan=False),
    last_before: float | None = Query(default=None, allow_inf_nan=False),
    group: str | None = None,
    step: int | None = Query(default=None, ge=0, le=MAX_STEP),
    run: str | None = None,
    origin: str | None = None,
) -> EpisodeFilter:
    """Return the filter that the parameters of a list are."""
    return EpisodeFilter(
        environment=_listed_environment(request, environment),
        task=task,
        status=status,
        error_kind=error_kind,
        episode_id=episode_id,
        text=text,
        reward_min=reward_min,
        reward_max=reward_max,
        created_from=created_from,
        created_before=created_before,
        last_from=last_from,
        last_before=last_before,
        group=group,
        step=step,
        run=run,
        origin=origin,
    )


def _listed_environment(request: Request, asked: str | None) -> str | None:
    """Return the only environment whose episodes are listed, None for all: an application that is mounted below an
    environment's name lists those of that one, whatever is ``asked`` for."""
    found: str | None = getattr(request.app.state, "errata_lists_only", asked)
    return found


_WANTED = Depends(_wanted)


async def _refuse_unknown_parameters(request: Request) -> None:
    """Refuse a query with a parameter that the route does not have: a filter that is ignored would show too much.

    Raises:
        InvalidRequest: There is one; the message names those that the route has.
    """
    route = request.scope["route"].dependant
    known = [field.alias for part in (route, *route.dependencies) for field in part.query_params]
    unknown = next((name for name in request.query_params if name not in known), None)
    if unknown is not None:
        takes = f"takes {', '.join(known)}" if known else "takes no parameters"
        raise InvalidRequest(
            f"unknown query parameter {unknown[:100]!a}: {request.method} {request.url.path[:200]} {takes}"
        )


_EPISODES: dict[str, Any] = {"tags": ["Errata"], "dependencies": [Depends(_refuse_unknown_parameters)]}
"""Arguments of the routes below ``/episodes``."""


_UNCHANGING = {"Cache-Control": "private, immutable"}
"""Headers of an answer that is always the same."""


def _delivery_index(text: str) -> int:
    """Return the t that a path names.

    Raises:
        InvalidRequest: It is none.
    """
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise InvalidRequest(f"t is a delivery index 0, 1, 2 ..., not {text[:100]!a}")
    return int(text)


def _list(records: Sequence[BaseModel], before: bytes = b"", after: bytes = b"") -> Response:
    """Answer with a list of records as JSON, in parts: other requests get their turn after each few records.

    Args:
        records: The records.
        before: What stands before the list.
        after: What stands after it.
    """

    async def parts() -> AsyncIterator[bytes]:
        yield before + b"["
        for at in range(0, len(records), _PIECE):
            piece = error_json([record.model_dump(mode="json") for record in records[at : at + _PIECE]])
            yield (b"," if at else b"") + piece[1:-1]
            await asyncio.sleep(0)
        yield b"]" + after

    return StreamingResponse(parts(), media_type="application/json")


async def _json_of(answer: BaseModel) -> Response:
    """Answer with a message that may be long, written on a thread."""
    text = await asyncio.to_thread(lambda: error_json(answer.model_dump(mode="json")))
    return Response(text, media_type="application/json")


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(error_json(data), status, headers, "application/json")
