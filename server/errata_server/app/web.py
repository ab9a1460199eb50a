"""OpenEnv's Gradio web interface, using a journaled session instead of an environment instance of its own.

Upstream's manager creates an instance on the main thread and calls it from other threads, which fails for an
environment that is tied to its thread. Here all pages share one session. It is opened at the first call and is not
counted against the limit of sessions, as upstream does not count its instance.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any

import gradio
from fastapi import Body, FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from openenv.core.env_server import web_interface as upstream
from openenv.core.env_server.gradio_theme import OPENENV_GRADIO_CSS, OPENENV_GRADIO_THEME
from openenv.core.env_server.gradio_ui import get_gradio_display_title
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.serialization import deserialize_action_with_preprocessing
from openenv.core.env_server.types import Action
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from errata_protocol.errors import SessionLost

from ..concurrency.fair_lock import FairLock
from ..doors.auth import principal_of
from ..environments.host import EnvHost
from ..runtime.capacity import Capacity
from ..runtime.runtime import Runtime
from ..sessions.decoding import reset_request
from ..sessions.session import Reply, Session
from ..sessions.session import Request as Delivery
from .server import HTTPEnvServer

log = logging.getLogger("errata.web")


class SessionWebManager(upstream.WebInterfaceManager):  # type: ignore[misc]  # openenv ships no types
    """Upstream's manager of the web interface, using a session of ours for every call.

    Args:
        server: Server that the session is opened on.
        sample: Instance that the pages read tools from while they are built; None for an environment without tools.
    """

    def __init__(self, server: HTTPEnvServer, sample: Environment[Any, Any, Any] | None) -> None:
        shown = _SessionEnvironment(server, sample)
        metadata = upstream.load_environment_metadata(server._env_factory, server.env_name)
        super().__init__(shown, server.action_cls, server.observation_cls, metadata)
        self._bind(server, shown)

    def _bind(self, server: HTTPEnvServer, shown: _SessionEnvironment) -> None:
        self._server = server
        self._shown = shown
        self._session: Session | None = None
        self._opening = FairLock()
        self._state: dict[str, Any] | None = None
        server.runtime.pages.add(self)

    async def reset_environment(self, reset_kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Reset the pages' session and return the payload of the reset, in upstream's form.

        A new session is opened if there is none or it was closed or lost.

        Args:
            reset_kwargs: Arguments of the reset.

        Raises:
            SessionLost: The session was lost during this call; the next call opens a new one.
        """
        payload = await self._admit(reset_request(reset_kwargs or {}))
        self.episode_state = upstream.EpisodeState(
            episode_id=self._alias(),
            step_count=0,
            current_observation=payload["observation"],
            action_logs=[],
            is_reset=True,
        )
        await self._send_state_update()
        return payload

    async def step_environment(self, action_data: dict[str, Any]) -> dict[str, Any]:
        """Step the pages' session and return the payload of the step, in upstream's form.

        Args:
            action_data: Fields of the action.

        Raises:
            ValidationError: ``action_data`` is not a valid action.
            SessionLost: The session was lost during this call; the next call opens a new one.
        """
        action: Action = deserialize_action_with_preprocessing(action_data, self.action_cls)
        payload = await self._admit(Delivery("step", _journaled_action(action, action_data), action=action))
        count = (self._state or {}).get("step_count") or 0
        shown = self.episode_state
        shown.action_logs = [
            *shown.action_logs[1 - self.MAX_ACTION_LOGS :],
            upstream.ActionLog(
                timestamp=datetime.datetime.now().isoformat(),
                action=action.model_dump(exclude={"metadata"}),
                observation=payload["observation"],
                reward=payload["reward"],
                done=payload["done"],
                step_count=count,
            ),
        ]
        shown.episode_id, shown.step_count = self._alias(), count
        shown.current_observation, shown.is_reset = payload["observation"], False
        await self._send_state_update()
        return payload

    def get_state(self) -> dict[str, Any]:
        """Return the environment's state after the last reset or step from a page.

        Raises:
            RuntimeError: No page has sent a reset or step yet.
        """
        if self._state is None:
            raise RuntimeError("reset the environment first")
        return self._state

    async def fresh_state(self) -> dict[str, Any]:
        """Return the environment's current state."""
        return await self._server.sessions.state(await self._page_session())

    async def action_of_message(self, message: str) -> dict[str, Any]:
        """Return the action for a chat message, as the dict that a step takes.

        The environment's ``message_to_action`` makes the action, within 60 s. If it has ``tokens``, the dict has only
        those; otherwise it has every field but ``metadata``. Without that method, or if it returns None, the dict is
        ``{"message": message}``.
        """
        session = await self._page_session()

        async def translate(host: EnvHost) -> Any:
            method = getattr(host.env, "message_to_action", None)
            if not callable(method):
                return None
            return await host.run_in_place(lambda: method(message), timeout_s=60.0)

        action = await self._server.sessions.look(session, translate)
        if action is None:
            return {"message": message}
        tokens = getattr(action, "tokens", None)
        return {"tokens": tokens.tolist()} if tokens is not None else dict(action.model_dump(exclude={"metadata"}))

    async def _admit(self, request: Delivery) -> dict[str, Any]:
        sessions = self._server.sessions
        session = await self._page_session()
        try:
            reply: Reply = await sessions.admit(session, request, self)
        except SessionLost:
            if self._session is session:
                await self._end()  # the next call opens another
            raise
        payload: dict[str, Any] = json.loads(reply.payload)
        self._state = await sessions.state(session)
        await self._shown.draw(session, payload)
        return payload

    async def _page_session(self) -> Session:
        async with self._opening:
            if self._session is not None and (self._session.closed or self._session.lost is not None):
                await self._end()
            if self._session is None:
                tokens = self._server.runtime.settings.tokens
                owner = principal_of(tokens[0]) if tokens else None
                self._session = await self._server.sessions.open(principal=owner, capacity=Capacity(None))
                self._server.sessions.lifetime.attach(self._session, self)
                self._shown.session = self._session
            return self._session

    @property
    def is_used(self) -> bool:
        """See `errata_server.runtime.pages.PageSession`, as for `leave`."""
        return self._session is not None or bool(self.connected_clients)

    async def leave(self) -> None:
        connected = list(self.connected_clients)
        self.connected_clients.clear()
        self.episode_state = upstream.EpisodeState(
            episode_id=None, step_count=0, current_observation=None, action_logs=[]
        )
        await self._end()
        for websocket in connected:
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # it has been closed
                await websocket.close(1012)

    async def _end(self) -> None:
        """Close the pages' session, if there is one, after what runs on it."""
        session, self._session, self._state = self._session, None, None
        if session is not None:
            session.closing = True
            await self._server.sessions.lifetime.detach(session, self)

    def _alias(self) -> str | None:
        alias = (self._state or {}).get("episode_id")
        return str(alias) if alias is not None else None


