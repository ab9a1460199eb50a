"""Applications around an environment: upstream's functions, routes of their own, hooks, middleware, factories."""

import functools
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Header, HTTPException
from openenv.core.env_server import create_app, create_fastapi_app
from openenv.core.env_server.http_server import HTTPEnvServer

from .ledger import LedgerAction, LedgerEnvironment, LedgerObservation, LedgerState

HOOKS = []


def make():
    """An application with a route, a startup hook, a middleware and an exception handler of its own."""
    app = create_app(
        LedgerEnvironment,
        LedgerAction,
        LedgerObservation,
        env_name="ledger",
        max_concurrent_envs=4,
        state_cls=LedgerState,
    )
    app.router.on_startup.append(lambda: HOOKS.append("startup"))
    app.router.on_shutdown.append(lambda: HOOKS.append("shutdown"))

    @app.get("/hooks")
    def hooks():
        return HOOKS

    @app.get("/ready")
    def ready():
        return "the application's own"

    @app.get("/teapot")
    def teapot():
        raise LookupError("short and stout")

    @app.exception_handler(LookupError)
    async def answer(request, error):
        from fastapi.responses import JSONResponse

        return JSONResponse({"told": str(error)}, status_code=418)

    @app.middleware("http")
    async def stamp(request, call_next):
        response = await call_next(request)
        response.headers["X-Stamp"] = "ledger"
        return response

    return app


app = make()


def by_hand():
    """Upstream's server on an application with a lifespan, a title, and dependencies before every route."""

    def token(x_key: str = Header(default="")):
        if x_key != "sesame":
            raise HTTPException(403, "no key")

    @asynccontextmanager
    async def lifespan(app):
        HOOKS.append("lifespan")
        yield {"opened": True}
        HOOKS.append("lifespan over")

    class Noted(LedgerEnvironment):
        def close(self):
            super().close()
            HOOKS.append("environment closed")

    app = FastAPI(title="By hand", lifespan=lifespan, dependencies=[Depends(token)])
    HTTPEnvServer(Noted, LedgerAction, LedgerObservation, env_name="ledger").register_routes(app)

    @app.get("/{anything:path}")
    def rest(anything: str):
        return {"rest": anything}

    return app


def mounted():
    root = FastAPI()
    root.mount("/env", make())
    root.mount("/other", FastAPI())
    return root


def included():
    root = FastAPI()
    root.include_router(make().router, prefix="/env")
    return root


def two():
    root = FastAPI()
    root.mount("/a", make())
    root.mount("/b", make())
    return root


def twice():
    """One environment at two paths."""
    root = make()
    alias = FastAPI()
    alias.router.routes.extend(root.router.routes)
    root.mount("/alias", alias)
    return root


def production():
    return create_fastapi_app(LedgerEnvironment, LedgerAction, LedgerObservation, env_name="ledger", mode="production")


def environment():
    return LedgerEnvironment()


class Scaled(LedgerEnvironment):
    def __init__(self, factor):
        super().__init__()
        self._factor = factor

    def step(self, action: LedgerAction, timeout_s=None, **kwargs) -> LedgerObservation:
        return super().step(LedgerAction(amount=action.amount * self._factor))


tenfold = functools.partial(Scaled, factor=10)
server = HTTPEnvServer(LedgerEnvironment, LedgerAction, LedgerObservation, env_name="ledger", max_concurrent_envs=2)
instance_of_nothing = 7


class Single(LedgerEnvironment):
    """One instance at a time."""

    SUPPORTS_CONCURRENT_SESSIONS = False


def single():
    """An application whose environment takes one session."""
    return create_app(Single, LedgerAction, LedgerObservation, state_cls=LedgerState)