class _SessionEnvironment:
    """Stands for the environment in upstream's pages and custom builders; attributes are those of the live instance.

    ``render_web`` and ``web_actions`` return what `draw` stored: it calls the environment's methods in the instance's
    place after each request, because a page calls them on the event loop.
    """

    def __init__(self, server: HTTPEnvServer, sample: Environment[Any, Any, Any] | None) -> None:
        factory = getattr(server._env_factory, "func", server._env_factory)
        self._cls: type = factory if inspect.isclass(factory) else type(sample) if sample is not None else Environment
        self.sample = sample
        self.session: Session | None = None
        self._server = server
        self._drawing: str | None = None
        self._actions: list[tuple[str, dict[str, Any]]] = []

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The environment's own class, for ``isinstance``."""
        return self._cls

    async def draw(self, session: Session, payload: dict[str, Any]) -> None:
        """Call ``render_web`` and ``web_actions`` of the session's instance and store the results.

        Nothing is called if the environment's class overrides neither.
        """
        observation = {**payload["observation"], "reward": payload["reward"], "done": payload["done"]}

        async def drawn(host: EnvHost) -> None:
            self._drawing = await host.run_in_place(lambda: host.env.render_web(observation), timeout_s=60.0)
            self._actions = await host.run_in_place(lambda: list(host.env.web_actions(observation)), timeout_s=60.0)

        self._drawing, self._actions = None, []
        if any(getattr(self._cls, name) is not getattr(Environment, name) for name in ("render_web", "web_actions")):
            await self._server.sessions.look(session, drawn)

    def render_web(self, _: dict[str, Any]) -> str | None:
        return self._drawing

    def web_actions(self, _: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        return self._actions

    def __getattr__(self, name: str) -> Any:
        live = self.__dict__.get("sample")
        if live is None and self.session is not None and self.session.host is not None:
            live = self.session.host.env
        if live is None:
            raise AttributeError(f"no page has reset the environment yet, so it has no {name}")
        return getattr(live, name)


def add_web_interface(
    app: FastAPI,
    server: HTTPEnvServer,
    *,
    gradio_builder: Callable[..., Any] | None = None,
    custom_tab_name: str = "Custom",
    custom_tab_primary: bool = False,
    show_default_tab: bool = True,
    title_override: str | None = None,
) -> None:
    """Serve upstream's web interface at ``/web``.

    Args:
        app: Application to add the routes to.
        server: Server of the environment.
        gradio_builder: As in upstream's ``create_app``, and so are the arguments after it.
        custom_tab_name: As above.
        custom_tab_primary: As above.
        show_default_tab: As above.
        title_override: As above.
    """
    sample = _sample_instance(server)
    try:
        manager = SessionWebManager(server, sample)
        _add_routes(app, manager)
        assert manager.metadata is not None
        blocks = upstream._build_gradio_blocks(
            manager,
            upstream._extract_action_fields(server.action_cls),
            manager.metadata,
            upstream._is_chat_env(server.action_cls),
            upstream.get_quick_start_markdown(manager.metadata, server.action_cls, server.observation_cls),
            display_title=title_override or get_gradio_display_title(manager.metadata),
            gradio_builder=gradio_builder,
            custom_tab_name=custom_tab_name,
            custom_tab_primary=custom_tab_primary,
            show_default_tab=show_default_tab,
        )
    finally:
        if sample is not None:
            manager._shown.sample = None
            sample.close()
    inner = FastAPI()
    gradio.mount_gradio_app(inner, blocks, path="/web", theme=OPENENV_GRADIO_THEME, css=OPENENV_GRADIO_CSS)
    app.mount("/web", _GradioPages(inner.router.routes[-1].app, server.runtime))  # type: ignore[attr-defined]


def replace_manager(manager: upstream.WebInterfaceManager, server: HTTPEnvServer) -> None:
    """Change upstream's manager of an application into `SessionWebManager`, so that its pages use a session of ours.

    The pages were built with upstream's instance and still draw observations with it; it is not reset or stepped again.
    """
    shown = _SessionEnvironment(server, None)
    manager.__class__ = SessionWebManager
    assert isinstance(manager, SessionWebManager)
    manager._bind(server, shown)
    manager.env = shown


def start_on_first_request(routes: Iterable[BaseRoute], runtime: Runtime) -> None:
    """Wrap the Gradio applications that upstream mounted in `_GradioPages`."""
    for route in routes:
        if isinstance(route, Mount) and isinstance(route.app, gradio.routes.App):
            route.app = _GradioPages(route.app, runtime)


def add_redirects(app: FastAPI) -> None:
    """Redirect ``/`` and ``/web`` to ``/web/`` below the path that the application is mounted at."""

    async def to_pages(request: Request) -> RedirectResponse:
        return RedirectResponse(f"{request.scope.get('root_path', '')}/web/")

    app.add_api_route("/", to_pages, include_in_schema=False)
    app.add_api_route("/web", to_pages, include_in_schema=False)


def _sample_instance(server: HTTPEnvServer) -> Environment[Any, Any, Any] | None:
    """Return an instance if the factory is a function or the environment has MCP tools; None if its class suffices.

    The pages read tools from it while they are built.
    """
    factory = getattr(server._env_factory, "func", server._env_factory)
    if inspect.isclass(factory) and not issubclass(factory, MCPEnvironment):
        return None
    return server._env_factory()


def _add_routes(app: FastAPI, manager: SessionWebManager) -> None:
    add_redirects(app)

    @app.get("/web/metadata")
    async def web_metadata() -> dict[str, Any]:
        metadata: dict[str, Any] = manager.metadata.model_dump()
        return metadata

    @app.post("/web/reset")
    async def web_reset(request: dict[str, Any] | None = Body(default=None)) -> dict[str, Any]:  # noqa: B008
        return await manager.reset_environment(request)

    @app.post("/web/step")
    async def web_step(request: dict[str, Any]) -> dict[str, Any]:
        try:
            if "message" in request:
                return await manager.step_environment(await manager.action_of_message(request["message"]))
            return await manager.step_environment(request.get("action", {}))
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_context=False)) from error

    @app.get("/web/state")
    async def web_state() -> dict[str, Any]:
        return await manager.fresh_state()

    @app.websocket("/ws/ui")
    async def web_updates(websocket: WebSocket) -> None:
        await manager.connect_websocket(websocket)
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                await websocket.receive_text()
        await manager.disconnect_websocket(websocket)


def _journaled_action(action: Action, given: dict[str, Any]) -> bytes:
    """Return the JSON to journal for an action: the action's own, or what the page sent if the action has none."""
    try:
        return to_json(action.model_dump(mode="json"))
    except PydanticSerializationError:
        return to_json(given)


class _GradioPages:
    """ASGI application of Gradio's pages, started by the first request, because no lifespan of a mounted app is run.

    It removes references to other hosts: style sheets of two fonts, which the system's own replace. A link to the
    page's icon is added to the HTML, as browsers otherwise ask the root of the host for one.
    """

    def __init__(self, pages: Any, runtime: Runtime) -> None:
        self._pages: ASGIApp = pages
        runtime.shutdown.on_begin(
            pages.stop_event.set
        )  # otherwise the event stream of an open page delays the shutdown
        self._blocks = blocks = pages.get_blocks()
        config: Any = blocks.config
        config["stylesheets"] = [sheet for sheet in config["stylesheets"] if "://" not in str(sheet)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._blocks.is_running and scope["type"] in ("http", "websocket"):
            self._blocks.run_startup_events()
            await self._blocks.run_extra_startup_events()
        if scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) == "/":
            readable = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
            scope, send = {**scope, "headers": readable}, _with_icon(send)
        await self._pages(scope, receive, send)


def _with_icon(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message["headers"] if name.lower() != b"content-length"]
            message = {**message, "headers": headers}
        elif b"<head>" in message.get("body", b""):
            body = message["body"].replace(b"<head>", b'<head><link rel="icon" href="favicon.ico" />', 1)
            message = {**message, "body": body}
        await send(message)

    return sent
